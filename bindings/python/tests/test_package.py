"""Threads, forks, help, and that the package is what it says."""

from __future__ import annotations

import os
import pydoc
import re
import subprocess
import sys
import threading
import time
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

import apa_attention as apa
from conftest import make


def test_version_and_types():
    if "APA_LIBRARY" not in os.environ:
        assert metadata.version("apa-attention") == apa.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", apa.__version__)
    assert (Path(apa.__file__).parent / "py.typed").exists()


@pytest.mark.parametrize("name", apa.__all__)
def test_help(name):
    thing = getattr(apa, name)
    assert thing.__doc__ and len(pydoc.render_doc(thing)) > 100
    assert "attention" in pydoc.render_doc(apa)


def test_threads_change_no_bit(rng):
    q, k, v = make(rng, 1, 4, 2, 200, 700, 64)
    wanted = apa.attention(q, k, v, causal=True)
    try:
        for threads in (1, 2, 3):
            apa.set_threads(threads)
            assert apa.get_threads() == threads
            assert np.array_equal(apa.attention(q, k, v, causal=True), wanted)
    finally:
        apa.set_threads(0)


def test_calls_side_by_side(rng):
    problems = [make(rng, 1, 2, 1, 50, 60 + 10 * i, 32) for i in range(8)]
    wanted = [apa.attention(*p, causal=True) for p in problems]
    found: list[list[np.ndarray]] = [[] for _ in problems]

    def work(i):
        for _ in range(20):
            found[i].append(apa.attention(*problems[i], causal=True))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len(f) == 20 and all(np.array_equal(x, w) for x in f) for f, w in zip(found, wanted))


def test_the_gil_is_released(rng):
    """Another thread's Python runs in the middle of a call: with the lock held none of it could, however slow the machine."""
    q, k, v = make(rng, 1, 2, 1, 400, 400, 64)
    seen, stop = [], threading.Event()

    def watch():
        while not stop.is_set():
            seen.append(time.monotonic())
            time.sleep(0.001)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        # A busy machine may leave the thread no core during one call; it does not during all of them.
        for _ in range(40):
            start = time.monotonic()
            apa.attention(q, k, v, method="sage3", engine="reference")
            quarter = (time.monotonic() - start) / 4
            found = any(start + quarter < t < start + 3 * quarter for t in seen)
            if found:
                break
    finally:
        stop.set()
        thread.join()
    assert found


def test_after_a_fork(rng):
    q, k, v = make(rng, 1, 2, 1, 100, 300, 64)
    wanted = apa.attention(q, k, v)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, b"y" if np.array_equal(apa.attention(q, k, v), wanted) else b"n")
        finally:
            os._exit(0)
    os.close(write)
    assert os.read(read, 1) == b"y"
    os.close(read)
    os.waitpid(child, 0)


def test_declarations_are_the_headers():
    """What the package believes of the structs is what the library was compiled with, for every struct that says so."""
    from apa_attention._library import ffi, lib

    for name, make_it in (
        ("apa_problem", lib.apa_problem_init),
        ("apa_plan", lib.apa_plan_init),
        ("apa_evaluation_options", lib.apa_evaluation_options_init),
        ("apa_context_options", lib.apa_context_options_init),
        ("apa_cuda_options", lib.apa_cuda_options_init),
        ("apa_cuda_plan", lib.apa_cuda_plan_init),
    ):
        found = ffi.new(f"{name} *")
        make_it(found)
        assert found.size == ffi.sizeof(name)
    recipe = ffi.new("apa_recipe *")
    assert lib.apa_recipe_init(recipe, ffi.NULL) == 0 and recipe.size == ffi.sizeof("apa_recipe")


def test_idle_threads_sleep(rng):
    """Threads that spun between calls would take the cores from PyTorch's own."""
    q, k, v = make(rng, 1, 4, 2, 200, 300, 64)
    try:
        apa.set_threads(2)
        spent = []
        for _ in range(3):
            apa.attention(q, k, v)
            before = time.process_time()
            time.sleep(0.05)
            spent.append(time.process_time() - before)
    finally:
        apa.set_threads(0)
    assert min(spent) < 0.005


def test_the_end_of_the_interpreter():
    """Contexts that outlive the package's modules are freed in a library that is still there."""
    program = """
import gc, sys, numpy, apa_attention
from apa_attention import _library
apa_attention.attention(*[numpy.ones((1, 1, 200, 8), numpy.float32)] * 3)
kept = _library.contexts
for module in [m for name, m in sys.modules.items() if name.startswith("apa_attention")]:
    vars(module).clear()
gc.collect()
del kept
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
