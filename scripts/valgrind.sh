#!/usr/bin/env bash
# Tests under valgrind's memcheck: errors and leaks of any kind are failures. valgrind knows no AVX-512, so the level is avx2
# or, with APA_ISA=scalar, portable C.
#   scripts/valgrind.sh [BUILD]      default build-gcc (make test)
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=${1:-build-gcc}
export APA_ISA=${APA_ISA:-avx2}
check() {
    echo "valgrind: $*"
    valgrind -q --error-exitcode=9 --leak-check=full --show-leak-kinds=definite,indirect,possible --track-origins=no "$@"
}
check "$build/property" --cases "${CASES:-60}"
check "$build/test_allocation"
check "$build/test_io_damage"
check "$build/test_io"
for target in npy safetensors dump json; do
    check "$build/fuzz_$target" -seconds=3 "tests/fuzz/corpus/$target"
done
