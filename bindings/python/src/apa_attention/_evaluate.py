"""evaluate() and exact(): what a method does to the output, over every pair."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from apa_attention import _arrays, _problem, _recipe
from apa_attention._attention import options_of, resolve, statistics_of
from apa_attention._checks import whole, wrong_type
from apa_attention._library import bad, check, contexts, ffi, lib, text
from apa_attention._problem import Array, Call, ProblemOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

REPEATS, REPEATS_REFERENCE = 3, 1  # as `apa eval`: the reference engine takes its time


@dataclass(frozen=True)
class Truth:
    """Exact attention in double precision, for evaluate(truth=...): several methods can share one."""

    out: np.ndarray[Any, Any]  # float64, of q's layout and number of axes
    lse: np.ndarray[Any, Any]  # float64 [B, Hq, Sq] or [Hq, Sq]


@dataclass(frozen=True)
class Evaluation:
    """A method against exact attention in double. A pair is one output vector: a query of a head; all are counted.

    docs/command.md of libapa has the definition of every figure; to_dict() is what `apa eval --json` prints."""

    method: str
    engine: str
    kernel: str
    isa: str
    dtype: str
    threads: int
    repeats: int
    shape: dict[str, int]  # B, Hq, Hkv, Sq, Skv, D, Dv
    pairs: int
    pooled_cos: float  # cosine: all outputs as one vector, mean and minimum over pairs
    mean_cos: float
    min_cos: float
    min_cos_pair: tuple[int, int, int]  # batch, head, row
    lt_0_99: int  # pairs with a cosine below
    lt_0_9: int
    lt_0: int
    non_finite: int  # pairs with a NaN or Inf where the truth has none
    truth_not_finite: int  # pairs whose truth has a NaN or Inf: in no figure but this and `pairs`
    rel_l2: float  # error norm over truth norm: all outputs; the worst pair
    rel_l2_max: float
    rel_l2_max_pair: tuple[int, int, int]
    max_abs: float
    mean_abs: float
    norm_ratio_min: float  # output norm over truth norm
    norm_ratio_max: float
    lse_max_abs: float
    hot_share: float  # fractions of the visible (row, tile) pairs
    skip_share: float
    candidates_share: float
    lamp_recomputed: float  # LampAttention's shares, NaN otherwise
    lamp_disruptive: float
    prep_ms: float  # medians over the repeats
    attention_ms: float
    exact_ms: float  # the same engine's exact method
    speedup: float  # exact_ms / (prep_ms + attention_ms)
    workspace_bytes: int
    recipe: dict[str, object]  # every knob as it ran

    def to_dict(self) -> dict[str, object]:
        """The keys and values of `apa eval --json`: lists for tuples, None for what is not finite."""

        def plain(value: object) -> object:
            if isinstance(value, float) and not math.isfinite(value):
                return None
            return list(value) if isinstance(value, tuple) else value

        return {name: plain(getattr(self, name)) for name in self.__dataclass_fields__}


def _host(call: Call, name: str) -> None:
    if call.device != _arrays.CPU:
        raise bad("q", f"device {call.device}", f"cpu: {name} compares in host memory")


def exact(q: Array, k: Array, v: Array, **problem: Unpack[ProblemOptions]) -> Truth:
    """Exact attention in double precision by the reference engine: slow, and what everything is measured against.

    Arguments and exceptions as attention()'s; arrays in host memory. attention(method="exact") is the fast one."""
    call = _problem.build(q, k, v, problem)
    _host(call, "exact()")
    truth = Truth(np.empty(call.out_shape), np.empty(call.lse_shape))
    out, lse = _truth_tensors(call, truth)
    with contexts.borrow() as context:
        check(lib.apa_truth_compute(context, call.problem, out, lse, ffi.NULL, ffi.NULL), context)
    return truth


def _truth_tensors(call: Call, truth: Truth) -> tuple[Any, Any]:
    if not isinstance(truth, Truth):
        raise wrong_type("truth", truth, "what exact() gave")
    for name, array, shape in (("out", truth.out, call.out_shape), ("lse", truth.lse, call.lse_shape)):
        if array.dtype != np.float64 or array.shape != shape:
            raise bad(f"truth.{name}", f"{array.dtype} {array.shape}", f"float64 {shape}")
    call.keep.append(truth)
    out = _arrays.view(truth.out, "truth.out")
    return (
        _arrays.tensor(out, _problem.axes(out, "truth.out", call.layout)),
        _problem.lse_tensor(_arrays.view(truth.lse, "truth.lse")),
    )


