#!/usr/bin/env bash
# Fuzzing with libFuzzer, AddressSanitizer and UndefinedBehaviourSanitizer (clang): every target in turn, from the seeds in
# tests/fuzz/corpus and what earlier runs found (build-fuzz/corpus).
#   scripts/fuzz.sh [SECONDS [TARGET...]]      SECONDS for each target, default 20
# A finding stops the run; its input lies in build-fuzz/ and is repeated by `build-fuzz/fuzz_TARGET FILE`.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
seconds=${1:-20}
[ $# -eq 0 ] || shift
targets=("$@")
[ ${#targets[@]} -gt 0 ] || targets=(npy safetensors dump json descriptors attention)

command -v clang >/dev/null || { echo "fuzz.sh: clang is not there (scripts/setup.sh ci)" >&2; exit 1; }
cmake -S . -B build-fuzz -G Ninja -DCMAKE_C_COMPILER=clang -DCMAKE_BUILD_TYPE=RelWithDebInfo -DAPA_FUZZ=ON -DAPA_TESTS=ON >/dev/null
cmake --build build-fuzz --target $(printf 'fuzz_%s ' "${targets[@]}")
for target in "${targets[@]}"; do
    mkdir -p "build-fuzz/corpus/$target"
    seed=${APA_TEST_SEED:-$(date +%s)}
    echo "fuzz_$target: $seconds s, seed $seed"
    # tasks of the library run on this one thread; a leak is a finding at the end
    (cd build-fuzz && "./fuzz_$target" -max_total_time="$seconds" -seed="$seed" -timeout=25 -rss_limit_mb=4096 \
        -verbosity=0 -print_final_stats=1 "corpus/$target" "../tests/fuzz/corpus/$target" 2>&1 |
        { grep -vE '^(INFO|"|#|\s*NEW_FUNC|stat::(new|slowest|peak))' || true; }
     exit "${PIPESTATUS[0]}")
done
