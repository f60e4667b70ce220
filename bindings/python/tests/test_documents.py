"""What the documents and examples show runs as printed: every ```python block is a program of its own."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(os.environ.get("APA_SOURCE", Path(__file__).resolve().parents[3]))
DOCUMENTS = ["README.md", "docs/python.md", "bindings/python/README.md"]


def blocks():
    for name in DOCUMENTS:
        if (ROOT / name).exists():
            found = re.findall(r"^```python\n(.*?)^```", (ROOT / name).read_text("utf-8"), re.M | re.S)
            for i, block in enumerate(found, 1):
                yield pytest.param(block, id=f"{name}:{i}")
    for path in sorted((ROOT / "examples" / "python").glob("*.py")):
        yield pytest.param(path.read_text("utf-8"), id=path.name)


@pytest.mark.parametrize("program", list(blocks()))
def test_runs_as_printed(program, tmp_path):
    for module in ("torch", "transformers"):
        if re.search(rf"^(import|from) (apa_attention\.)?{module}\b", program, re.M):
            if importlib.util.find_spec(module) is None:
                pytest.skip(f"no {module}")
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:apa_attention", "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), "a program that prints nothing shows nothing"
