#!/usr/bin/env bash
# Makes build/venv with the Python packages of scripts/requirements-test.txt, or leaves it alone when it has them already.
# PYTHON names the interpreter (default: python3, 3.11 or newer).
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/build/venv
wanted=$root/scripts/requirements-test.txt
done=$venv/requirements-done.txt # a copy of what was installed

! cmp -s "$wanted" "$done" || ! "$venv/bin/python" -c 'import ml_dtypes, numpy' 2>/dev/null || exit 0

echo "python-env.sh: making build/venv"
rm -rf "$venv"
mkdir -p "$root/build"
"${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/python" -m pip install -q --disable-pip-version-check -r "$wanted"
cp "$wanted" "$done"
