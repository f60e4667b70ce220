#!/usr/bin/env bash
# Fetches a pinned llama.cpp (the source package of llama-cpp-python carries it), builds it with loadable backends and the
# plugin beside it, and with --test runs ggml's own test of the operator on the plugin.
#
#   plugins/ggml/build.sh [--test] [FOLDER]     (default: build/llama.cpp)
#
# Leaves FOLDER/bin/llama-bench, llama-perplexity, llama-completion, llama-quantize, test-backend-ops and FOLDER/libggml-apa.so.
set -euo pipefail

version=0.3.36
sha256=832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
run_tests=no folder=$root/build/llama.cpp
for argument in "$@"; do
    case $argument in
        --test) run_tests=yes ;;
        -*) echo "build.sh: unknown option $argument, expected --test" >&2; exit 2 ;;
        *) folder=$argument ;;
    esac
done
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
"$root/scripts/setup.sh" test

# ggml with loadable backends wants to be told what the CPU has.
cpu_options() {
    local flag
    for flag in avx avx2 fma f16c bmi2 avx512f:AVX512 avx512_vbmi avx512_vnni avx512_bf16 avx_vnni; do
        if grep -qw "${flag%%:*}" /proc/cpuinfo; then
            local name=${flag##*:}
            printf -- '-DGGML_%s=ON ' "${name^^}"
        fi
    done
}

source=$folder/source
if [ ! -e "$source/vendor/llama.cpp/ggml/include/ggml.h" ]; then
    [ -x "$folder/venv/bin/pip" ] || "${PYTHON:-python3}" -m venv "$folder/venv"
    "$folder/venv/bin/pip" download -q --disable-pip-version-check --no-deps --no-binary :all: -d "$folder" \
        "llama-cpp-python==$version"
    archive=$folder/llama_cpp_python-$version.tar.gz
    echo "$sha256  $archive" | sha256sum -c --quiet
    mkdir -p "$source"
    tar xzf "$archive" -C "$source" --strip-components=1
fi
llama=$source/vendor/llama.cpp

# shellcheck disable=SC2046 # options are words
cmake -S "$llama" -B "$folder/tools" -G Ninja -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DGGML_BACKEND_DL=ON \
    -DGGML_NATIVE=OFF $(cpu_options) -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_SERVER=OFF \
    -DLLAMA_BUILD_TESTS=ON >"$folder/tools.log"
cmake --build "$folder/tools" --target llama-bench llama-perplexity llama-completion llama-quantize test-backend-ops ggml-cpu \
    >>"$folder/tools.log" || { tail -20 "$folder/tools.log" >&2; exit 1; }
ln -sfn tools/bin "$folder/bin"

cmake -S "$root" -B "$folder/plugin" -G Ninja -DCMAKE_BUILD_TYPE=Release -DAPA_TESTS=OFF -DAPA_COMMAND=OFF \
    -DAPA_GGML_SOURCE="$llama/ggml" -DAPA_GGML_LIBRARY="$folder/bin/libggml-base.so" >"$folder/plugin.log"
cmake --build "$folder/plugin" --target apa_ggml >>"$folder/plugin.log" || { tail -20 "$folder/plugin.log" >&2; exit 1; }
cp "$folder/plugin/libggml-apa.so" "$folder/libggml-apa.so"
echo "$folder/libggml-apa.so"

[ $run_tests = yes ] || exit 0
log=$folder/test-backend-ops.log
cd "$folder/bin"
status=0
GGML_BACKEND_PATH=$folder/libggml-apa.so ./test-backend-ops test -o FLASH_ATTN_EXT -b APA >"$log" 2>&1 || status=$?
plain=$(sed 's/\x1b\[[0-9;]*m//g' "$log")
passed=$(grep -c '^  FLASH_ATTN_EXT.*: OK$' <<<"$plain" || true)
refused=$(grep -c '^  FLASH_ATTN_EXT.*: not supported' <<<"$plain" || true)
failed=$(grep -c '^  FLASH_ATTN_EXT.*: FAIL' <<<"$plain" || true)
echo "test-backend-ops FLASH_ATTN_EXT on APA: $passed passed, $failed failed, $refused not supported ($log)"
[ $status = 0 ] && [ "$failed" = 0 ] && [ "$passed" -gt 0 ]
