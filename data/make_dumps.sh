#!/usr/bin/env bash
# Installs what make_dumps.py needs into a virtual environment and runs it with the same arguments.
#   APA_DATA_VENV  where the environment goes (default: build/venv-data of the repository)
#   PYTHON         the interpreter that makes it (default: python3, 3.11 or newer)
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=${APA_DATA_VENV:-$here/../build/venv-data}
python=${PYTHON:-python3}

die() { echo "make_dumps.sh: $*" >&2; exit 1; }

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"
    elif command -v sudo >/dev/null; then sudo "$@"
    else die "not root and no sudo; run as root: $*"
    fi
}

debian_install() {
    command -v apt-get >/dev/null || die "no apt-get; install by hand: $*"
    as_root apt-get install -y -q --no-install-recommends "$@" >&2 ||
        { as_root apt-get update -q >&2 && as_root apt-get install -y -q --no-install-recommends "$@" >&2; } ||
        die "could not install: $*"
}

own_text=no gemma=no help=no
for argument in "$@"; do
    case $argument in
        --text | --text=*) own_text=yes ;;
        gemma3 | --model=gemma3) gemma=yes ;;
        -h | --help) help=yes ;;
    esac
done

command -v "$python" >/dev/null || debian_install python3
"$python" -c 'import ensurepip, venv' 2>/dev/null || debian_install python3-venv
[ $own_text = yes ] || [ $help = yes ] || command -v bible >/dev/null || debian_install bible-kjv

[ -x "$venv/bin/pip" ] || "$python" -m venv "$venv"
needed=(-r "$here/requirements.txt")
[ $gemma = no ] || needed+=(-r "$here/requirements-gemma3.txt")
"$venv/bin/pip" install -q --disable-pip-version-check --no-deps "${needed[@]}"

exec "$venv/bin/python" "$here/make_dumps.py" "$@"
