#!/usr/bin/env bash
# Every public header by itself, twice in a row, as C11 and as C++17, with all warnings as errors.
#   test_headers.sh INCLUDE_DIR CC CXX
set -euo pipefail

include=$1 cc=$2 cxx=$3
failed=0 tried=0
warnings=(-Wall -Wextra -pedantic -Werror -fsyntax-only -I"$include")

for header in "$include"/apa/*.h; do
    name=apa/$(basename "$header")
    for language in c:-std=c11 c++:-std=c++17; do
        compiler=$cc
        [ "${language%%:*}" = c ] || compiler=$cxx
        tried=$((tried + 1))
        printf '#include <%s>\n#include <%s>\nint apa_headers_unit_is_not_empty;\n' "$name" "$name" |
            "$compiler" -x "${language%%:*}" "${language#*:}" "${warnings[@]}" - || {
            echo "$name does not compile alone as ${language#*-std=}"
            failed=$((failed + 1))
        }
    done
done
echo "$tried compiled, $failed failed"
[ "$tried" -gt 0 ] && [ "$failed" = 0 ]
