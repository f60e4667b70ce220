#!/usr/bin/env bash
# The tests of concurrent use under ThreadSanitizer (build-tsan).
#   scripts/tsan.sh
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
cmake -S . -B build-tsan -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DAPA_SANITIZE_THREADS=ON -DAPA_TESTS=ON >/dev/null
cmake --build build-tsan --target test_concurrent
TSAN_OPTIONS=halt_on_error=1 build-tsan/test_concurrent
