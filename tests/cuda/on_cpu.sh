#!/usr/bin/env bash
# Builds and runs the checks that imitate a device on a CPU (tests/cuda/on_cpu.h). Needs CUDA's headers and no device.
#   on_cpu.sh ROOT NVCC CXX
set -euo pipefail

root=$1 toolkit=$(dirname "$(readlink -f "$2")")/.. cxx=$3
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if ! echo '#include <barrier>' | "$cxx" -std=c++20 -fsyntax-only -x c++ - 2>/dev/null; then
    echo "skipped: $cxx has no std::barrier"
    exit 77
fi
headers=()
for include in "$toolkit"/include "$toolkit"/targets/*/include; do
    headers+=(-isystem "$include")
done
for name in on_cpu_prep on_cpu_codes on_cpu_end on_cpu_rows; do
    "$cxx" -std=c++20 -O1 -Wall -Wextra -Werror -Wno-unknown-pragmas -Wno-unused-function -I"$root" -I"$root/include" -I"$root/src" \
        "${headers[@]}" -o "$folder/$name" "$root/tests/cuda/$name.cpp" -pthread
    "$folder/$name"
done
