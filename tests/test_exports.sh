#!/usr/bin/env bash
# The shared library exports the functions that include/apa declares and nothing else; the static one defines no global
# name that does not start with apa_.
#   test_exports.sh INCLUDE_DIR CC LIBAPA_SO LIBAPA_A [dist]      dist: the two are libapa_dist
set -euo pipefail

include=$1 cc=$2 shared=$3 static=$4 part=${5:-}
# apa_dist_nccl_* is a library of its own again, static, and built only with CUDA.
its_own() {
    case $part in
    dist) grep '^apa_dist_' | grep -v '^apa_dist_nccl_' ;;
    *) grep -v '^apa_dist_' ;;
    esac
}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# All headers preprocessed into one line; then bodies of structs and enums out, so that only declarations are left.
for header in "$include"/apa/*.h; do printf '#include "apa/%s"\n' "$(basename "$header")"; done |
    "$cc" -std=c11 -E -P -I"$include" -x c - | tr '\n' ' ' | sed -e ':again' -e 's/{[^{}]*}//g' -e 't again' |
    tr ';' '\n' | grep -v '\<typedef\>' | grep -oE '\<apa_[a-z0-9_]+ *\(' | tr -d ' (' | sort -u | its_own >"$folder/declared"

# Sanitizers add names of their own.
nm -D --defined-only "$shared" | awk '{ print $NF }' | sed 's/@.*//' | grep -v '^__\(odr_\)\?asan' | sort -u >"$folder/exported"

nm -g --defined-only "$static" | awk 'NF == 3 { print $3 }' | grep -v '^__\(odr_\)\?asan' | sort -u >"$folder/global"

count=$(wc -l <"$folder/declared")
echo "$count declared, $(wc -l <"$folder/exported") exported, $(wc -l <"$folder/global") global in the static library"
failed=0
differ() { # TEXT NAMES
    [ -z "$2" ] && return
    printf '%s:\n%s\n' "$1" "$2"
    failed=1
}
[ "$count" -gt 0 ] || { echo "no declaration found"; failed=1; }
differ "declared and not exported" "$(comm -23 "$folder/declared" "$folder/exported")"
differ "exported and not declared" "$(comm -13 "$folder/declared" "$folder/exported")"
differ "global and not apa_*" "$(grep -v '^apa_' "$folder/global" || true)"
exit $failed
