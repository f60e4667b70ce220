#!/usr/bin/env bash
# The ONNX backend node tests of Attention, in a venv of their own with the pinned onnx package.
#   tests/onnx/run.sh VENV LIBAPA.so ENGINE...
# Where the package can't be had it says so in one line that begins with "skipped:"; nothing else is skipped.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=$1
shift
wanted=$here/requirements.txt
done=$venv/requirements-done.txt # a copy of what was installed

mkdir -p "$(dirname "$venv")"
exec 9>"$venv.lock"
flock 9 # several build folders share the venv
if ! cmp -s "$wanted" "$done"; then
    rm -rf "$venv"
    if ! log=$({ "${PYTHON:-python3}" -m venv "$venv" &&
        "$venv/bin/python" -m pip install -q --disable-pip-version-check -r "$wanted"; } 2>&1); then
        echo "skipped: $(tr '\n' ' ' <"$wanted" | sed 's/^#[^.]*\. //') could not be installed: $(tail -n 1 <<<"$log")"
        exit 0
    fi
    cp "$wanted" "$done"
fi
flock -u 9
exec "$venv/bin/python" "$here/attention_cases.py" "$@"
