"""The build backend: scikit-build-core, whose source distribution gets the C library's sources too.

This folder stands two levels under them, where no source distribution can reach. Its own is therefore made from a copy,
with the sources in libapa/ and the one path that leads out of the folder turned into it.
"""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from scikit_build_core.build import *  # noqa: F403  (the hooks of PEP 517 and PEP 660)
from scikit_build_core.build import build_sdist as _build_sdist

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SOURCES = ["CMakeLists.txt", "LICENSE", "NOTICE", "cmake", "include", "src"]
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc", "build", "dist", "_declarations.py", ".*_cache")


def build_sdist(sdist_directory: str, config_settings: dict[str, Any] | None = None) -> str:
    if (HERE / "libapa").exists():  # unpacked from a source distribution: all is here
        return _build_sdist(sdist_directory, config_settings)
    target = Path(sdist_directory).resolve()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "python"
        shutil.copytree(HERE, copy, ignore=LEFT_OUT)
        for name in SOURCES:
            source, to = ROOT / name, copy / "libapa" / name
            to.parent.mkdir(exist_ok=True)
            shutil.copytree(source, to, ignore=LEFT_OUT) if source.is_dir() else shutil.copy2(source, to)
        project = copy / "pyproject.toml"
        project.write_text(project.read_text("utf-8").replace('"../../', '"libapa/'), "utf-8")
        before = Path.cwd()
        os.chdir(copy)
        try:
            return _build_sdist(str(target), config_settings)
        finally:
            os.chdir(before)
