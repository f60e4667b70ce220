#!/usr/bin/env bash
# Who may include what (docs/design.md, "Layers"). Every #include of src/, cli/ and include/apa is held against the tables
# below; exit 1 and one line for each that is not allowed.
#   scripts/check-layers.sh [ROOT]
set -euo pipefail

cd "${1:-$(dirname "${BASH_SOURCE[0]}")/..}"
find src cli include/apa \( -name '*.c' -o -name '*.h' -o -name '*.def' -o -name '*.cu' -o -name '*.cuh' \) -print0 | sort -z |
    xargs -0 awk '
function allow(layer, list,   names, n, i) {
    known[layer] = 1
    n = split(list, names, " ")
    for (i = 1; i <= n; i++) may[layer, names[i]] = 1
}
function only(header, list,   names, n, i) {
    special[header] = 1
    n = split(list, names, " ")
    for (i = 1; i <= n; i++) home[header, names[i]] = 1
}
function wrong(why) {
    printf "%s:%d: %s includes %s: %s\n", FILENAME, FNR, layer, header, why
    failed = 1
}
BEGIN {
    # layer      the layers whose headers it may include
    allow("core",      "core")
    allow("formats",   "core formats")
    allow("recipe",    "core formats recipe")
    allow("reference", "core formats recipe reference")
    allow("cpu",       "core formats recipe cpu")
    allow("cuda",      "core formats recipe cuda")
    allow("attention", "core formats recipe reference cpu cuda attention")
    allow("cache",     "core formats recipe cpu attention cache")
    allow("io",        "core formats io")
    allow("eval",      "core formats recipe attention eval")
    allow("dist",      "dist")
    allow("cli",       "cli")
    allow("include",   "")

    # Public headers that not every layer may see, and headers from outside the C library with the one place for each.
    only("apa/io.h",      "io cli")
    only("apa/eval.h",    "eval cli")
    only("pthreadpool.h", "core")
    only("cpuinfo.h",     "core")
    only("cpuid.h",       "core")
    only("mpi.h",         "dist cli")
    only("pthread.h",     "core dist")
    only("nccl.h",        "dist/nccl")
    only("apa/dist.h",    "dist cli")
    only("apa/dist_nccl.h", "dist/nccl")
    only("jansson.h",     "cli")
    only("png.h",         "cli")
    only("immintrin.h",   "cpu/avx2 cpu/avx512")
    only("arm_neon.h",    "cpu/neon")
    n = split("cuda cuda_runtime cuda_runtime_api cuda_fp16 cuda_bf16 cuda_fp8 cuda_fp4 math_constants mma", cuda, " ")
    for (i = 1; i <= n; i++) only(cuda[i] ".h", "cuda cuda/warp_mma cuda/wgmma dist/nccl")

    libc = " assert ctype errno fcntl fenv float inttypes limits locale math sched signal stdarg stdatomic stdbool stddef stdint " \
           "stdio stdlib string strings sys/mman sys/stat sys/types sys/utsname time unistd "
}
FNR == 1 {
    files++
    n = split(FILENAME, part, "/")
    layer = part[1] == "src" ? part[2] : part[1]
    folder = part[1] == "src" && n > 3 ? layer "/" part[3] : layer
    if (!(layer in known)) {
        printf "%s: layer %s is not in the table of scripts/check-layers.sh\n", FILENAME, layer
        failed = 1
    }
}
/^[ \t]*#[ \t]*include/ {
    header = $0
    sub(/^[^"<]*/, "", header)
    quoted = substr(header, 1, 1) == "\""
    header = substr(header, 2)
    sub(/[">].*/, "", header)
    from = header
    sub(/\/.*/, "", from)
    if (header in special) {
        if (!((header, layer) in home) && !((header, folder) in home)) wrong("that header has its place elsewhere")
    } else if (from == "apa" && header ~ /^apa\//) {
        next
    } else if (!quoted) {
        name = header
        sub(/\.h$/, "", name)
        if (index(libc, " " name " ") == 0) wrong("neither the C library nor a dependency listed for it")
    } else if (header !~ /\//) {
        if (layer != "cli") wrong("name the layer: \"" layer "/" header "\"")
    } else if (!((layer, from) in may)) {
        wrong("against the direction of the layers")
    }
}
END {
    if (files == 0) { print "no files found"; failed = 1 }
    if (!failed) printf "%d files obey the layers\n", files
    exit failed
}'
