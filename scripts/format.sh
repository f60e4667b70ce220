#!/usr/bin/env bash
# clang-format over every C file of the project; with --check only says what it would change, and fails if anything.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
mode=(-i)
[ "${1:-}" != --check ] || mode=(--dry-run -Werror)
find . \( -name '.git' -o -name 'build*' \) -prune -o -type f \( -name '*.c' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' \) -print0 |
    xargs -0 clang-format "${mode[@]}"
