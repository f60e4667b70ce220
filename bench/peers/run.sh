#!/usr/bin/env bash
# Installs the peers under a folder, builds libapa and ggml's CPU backend there, and measures all of them on the same
# arrays in one run (peers.py).
#
#   bench/peers/run.sh FOLDER [options of peers.py: --shapes, --repeats, --threads, --page docs/performance.md ...]
#
# What cannot be installed or built is named in the table with the reason. Nothing outside FOLDER is written but the page.
set -euo pipefail

version=0.3.36 # of llama-cpp-python, whose source package carries ggml
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
[ $# -ge 1 ] || { echo "run.sh: expected a folder" >&2; exit 2; }
mkdir -p "$1"
folder=$(cd "$1" && pwd)
shift

"$root/scripts/setup.sh" build >/dev/null 2>&1 || true
[ -x "$folder/venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$folder/venv"
# One by one: a peer that is not to be had must not keep the others out.
while read -r package; do
    "$folder/venv/bin/pip" install -q --disable-pip-version-check "$package" >"$folder/pip.log" 2>&1 ||
        echo "run.sh: $package could not be installed: $(tail -1 "$folder/pip.log")" >&2
done <"$root/bench/peers/requirements.txt"

cmake -S "$root" -B "$folder/apa" -G Ninja -DCMAKE_BUILD_TYPE=Release -DAPA_TESTS=OFF >"$folder/apa.log"
cmake --build "$folder/apa" --target apa_command >>"$folder/apa.log"

build_ggml() {
    local source=$folder/llama
    if [ ! -e "$source/vendor/llama.cpp/ggml/include/ggml.h" ]; then
        "$folder/venv/bin/pip" download -q --disable-pip-version-check --no-deps --no-binary :all: -d "$folder" \
            "llama-cpp-python==$version"
        mkdir -p "$source"
        tar xzf "$folder/llama_cpp_python-$version.tar.gz" -C "$source" --strip-components=1
    fi
    touch "$source/vendor/llama.cpp/ggml/ggml.pc.in" # the package leaves it out, and only installing needs it
    cmake -S "$source/vendor/llama.cpp/ggml" -B "$folder/ggml" -G Ninja -DCMAKE_BUILD_TYPE=Release \
        -DBUILD_SHARED_LIBS=OFF -DGGML_NATIVE=ON -DGGML_OPENMP=OFF -DGGML_CCACHE=OFF -DGGML_BUILD_TESTS=OFF -DGGML_BUILD_EXAMPLES=OFF
    cmake --build "$folder/ggml" --target ggml-cpu ggml ggml-base
    cc -O2 -std=c11 -I"$source/vendor/llama.cpp/ggml/include" -o "$folder/ggml_attention" \
        "$root/bench/peers/ggml_attention.c" "$folder/ggml/src/libggml-cpu.a" "$folder/ggml/src/libggml.a" \
        "$folder/ggml/src/libggml-cpu.a" "$folder/ggml/src/libggml-base.a" -lstdc++ -lm -lpthread -ldl
}
build_ggml >"$folder/ggml.log" 2>&1 || echo "run.sh: ggml could not be built, see $folder/ggml.log" >&2

exec "$folder/venv/bin/python" "$root/bench/peers/peers.py" "$folder" "$@"
