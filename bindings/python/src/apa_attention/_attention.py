"""attention(), resolve() and merge_states(): the calls that compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, overload

from apa_attention import _arrays, _cuda, _problem, _recipe
from apa_attention._checks import name_bytes
from apa_attention._library import bad, check, contexts, ffi, lib, text
from apa_attention._problem import Array, AttentionOptions, Call, Causal, Layout, ProblemOptions, Window

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True)
class Statistics:
    """What a call did. Counts are of visible (row, tile) pairs: a query of a head and 64 keys of which it sees at least
    one."""

    engine: str  # "cpu", "reference", "cuda:warp", …
    kernel: str  # which kernels ran
    recipe: dict[str, object]  # every knob as it ran, nothing on auto
    visible: int  # = hot + cold
    hot: int  # computed exactly
    cold: int  # in the cheap format
    skipped: int  # the part of cold that provably adds nothing and was left out
    candidates: int  # hot by the running sum, before the second look
    hot_share: float  # hot / visible, 0 when nothing is visible
    skip_share: float
    prep_ms: float  # wall time of quantisation
    attention_ms: float  # wall time of the rest
    workspace_bytes: int
    lamp_sub_blocks: int  # LampAttention's; 0 otherwise
    lamp_recomputed: int
    lamp_tiles: int
    lamp_disruptive: int


@dataclass(frozen=True)
class Plan:
    """What a call would do."""

    engine: str
    kernel: str
    recipe: dict[str, object]  # nothing on auto
    softmax_scale: float
    q_offset: int  # position of query 0 among the keys
    workspace_bytes: int


def statistics_of(s: Any) -> Statistics:
    numbers = {
        name: getattr(s, name) for name in Statistics.__dataclass_fields__ if name not in ("engine", "kernel", "recipe")
    }
    return Statistics(
        engine=text(s.engine), kernel=text(s.kernel), recipe=_recipe.to_dict(ffi.addressof(s, "recipe")), **numbers
    )


ENGINE_EXPECTED = 'the name of an engine, such as "auto" or "cpu" (see info())'


def engines() -> list[str]:
    """Names of the engines in this build, fastest first."""
    found: list[str] = []
    while (name := lib.apa_engine_name(len(found))) != ffi.NULL:
        found.append(text(name))
    return found


def check_engine(engine: str) -> None:
    """For those who choose an engine long before the first call: InvalidArgument for one that this build hasn't,
    Unsupported for "cuda" where there is no device. Of CUDA's engines the library chooses one by the device."""
    if engine == "auto":
        return
    name_bytes(engine, "engine", ENGINE_EXPECTED)
    there = list(dict.fromkeys(["auto", *(name.split(":")[0] for name in engines())]))
    if engine not in there:
        raise bad("engine", f'"{engine}"', f"one of {', '.join(there)}, which this build has")
    if engine == _arrays.CUDA:
        with contexts.borrow() as context:
            check(lib.apa_cuda_device_count(context, ffi.new("int32_t *")), context)


def options_of(engine: str) -> tuple[Any, Any]:
    """apa_attention_options * and the text that it points to."""
    name = ffi.new("char[]", name_bytes(engine, "engine", ENGINE_EXPECTED))
    options = ffi.new("apa_attention_options *")
    lib.apa_attention_options_init(options)
    options.engine = name
    return options, name


def run(call: Call, recipe: Any, engine: str, threads: int | None = None) -> Any:
    """Runs a call whose outputs are set; returns apa_statistics *."""
    statistics = ffi.new("apa_statistics *")
    lib.apa_statistics_init(statistics)
    options, _name = options_of(engine)
    if call.device == _arrays.CUDA:
        _cuda.run(call, recipe, engine, statistics)
        return statistics
    with contexts.borrow(threads) as context:
        check(lib.apa_attention(context, call.problem, recipe, options, statistics), context)
    return statistics


@overload
def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    return_lse: Literal[False] = ...,
    return_statistics: Literal[False] = ...,
    **options: Unpack[AttentionOptions],
) -> Any: ...
@overload
def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    return_lse: Literal[True],
    return_statistics: Literal[False] = ...,
    **options: Unpack[AttentionOptions],
) -> tuple[Any, Any]: ...
@overload
def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    return_lse: Literal[False] = ...,
    return_statistics: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[Any, Statistics]: ...
@overload
def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    return_lse: Literal[True],
    return_statistics: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[Any, Any, Statistics]: ...
