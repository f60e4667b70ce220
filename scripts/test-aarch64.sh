#!/usr/bin/env bash
# The NEON level: cross-builds for 64-bit ARM with Debian's compiler and runs the tests of its kernels, and a short
# end-to-end test of the CPU engine, under qemu-user. Nothing of the machine but its packages of tools is changed: the arm64
# packages of the dependencies are unpacked under build/aarch64.
#   scripts/test-aarch64.sh [--setup-only | --long]
# --long also runs the engine's long tests, about half an hour of emulation.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD/build/aarch64/root
tree=$PWD/build/aarch64/build
# CPUs that qemu-user pretends to be: one with the dot product, one without, where the level must not be chosen.
cpu=neoverse-n1
cpu_without=cortex-a72
tests=(test_cpu_kernels_f32 test_cpu_kernels_i8 test_cpu_kernels_bf16 test_cpu_decode test_cpu_prep test_cpu_prep_tiles test_cpu_verdict test_cpu_levels
       test_context test_formats test_blocks)
long_tests=(test_cpu_engine test_cpu_adaptive)
packages=(libpthreadpool-dev libpthreadpool0 libcpuinfo-dev libcpuinfo0 libjansson-dev libjansson4 libpng-dev libpng16-16 zlib1g-dev
          zlib1g libcmocka-dev libcmocka0)

step() { printf '\n== %s (%d s so far)\n' "$1" "$SECONDS"; }

# The arm64 packages by an apt of our own: their -dev packages can't all be installed beside the machine's.
fetch_packages() {
    local apt=$PWD/build/aarch64/apt
    rm -rf "$apt" "$root"
    mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial" "$apt/debs" "$root"
    touch "$apt/status"
    local options=(-q -o APT::Architecture=arm64 -o APT::Architectures::=arm64 -o "Dir::State::lists=$apt/lists"
                   -o "Dir::State::status=$apt/status" -o "Dir::Cache=$apt/cache" -o APT::Sandbox::User=root
                   -o Acquire::Languages=none)
    apt-get "${options[@]}" update
    (cd "$apt/debs" && apt-get "${options[@]}" download "${packages[@]}")
    for package in "$apt/debs"/*.deb; do
        dpkg-deb -x "$package" "$root"
    done
    rm -rf "$apt"
    printf '%s\n' "${packages[@]}" > "$root/done"
}

step "tools and packages"
scripts/setup.sh aarch64
cmp -s <(printf '%s\n' "${packages[@]}") "$root/done" || fetch_packages
[ "${1:-}" != --setup-only ] || exit 0

step "cross build, warnings as errors"
cmake -S . -B "$tree" -G Ninja -DCMAKE_TOOLCHAIN_FILE=cmake/toolchain-aarch64.cmake -DAPA_AARCH64_ROOT="$root" \
    -DAPA_AARCH64_CPU="$cpu" -DAPA_WERROR=ON
cmake --build "$tree" --target apa_command property "${tests[@]}"

step "tests under qemu-user as $cpu"
pattern=$(IFS='|'; echo "${tests[*]}")
ctest --test-dir "$tree" -R "^($pattern)\$" -j "$(nproc)" --output-on-failure --no-label-summary

# That the level was there at all: a wrong detection would pass everything by testing the portable level alone.
emulate() {
    local as=$1 program=$2
    shift 2
    qemu-aarch64 -cpu "$as" -L /usr/aarch64-linux-gnu -E LD_LIBRARY_PATH="$root/usr/lib/aarch64-linux-gnu:$root/lib/aarch64-linux-gnu" "$tree/$program" "$@"
}
emulate "$cpu" apa info | grep 'instruction set level neon$' >/dev/null || { echo "test-aarch64.sh: $cpu does not use neon" >&2; exit 1; }
emulate "$cpu_without" apa info | grep 'instruction set level scalar$' >/dev/null ||
    { echo "test-aarch64.sh: $cpu_without has no dot product and must use scalar" >&2; exit 1; }

step "random problems on the engine"
emulate "$cpu" property --engine cpu --cases 100

if [ "${1:-}" = --long ]; then
    step "the long engine tests"
    cmake --build "$tree" --target "${long_tests[@]}"
    for test in "${long_tests[@]}"; do
        emulate "$cpu" "$test"
    done
    step "done: level neon tested; its speed can't be under an emulator"
else
    step "done: level neon tested; left out: ${long_tests[*]} (--long), and its speed, which an emulator can't tell"
fi
