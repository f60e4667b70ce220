#!/usr/bin/env bash
# The documents against the tree: every relative link leads to a file, and the C of the README is the middle of
# examples/first.c, which is compiled and run.
#   test_docs.sh ROOT
set -euo pipefail

cd "$1"
failed=0 links=0
while IFS= read -r document; do
    while IFS= read -r target; do
        links=$((links + 1))
        [ -e "$(dirname "$document")/$target" ] || { echo "$document: no $target"; failed=1; }
    done < <(grep -oE '\]\([^)# ]+' "$document" | cut -c3- | grep -v '://' || true)
done < <(find . -name '*.md' -not -path './build*' -not -path './.git/*' | sort)

shown=$(sed -n '/^```c$/,/^```$/p' README.md | sed '1d;$d')
run=$(sed -n '/README {/,/\/\* } \*\//p' examples/first.c | sed -e '1d;$d' -e 's/^    //')
[ -n "$run" ] && [ "$shown" = "$run" ] || {
    echo "README.md does not show what examples/first.c runs:"
    diff <(echo "$shown") <(echo "$run") || true
    failed=1
}
echo "$links links looked up"
[ "$links" -gt 0 ] && [ "$failed" = 0 ]