def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    method: str = "apa",
    eps: float | None = None,
    causal: Causal = False,
    scale: float | None = None,
    window: Window | None = None,
    q_offset: int | None = None,
    layout: Layout = "hnd",
    engine: str = "auto",
    out: Array | None = None,
    return_lse: bool = False,
    return_statistics: bool = False,
    set: Mapping[str, object] | None = None,
    softcap: float | None = None,
    attn_mask: Array | None = None,
    mask_slopes: Array | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None,
    seqused_k: Array | None = None,
    q_offsets: Array | None = None,
    block_table: Array | None = None,
) -> Any:
    """softmax(scale·q·kᵀ + masks)·v, with precision that follows the probability mass.

    Arrays are numpy arrays, PyTorch tensors, or anything with DLPack, described where they lie (a copy is made only where
    the elements of the last axis are not side by side). They are never written to.

    q        [B, Hq, Sq, D] or [Hq, Sq, D]
    k, v     [B, Hkv, Skv, D] and [B, Hkv, Skv, Dv]. Hq is a multiple of Hkv: query head h reads head h // (Hq // Hkv).
             D and Dv are 1 to 1024; B, Sq and Skv may be 0
    dtypes   float16, bfloat16 or float32 for each of them, or float64 for all (reference engine)
    layout   "hnd" as above, "nhd": [B, S, H, D] or [S, H, D]

    What is computed
    method   a recipe's name: "apa" (adaptive, the default), "exact", "cold" (all in the cheap format), or one of
             recipes(); eps: a tile of 64 keys is computed exactly if its share of some row exceeds it (None: the
             engine's default; below 0: all, from 1 on: none); set: other knobs by name, {"second_look": False},
             see knobs()
    engine   "auto" (the fastest that can do it), "cpu", "reference", "cuda"; a kernel family of CUDA's by its name
             ("cuda:warp", "cuda:wgmma")
    scale    factor of q·k, a finite number; None is 1/√D

    Who sees what (j is a key, i a query; by selection, so a NaN in a key that a row can't see does not reach it)
    causal   True or "bottom-right": j <= i + q_offset; "top-left": j <= i (PyTorch's is_causal)
    q_offset position of query 0 among the keys; None is Skv - Sq, "the queries are the last ones"
    window   (left, right): i + q_offset - left <= j <= i + q_offset + right, -1 is no bound; a number is (left, -1)
    attn_mask  broadcast against [B, Hq, Sq, Skv] from the last axis; bool (True is seen) or floats that are added to the
             scaled scores (-inf: not seen); the last axis may be longer than Skv
    mask_slopes  [Hq]: factor of a float mask, by head
    alibi_slopes [Hq] or [B, Hq]: -slope·|i + q_offset - j| is added
    softcap  s becomes softcap·tanh(s/softcap), before ALiBi and mask; None or 0 is off
    sinks    [Hq]: a logit that joins the softmax's denominator and has no value

    Sequences of different lengths (whole numbers; PyTorch or numpy)
    cu_seqlens_q, cu_seqlens_k   [batch + 1], rising from 0: sequence b is rows cu[b] to cu[b+1]-1 of arrays without a
             batch axis (or with one of length 1)
    seqused_k    [batch]: keys in use; those beyond are not read
    q_offsets    [batch], in place of q_offset
    block_table  [batch, pages]: page numbers; k and v are then [pages, Hkv, page size, D] (layout "nhd":
             [pages, page size, Hkv, D]), with seqused_k

    Returns the output, of q's library, device, dtype, layout and number of axes (its last axis is Dv); with out=, that
    array (any float dtype). return_lse adds the natural log of the sum of exponentials of the scores, [B, Hq, Sq] or
    [Hq, Sq] float32 (float64 for float64). return_statistics adds a Statistics. A row that sees no key has output 0 and
    LSE -inf (or its sink).

    The same bits for the same inputs and CPU level, whatever the number of threads (set_threads()). The GIL is released;
    calls from several threads run side by side. No gradient is computed.

    Raises InvalidArgument (a ValueError), Unsupported (a NotImplementedError: no engine here can do it, the line says why),
    OutOfMemory (a MemoryError), TypeError (not an array). Nothing is written to `out` then."""
    call = _problem.build(
        q,
        k,
        v,
        {
            "causal": causal,
            "scale": scale,
            "window": window,
            "q_offset": q_offset,
            "layout": layout,
            "softcap": softcap,
            "attn_mask": attn_mask,
            "mask_slopes": mask_slopes,
            "alibi_slopes": alibi_slopes,
            "sinks": sinks,
            "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_k": cu_seqlens_k,
            "seqused_k": seqused_k,
            "q_offsets": q_offsets,
            "block_table": block_table,
        },
    )
    recipe = _recipe.make(method, eps, set)
    dtype = _problem.out_dtype(call, out)
    if out is None:
        out = _arrays.empty(q, call.out_shape, dtype)
    lse = _problem.empty_lse(call, dtype) if return_lse else None
    call.set_outputs(out, lse)
    statistics = run(call, recipe, engine)
    return returned(out, lse, statistics if return_statistics else None)


