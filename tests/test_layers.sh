#!/usr/bin/env bash
# The layers are obeyed, and scripts/check-layers.sh does see a breach: each line of the list below is planted in a copy of
# the tree, and must be found.
#   test_layers.sh ROOT
set -euo pipefail

root=$1
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

"$root/scripts/check-layers.sh" "$root"

mkdir -p "$folder/include"
cp -r "$root/src" "$root/cli" "$folder"
cp -r "$root/include/apa" "$folder/include"
"$root/scripts/check-layers.sh" "$folder" >/dev/null

failed=0 tried=0
while read -r file include; do
    tried=$((tried + 1))
    mkdir -p "$(dirname "$folder/$file")"
    printf '#include %s\n' "$include" >"$folder/$file"
    if "$root/scripts/check-layers.sh" "$folder" >"$folder/said" || ! grep -q "^$file:" "$folder/said"; then
        echo "not found: $file with #include $include"
        failed=$((failed + 1))
    fi
    rm "$folder/$file"
done <<'PLANTED'
src/core/planted.c "formats/formats.h"
src/formats/planted.c "recipe/defaults.h"
src/cpu/planted.c "reference/reference.h"
src/reference/planted.h "cpu/engine.h"
src/eval/planted.c "cpu/engine.h"
src/io/planted.c "attention/plan.h"
src/recipe/planted.def "attention/plan.h"
src/attention/planted.c "eval/error.h"
src/attention/planted.c "plan.h"
src/cpu/planted.c "apa/eval.h"
src/core/planted.c "apa/io.h"
src/cpu/planted.c <pthreadpool.h>
src/cpu/planted.c <pthread.h>
src/cpu/planted.c <immintrin.h>
src/cpu/scalar/planted.c <immintrin.h>
src/io/planted.c <jansson.h>
src/cpu/planted.c <cuda_runtime.h>
src/cuda/planted.cuh "cpu/kernels.h"
src/cuda/planted.cu <omp.h>
src/eval/planted.c <omp.h>
src/dist/planted.c "core/call.h"
src/dist/planted.c <cuda_runtime.h>
src/attention/planted.c "dist/job.h"
src/cpu/planted.c <mpi.h>
src/unknown/planted.c "core/call.h"
cli/planted.c "core/call.h"
cli/planted.c "../src/core/call.h"
include/apa/planted.h "core/call.h"
include/apa/planted.h "apa/io.h"
PLANTED
echo "$tried planted, $failed not found"
[ "$failed" = 0 ]
