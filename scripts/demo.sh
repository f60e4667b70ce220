#!/usr/bin/env bash
# The demo: one KV head of one layer of a real language model, every (position, head) pair of it.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
dumps=(data/*_12288.dump)
dump=${dumps[0]}
[ -f "$dump" ] || { echo "demo.sh: no data/*_12288.dump" >&2; exit 1; }

echo "Attention of a real language model on a long text, one KV head of one layer ($(basename "$dump" .dump)), three ways:"
echo "every tile of keys exact; adaptive, the default (apa); every tile in the cheap format (cold). Errors are over all pairs."
echo
build/apa eval --dump "$dump" --compare exact,apa,cold
echo
echo "Look at min cos and worst L2, the worst of all pairs: apa computes only the 'hot %' of the tiles exactly, and is far closer than cold."