def returned(out: Array, lse: Array | None, statistics: Any) -> Any:
    """The output alone, or a tuple with what else was asked for."""
    found = [out]
    if lse is not None:
        found.append(lse)
    if statistics is not None:
        found.append(statistics_of(statistics))
    return out if len(found) == 1 else tuple(found)


def resolve(
    q: Array,
    k: Array,
    v: Array,
    *,
    method: str = "apa",
    eps: float | None = None,
    engine: str = "auto",
    set: Mapping[str, object] | None = None,
    **problem: Unpack[ProblemOptions],
) -> Plan:
    """What attention() with these arguments would run: engine, kernels, every knob, scratch memory. Nothing is computed
    and no data are read. Arguments and exceptions as attention()'s."""
    call = _problem.build(q, k, v, problem)
    described = call.problem
    described.out, described.lse = _planned_outputs(call)
    plan = ffi.new("apa_plan *")
    lib.apa_plan_init(plan)
    options, _name = options_of(engine)
    with contexts.borrow() as context:
        check(lib.apa_attention_plan(context, described, _recipe.make(method, eps, set), options, plan), context)
    return Plan(
        text(plan.engine),
        text(plan.kernel),
        _recipe.to_dict(ffi.addressof(plan, "recipe")),
        plan.softmax_scale,
        plan.q_offset,
        plan.workspace_bytes,
    )


def _planned_outputs(call: Call) -> tuple[Any, Any]:
    """Contiguous outputs without memory: a plan reads none."""
    q, Dv = call.problem.q.shape, call.problem.v.shape[3]
    code = _arrays.type_code(call.dtype)
    lse_code = _arrays.type_code(_problem.lse_dtype(call.dtype))
    return (
        lib.apa_tensor_hnd(ffi.NULL, code, q[0], q[1], q[2], Dv),
        lib.apa_tensor_hnd(ffi.NULL, lse_code, q[0], q[1], q[2], 1),
    )


def merge_states(
    out_a: Array,
    lse_a: Array,
    out_b: Array,
    lse_b: Array,
    *,
    layout: Layout = "hnd",
    out: Array | None = None,
    lse: Array | None = None,
) -> tuple[Any, Any]:
    """Attention over two disjoint sets of keys, merged exactly: the result over their union.

    out_a, out_b   [B, H, S, Dv] (layout "nhd": [B, S, H, Dv]), or without B; any float dtypes, CPU memory
    lse_a, lse_b   [B, H, S] or [H, S], float32 or float64: what attention(..., return_lse=True) gave
    out, lse       where the result goes: new arrays like out_a and lse_a, or given ones (those of a or b themselves too)

    With M = max(lse_a, lse_b) and w = exp(lse - M): out = (w_a·out_a + w_b·out_b)/(w_a + w_b), lse = M + ln(w_a + w_b), in
    double, rounded once. The empty state is (0, -inf); merging it changes no bit of the other.
    Returns (out, lse). Raises InvalidArgument."""

    _problem.check_layout(layout)

    def state(found_out: Array, found_lse: Array, side: str, output: bool = False) -> tuple[Any, Any, Any]:
        o = _arrays.view(found_out, f"out{side}", output=output)
        s = _arrays.view(found_lse, f"lse{side}", output=output)
        for name, found in ((f"out{side}", o), (f"lse{side}", s)):
            if found.device != _arrays.CPU:
                raise bad(name, f"device {found.device}", "cpu")
        if len(s.shape) != len(o.shape) - 1:
            raise bad(f"lse{side}", f"shape {s.shape}", f"{len(o.shape) - 1} axes beside out{side}'s {len(o.shape)}")
        return _arrays.tensor(o, _problem.axes(o, f"out{side}", layout)), _problem.lse_tensor(s), (o, s)

    a, b = state(out_a, lse_a, "_a"), state(out_b, lse_b, "_b")
    if out is None:
        out = _arrays.empty(out_a, a[2][0].shape, a[2][0].dtype)
    if lse is None:
        lse = _arrays.empty(lse_a, a[2][1].shape, a[2][1].dtype)
    merged = state(out, lse, "", output=True)
    with contexts.borrow() as context:
        check(lib.apa_state_merge(context, a[0], a[1], b[0], b[1], merged[0], merged[1]), context)
    return out, lse
