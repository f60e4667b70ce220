"""Attention whose precision follows the probability mass: libapa for Python.

    import numpy as np
    import apa_attention as apa

    out = apa.attention(q, k, v, causal=True)            # numpy arrays, PyTorch tensors, anything with DLPack
    print(apa.evaluate(q, k, v, causal=True).min_cos)    # the worst output vector against exact attention in double

Every tile of 64 keys goes through a cheap format (INT8 on a CPU), and the few that hold a row's probability are computed
again exactly.

attention()      the computation, with masks, windows, ragged and paged keys: help(apa_attention.attention)
evaluate()       a method's error over every pair, and its speed; exact(): the truth that it is measured against
merge_states()   results over disjoint keys, merged exactly
resolve()        what a call would run
recipes(), knobs(), recipe(), info()   what there is to choose from
set_threads(), get_threads()
KVCache          keys and values of growing sequences, quantised once
ApaError         InvalidArgument, Unsupported, OutOfMemory: the library's own line

apa_attention.torch has scaled_dot_product_attention for PyTorch, apa_attention.transformers the attention implementation
"apa" for Transformers; neither is imported before it is asked for.
"""

from __future__ import annotations

import os

from apa_attention import _cuda
from apa_attention._attention import Plan, Statistics, attention, engines, merge_states, resolve
from apa_attention._cache import KVCache, KVCacheUsage
from apa_attention._evaluate import Evaluation, Truth, evaluate, exact
from apa_attention._library import (
    ApaError,
    InvalidArgument,
    OutOfMemory,
    Unsupported,
    contexts,
    get_threads,
    lib,
    set_threads,
    text,
)
from apa_attention._recipe import Knob, knobs, recipe, recipes

__version__: str = text(lib.apa_version_string())

for _error in (ApaError, InvalidArgument, OutOfMemory, Unsupported):
    _error.__module__ = __name__  # where users find them

__all__ = [
    "ApaError",
    "Evaluation",
    "InvalidArgument",
    "KVCache",
    "KVCacheUsage",
    "Knob",
    "OutOfMemory",
    "Plan",
    "Statistics",
    "Truth",
    "Unsupported",
    "attention",
    "evaluate",
    "exact",
    "get_threads",
    "info",
    "knobs",
    "merge_states",
    "recipe",
    "recipes",
    "resolve",
    "set_threads",
]


def info() -> dict[str, object]:
    """Version, engines (fastest first), CPU level in use, threads, CUDA devices, names of the recipes."""
    with contexts.borrow() as context:
        isa, threads = text(lib.apa_context_isa(context)), int(lib.apa_context_threads(context))
    return {
        "version": __version__,
        "engines": engines(),
        "isa": isa,
        "threads": threads,
        "cores": len(os.sched_getaffinity(0)),
        "cuda_devices": _cuda.devices(),
        "recipes": list(recipes()),
    }
