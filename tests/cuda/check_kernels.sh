#!/usr/bin/env bash
# Every kernel compiles for every architecture with warnings as errors, and spills no more registers than spills.txt allows.
# Needs nvcc and no device.
#   check_kernels.sh ROOT NVCC [ARCH ...]
set -euo pipefail

root=$1 nvcc=$2
shift 2
archs=("$@")
[ $# -gt 0 ] || archs=(80 86 89 90 120a)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

for source in "$root"/src/cuda/warp_mma/*.cu; do
    for arch in "${archs[@]}"; do
        echo "$source $arch"
    done
done | xargs -P "$(nproc)" -L 1 bash -c '
    name=$(basename "$2" .cu)
    "$0" -std=c++17 -O3 -Werror all-warnings -Xcompiler -Wall,-Wextra -Xptxas -v -I"$1/include" -I"$1/src" \
        -gencode arch=compute_$3,code=sm_$3 -cubin -o "'"$folder"'/$name.$3.cubin" "$2" >"'"$folder"'/$name.$3.log" 2>&1 ||
        { cat "'"$folder"'/$name.$3.log"; exit 255; }' "$nvcc" "$root"

# "ARCH KERNEL BYTES" of every kernel that spills, sorted.
for log in "$folder"/*.log; do
    arch=$(basename "$log" .log)
    awk -v arch="${arch#*.}" '
        /Compiling entry function/ { split($0, part, "\047"); name = part[2]; kernels++ }
        /bytes spill stores/ && name != "" {
            if ($5 > 0) print arch, name, $5
            name = ""
        }
        END { if (kernels == 0) print arch, "none", 0 > "/dev/stderr" }' "$log"
done | c++filt | sed -E 's/void //; s/\(apa_cuda_job.*\)//; s/, /,/g' | sort >"$folder/spills"

count=$(grep -h -c "Compiling entry function" "$folder"/*.log | paste -sd+ | bc)
echo "$count kernels for ${archs[*]}; those that spill (architecture, kernel, bytes):"
cat "$folder/spills"
[ "$count" -gt 0 ]
awk 'NR == FNR { if ($1 !~ /^#/) allowed[$1 " " $2] = $3; next }
     $3 + 0 > allowed[$1 " " $2] + 0 { printf "%s %s spills %d bytes, spills.txt allows %d\n", $1, $2, $3, allowed[$1 " " $2]; failed = 1 }
     END { exit failed }' "$root/tests/cuda/spills.txt" "$folder/spills"
