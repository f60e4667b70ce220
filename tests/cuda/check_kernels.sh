#!/usr/bin/env bash
# Every kernel compiles for every architecture with warnings as errors, and spills no more registers than spills.txt allows;
# nothing touches the registers of an asynchronous product that is under way, nothing of a chain runs ahead of its turn; the NVFP4 kernel for sm_120a holds the
# block-scaled product, conversions to E2M1 and bulk copies, and nothing of the version in software. Needs nvcc, Python and
# no device.
#   check_kernels.sh ROOT NVCC [ARCH ...]
set -euo pipefail

root=$1 nvcc=$2
shift 2
archs=("$@")
[ $# -gt 0 ] || archs=(80 86 89 90 120a)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

{
    for source in "$root"/src/cuda/*.cu "$root"/src/cuda/warp_mma/*.cu; do
        for arch in "${archs[@]}"; do
            echo "$source $arch"
        done
    done
    for source in "$root"/src/cuda/wgmma/*.cu; do # instructions of this device alone
        echo "$source 90a"
    done
} | xargs -P "$(nproc)" -L 1 bash -c '
    name=$(basename "$2" .cu)
    "$0" -std=c++17 -O3 -Werror all-warnings -Xcompiler -Wall,-Wextra -Xptxas -v -I"$1/include" -I"$1/src" \
        -gencode arch=compute_$3,code=sm_$3 -cubin -o "'"$folder"'/$name.$3.cubin" "$2" >"'"$folder"'/$name.$3.log" 2>&1 ||
        { cat "'"$folder"'/$name.$3.log"; exit 255; }' "$nvcc" "$root"

# A product that ptxas runs by itself instead of in a pipeline is a note, not a warning.
if grep -h -E "wgmma.mma_async instructions are serialized" "$folder"/*.90a.log; then
    exit 1
fi

# No register of such a product is touched before it is done.
for name in cold exact fix hot both_passes; do
    "$nvcc" -std=c++17 -O3 -I"$root/include" -I"$root/src" -arch=compute_90a -ptx -o "$folder/$name.90a.ptx" "$root/src/cuda/wgmma/$name.cu"
done
python3 "$root/tests/cuda/in_flight.py" "$folder"/*.90a.ptx

# Kernels that may start before the one before them has ended wait for it before they touch anything of it.
for source in wgmma/prep wgmma/means wgmma/pairs wgmma/bias warp_mma/judge warp_mma/finish; do
    "$nvcc" -std=c++17 -O3 -I"$root/include" -I"$root/src" -arch=compute_90a -ptx -o "$folder/${source#*/}.chain.ptx" \
        "$root/src/cuda/$source.cu"
done
python3 "$root/tests/cuda/chain.py" "$folder"/*.90a.ptx "$folder"/*.chain.ptx

# "ARCH KERNEL BYTES" of every kernel that spills, sorted.
for log in "$folder"/*.log; do
    arch=$(basename "$log" .log)
    awk -v arch="${arch#*.}" '
        /Compiling entry function/ { split($0, part, "\047"); name = part[2]; kernels++ }
        /bytes spill stores/ && name != "" {
            if ($5 > 0) print arch, name, $5
            name = ""
        }
        ' "$log"
done | c++filt | sed -E 's/void //; s/\(apa_cuda_job.*\)//; s/, /,/g; s/> >/>>/g' | sort >"$folder/spills"

count=$(grep -h -c "Compiling entry function" "$folder"/*.log | paste -sd+ | bc)
echo "$count kernels for ${archs[*]}; those that spill (architecture, kernel, bytes):"
cat "$folder/spills"
[ "$count" -gt 0 ]
awk 'NR == FNR { if ($1 !~ /^#/) allowed[$1 " " $2] = $3; next }
     $3 + 0 > allowed[$1 " " $2] + 0 { printf "%s %s spills %d bytes, spills.txt allows %d\n", $1, $2, $3, allowed[$1 " " $2]; failed = 1 }
     END { exit failed }' "$root/tests/cuda/spills.txt" "$folder/spills"

case " ${archs[*]} " in *" 120a "*) ;; *) exit 0 ;; esac
"$nvcc" -std=c++17 -O3 -I"$root/include" -I"$root/src" -arch=compute_120a -ptx -o "$folder/nvfp4.ptx" "$root/src/cuda/warp_mma/cold_nvfp4.cu"
for wanted in 'mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64' 'cvt.rn.satfinite.e2m1x2.f32' \
    'cp.async.bulk.shared::cluster.global.mbarrier'; do
    n=$(grep -c -F "$wanted" "$folder/nvfp4.ptx" || true)
    echo "sm_120a: $n $wanted"
    [ "$n" -gt 0 ]
done
if grep -q mma_nvfp4_software "$folder/nvfp4.ptx"; then
    echo "sm_120a: calls the product in software"
    exit 1
fi
if command -v cuobjdump >/dev/null; then # not part of every toolkit
    for wanted in 'OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X' 'F2FP.SATFINITE.E2M1' UBLKCP; do
        n=$(cuobjdump --dump-sass "$folder/cold_nvfp4.120a.cubin" | grep -c -F "$wanted" || true)
        echo "sm_120a machine code: $n $wanted"
        [ "$n" -gt 0 ]
    done
fi
