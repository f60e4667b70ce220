#!/usr/bin/env bash
# Installs the Debian packages that a task needs and this machine lacks.
#
#   scripts/setup.sh [build|test|python|format|ci|aarch64]     (default: build)
#
# What is needed is tried out (does the tool run, does the library link?), so tools and libraries from elsewhere count too,
# and when nothing is missing nothing is asked: no apt-get, no root, no network.
set -euo pipefail

task=${1:-build}
missing=()

die() { echo "setup.sh: $*" >&2; exit 1; }

# need PACKAGE COMMAND…: PACKAGE is missing when COMMAND fails.
need() {
    local package=$1
    shift
    "$@" >/dev/null 2>&1 || missing+=("$package")
}

# links HEADER LIBRARY: can a C program use it?
links() {
    printf '#include <%s>\nint main(void) { return 0; }\n' "$1" |
        cc -x c - -x none "-l$2" -o /dev/null
}

# CMOCKA wants four headers before its own.
links_cmocka() {
    printf '#include <%s>\n' setjmp.h stdarg.h stddef.h stdint.h cmocka.h | cc -x c -fsyntax-only - && pkg-config --exists cmocka
}

need_compiler() {
    need build-essential sh -c 'command -v gcc && command -v g++ && command -v make && echo "#include <stdio.h>" | cc -E -'
}

need_build() {
    need_compiler
    need cmake cmake --version
    need ninja-build ninja --version
    need pkg-config pkg-config --version
    need libpthreadpool-dev links pthreadpool.h pthreadpool
    need libcpuinfo-dev links cpuinfo.h cpuinfo
    need libjansson-dev pkg-config --exists jansson
    need libpng-dev pkg-config --exists libpng
}

need_test() {
    need_build
    need libcmocka-dev links_cmocka
    need libopenmpi-dev mpicc --version # without it libapa_dist is left out and its tests are skipped
    need openmpi-bin mpirun --version
    need python3-venv python3 -c 'import ensurepip, venv'
}

need_python() {
    need_compiler
    need libpthreadpool-dev links pthreadpool.h pthreadpool
    need libcpuinfo-dev links cpuinfo.h cpuinfo
    need python3-venv python3 -c 'import ensurepip, venv'
}

need_format() {
    need clang-format clang-format --version
}

need_aarch64() {
    need_compiler
    need cmake cmake --version
    need ninja-build ninja --version
    need pkg-config pkg-config --version
    need gcc-aarch64-linux-gnu aarch64-linux-gnu-gcc --version
    need libc6-dev-arm64-cross sh -c 'echo "int main(void) { return 0; }" | aarch64-linux-gnu-gcc -x c - -o /dev/null'
    need qemu-user qemu-aarch64 --version
}

case $task in
build) need_build ;;
test) need_test ;;
python) need_python ;; # CMake and ninja come with the Python package's build
format) need_format ;;
aarch64) need_aarch64 ;;
ci)
    need_test
    need_format
    need clang clang --version
    need chromium sh -c 'command -v chromium || command -v chromium-browser || command -v google-chrome'
    ;;
*) die "unknown task '$task', expected build, test, python, format, ci or aarch64" ;;
esac

[ ${#missing[@]} -gt 0 ] || exit 0

command -v apt-get >/dev/null || die "needs ${missing[*]} (Debian's names), and there is no apt-get to install them with"
as_root=()
if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null || die "needs ${missing[*]}; run as root, or install sudo: apt-get install ${missing[*]}"
    as_root=(sudo)
fi
echo "setup.sh: installing ${missing[*]}"
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get update -q
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${missing[@]}"