def _share(part: int, whole: int) -> float:
    return part / whole if whole > 0 else math.nan


def _figures(evaluation: Any, context: Any, call: Call, method: str, repeats: int) -> Evaluation:
    e, s = evaluation.error, evaluation.statistics
    q, k, Dv = call.problem.q.shape, call.problem.k.shape, call.problem.v.shape[3]
    known = statistics_of(s)
    error_fields = (
        "pairs",
        "pooled_cos",
        "mean_cos",
        "min_cos",
        "lt_0_99",
        "lt_0_9",
        "lt_0",
        "non_finite",
        "truth_not_finite",
        "rel_l2",
        "rel_l2_max",
        "max_abs",
        "mean_abs",
        "norm_ratio_min",
        "norm_ratio_max",
        "lse_max_abs",
    )
    times = ("prep_ms", "attention_ms", "exact_ms", "speedup")
    return Evaluation(
        method=method,
        engine=known.engine,
        kernel=known.kernel,
        isa=text(lib.apa_context_isa(context)),
        dtype=call.dtype,
        threads=lib.apa_context_threads(context),
        repeats=repeats,
        shape={"B": q[0], "Hq": q[1], "Hkv": k[1], "Sq": q[2], "Skv": k[2], "D": q[3], "Dv": Dv},
        min_cos_pair=tuple(e.min_cos_pair),
        rel_l2_max_pair=tuple(e.rel_l2_max_pair),
        hot_share=known.hot_share,
        skip_share=known.skip_share,
        candidates_share=known.candidates / known.visible if known.visible > 0 else 0.0,
        lamp_recomputed=_share(known.lamp_recomputed, known.lamp_sub_blocks),
        lamp_disruptive=_share(known.lamp_disruptive, known.lamp_tiles),
        workspace_bytes=known.workspace_bytes,
        recipe=known.recipe,
        **{name: getattr(e, name) for name in error_fields},
        **{name: getattr(evaluation, name) for name in times},
    )


def evaluate(
    q: Array,
    k: Array,
    v: Array,
    *,
    method: str = "apa",
    eps: float | None = None,
    engine: str = "auto",
    set: Mapping[str, object] | None = None,
    repeats: int | None = None,
    truth: Truth | None = None,
    time_exact: bool = True,
    **problem: Unpack[ProblemOptions],
) -> Evaluation:
    """Runs a method and compares every pair with exact attention in double: the figures of `apa eval --json`.

    q, k, v and the options are attention()'s (causal is off unless given; the command's is on), in host memory.
    repeats     timed runs of the method and of the same engine's exact method, in turn; None is 3, or 1 with the
                reference engine. Times are medians in milliseconds
    truth       of exact(), for the same arrays and options; None: computed here, which may take a while
    time_exact  False leaves exact_ms out (NaN)

    Raises what attention() raises."""
    if repeats is not None:
        repeats = whole(repeats, "repeats", "a whole number from 1 on", 1, 2**31 - 1)
    plan = resolve(q, k, v, method=method, eps=eps, engine=engine, set=set, **problem)
    call = _problem.build(q, k, v, problem)
    _host(call, "evaluate()")
    if repeats is None:
        repeats = REPEATS_REFERENCE if plan.engine == "reference" else REPEATS
    options = ffi.new("apa_evaluation_options *")
    lib.apa_evaluation_options_init(options)
    _unused, name = options_of(engine)
    options.engine = name
    options.repeats = repeats
    options.time_exact = bool(time_exact)
    if truth is not None:
        out, lse = _truth_tensors(call, truth)
        options.truth, options.truth_lse = out[0], lse[0]
    evaluation = ffi.new("apa_evaluation *")
    with contexts.borrow() as context:
        recipe = _recipe.make(method, eps, set)
        check(lib.apa_evaluate(context, call.problem, recipe, options, evaluation), context)
        return _figures(evaluation, context, call, method, repeats)
