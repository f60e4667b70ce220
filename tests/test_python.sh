#!/usr/bin/env bash
# The Python package as a user gets it: a wheel around a libapa.so that is built already, installed into an environment of
# its own under the build folder, and its tests run there against the command.
#   test_python.sh BUILD_DIR SOURCE_DIR LIBRARY COMMAND [all]
# Tests of PyTorch and Transformers run where python3 has them already. With `all` both are installed (6 GB), and the source
# distribution, the types and the formatting are looked at too.
# Exit 77 (skipped) with the reason where there is no python3 with venv, or no package registry to be reached.
set -euo pipefail

build=$(realpath "$1") source=$(realpath "$2") library=$(realpath "$3") command=$(realpath "$4") how=${5:-quick}
package=$source/bindings/python
venv=$build/python-$how
python=${PYTHON:-python3}

skip() { echo "skipped: $*"; exit 77; }

command -v "$python" >/dev/null || skip "no $python"
"$python" -c 'import ensurepip, venv' 2>/dev/null || skip "$python has no venv (Debian: python3-venv)"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || skip "$python is older than 3.10"

wanted=("$package/tests/requirements.txt")
[ "$how" = quick ] || wanted+=("$package/tests/requirements-all.txt")
for file in "${wanted[@]}"; do [ -r "$file" ] || { echo "no $file"; exit 1; }; done
shared=()
[ "$how" = quick ] && "$python" -c 'import torch' 2>/dev/null && shared=(--system-site-packages)

pip() { "$venv/bin/python" -m pip install -q --disable-pip-version-check "$@"; }

if ! cat "${wanted[@]}" | cmp -s - "$venv/installed.txt"; then
    rm -rf "$venv"
    "$python" -m venv "${shared[@]}" "$venv"
    pip "${wanted[@]/#/-r}" >"$build/python-$how.log" 2>&1 || { cat "$build/python-$how.log"; skip "the packages of $(basename "${wanted[-1]}") can't be installed"; }
    cat "${wanted[@]}" >"$venv/installed.txt"
fi

# From here on nothing is fetched, so what fails is a fault.
pip --no-index --no-deps --no-build-isolation --force-reinstall -C "cmake.define.APA_LIBRARY=$library" \
    -C cmake.define.APA_BUNDLE=OFF "$package"

export APA_COMMAND=$command APA_SOURCE=$source HF_HUB_OFFLINE=1
cd "$venv" # where no apa_attention of the source tree can be imported
run() { "$venv/bin/python" -m "$@"; }
run pytest -q -p no:cacheprovider -c "$package/pyproject.toml" --rootdir "$package" "$package/tests"

[ "$how" = all ] || exit 0

run mypy --config-file "$package/pyproject.toml" --cache-dir "$build/mypy" -p apa_attention
programs=("$package" "$source/examples/python" "$source"/bench/e2e/pytorch*.py)
run ruff check --no-cache --config "$package/pyproject.toml" "${programs[@]}"
run ruff format --no-cache --check --config "$package/pyproject.toml" "${programs[@]}"

# The source distribution holds all that a wheel needs, and that wheel all that runs.
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
run build -q --sdist -o "$folder" "$package"
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check "$folder"/apa_attention-*.tar.gz
cd "$folder"
"$folder/venv/bin/python" "$source/examples/python/attention.py"
ldd "$folder"/venv/lib/python*/site-packages/apa_attention/libapa.so | grep "pthreadpool.*$folder" >"$folder/bundled"
echo "ok source distribution"
