"""A call's arrays and options as an apa_problem."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

from apa_attention import _arrays, _cuda
from apa_attention._arrays import View
from apa_attention._checks import known, real, shown, whole
from apa_attention._library import bad, ffi, lib

Layout = Literal["hnd", "nhd"]
Causal = bool | Literal["bottom-right", "top-left"]
Window = int | tuple[int, int]
Array = Any  # numpy array, PyTorch tensor, or anything with DLPack

_AXES: dict[tuple[str, int], tuple[int | None, ...]] = {  # where [batch, heads, seq, dim] lie in an array
    ("hnd", 4): (0, 1, 2, 3),
    ("hnd", 3): (None, 0, 1, 2),
    ("nhd", 4): (0, 2, 1, 3),
    ("nhd", 3): (None, 1, 0, 2),
}
_CAUSAL = {False: 0, True: 1, "bottom-right": 1, "top-left": 2}


class QueryOptions(TypedDict, total=False):
    """Options that say nothing of where keys lie."""

    causal: Causal
    scale: float | None
    window: Window | None
    q_offset: int | None
    layout: Layout
    softcap: float | None
    attn_mask: Array | None
    mask_slopes: Array | None
    alibi_slopes: Array | None
    sinks: Array | None
    cu_seqlens_q: Array | None
    q_offsets: Array | None


class ProblemOptions(QueryOptions, total=False):
    """What attention(), evaluate(), exact() and resolve() take alike; attention() explains them."""

    cu_seqlens_k: Array | None
    seqused_k: Array | None
    block_table: Array | None


_QUERY_NAMES, _PROBLEM_NAMES = tuple(QueryOptions.__annotations__), tuple(ProblemOptions.__annotations__)


class AttentionOptions(ProblemOptions, total=False):
    """All that attention() takes beside q, k, v and what it returns."""

    method: str
    eps: float | None
    engine: str
    out: Array | None
    set: Mapping[str, object] | None


@dataclass
class Call:
    """An apa_problem and all that must live as long as it is used."""

    problem: Any
    q: Any  # the array, to make outputs like it
    dims: int  # of q: 3 or 4
    layout: str
    dtype: str
    device: str
    dim_v: int
    keep: list[Any] = field(default_factory=list)

    @property
    def out_shape(self) -> tuple[int, ...]:
        """[B, H, S, Dv] in the order and number of axes of q."""
        q, Dv = self.problem.q.shape, self.dim_v
        whole = (q[0], q[1], q[2], Dv) if self.layout == "hnd" else (q[0], q[2], q[1], Dv)
        return whole if self.dims == 4 else whole[1:]

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """[B, H, S] in either layout."""
        q = self.problem.q.shape
        return (q[0], q[1], q[2])[4 - self.dims :]

    def set_outputs(self, out: Array, lse: Array | None) -> None:
        found = _arrays.view(out, "out", output=True)
        if found.shape != self.out_shape:
            raise bad("out", f"shape {found.shape}", f"{self.out_shape}")
        if found.device != self.device:
            raise bad("out", f"device {found.device}", f"{self.device}, as q")
        self.keep.append(found)
        self.problem.out = _arrays.tensor(found, _AXES[self.layout, self.dims])[0]
        if lse is not None:
            found = _arrays.view(lse, "lse", output=True)
            self.keep.append(found)
            self.problem.lse = lse_tensor(found)[0]


def lse_tensor(found: View) -> Any:
    """[B, H, S] or [H, S] as the library's [B, H, S, 1], whose last axis has no stride to speak of."""
    made = ffi.new("apa_tensor *")
    made.data, made.dtype = ffi.cast("void *", found.address), _arrays.type_code(found.dtype)
    shape, strides = found.shape, found.strides
    if len(shape) == 2:
        shape, strides = (1, *shape), (1, *strides)
    if len(shape) != 3:
        raise bad("lse", f"shape {shape}", "[B, H, S] or [H, S]")
    for i in range(3):
        made.shape[i], made.stride[i] = shape[i], strides[i]
    made.shape[3] = made.stride[3] = 1
    return made


def check_layout(layout: object) -> None:
    if layout not in ("hnd", "nhd"):
        raise bad("layout", f'"{layout}"', '"hnd" or "nhd"')


def axes(found: View, name: str, layout: str) -> tuple[int | None, ...]:
    """Where [batch, heads, seq, dim] lie in the array."""
    known = _AXES.get((layout, len(found.shape)))
    if known is None:
        raise bad(name, f"shape {found.shape}", "3 axes (no batch) or 4")
    return known


def _mask(call: Call, mask: Array) -> Any:
    """Up to 4 axes, aligned at the last one with [B, Hq, Sq, Skv]; an axis that repeats becomes one of length 1."""
    found = _arrays.view(mask, "attn_mask", mask=True)
    if len(found.shape) > 4 or not found.shape:
        raise bad("attn_mask", f"shape {found.shape}", "1 to 4 axes, the last one keys")
    if found.device != call.device:
        raise bad("attn_mask", f"device {found.device}", f"{call.device}, as q")
    missing = 4 - len(found.shape)
    made = _arrays.tensor(found, (None,) * missing + tuple(range(len(found.shape))))
    if found.strides[-1] == 0:
        made.shape[3] = min(made.shape[3], 1)
    call.keep.append(found)
    return made[0]


def _per_head(call: Call, values: Array, name: str) -> Any:
    """f32 [Hq] or [B, Hq] as [B or 1, Hq, 1, 1]."""
    made = _arrays.per_head(values, name)
    if made.ndim not in (1, 2):
        raise bad(name, f"shape {made.shape}", "[heads]" + (" or [batch, heads]" if name == "alibi_slopes" else ""))
    made = made.reshape((1, -1, 1, 1) if made.ndim == 1 else (*made.shape, 1, 1))
    found = _arrays.view(made, name)
    call.keep.append(found)
    return _arrays.tensor(found, (0, 1, 2, 3))[0]


def _numbers(call: Call, values: Array, name: str, length: int | None) -> tuple[Any, int]:
    """Where the numbers lie, and how many there are."""
    made = _arrays.whole_numbers(values, name, "int64")
    if made.ndim != 1 or (length is not None and len(made) != length):
        raise bad(name, f"shape {made.shape}", "one axis" if length is None else f"{length} numbers")
    call.keep.append(made)
    return ffi.cast("int64_t *", made.ctypes.data), len(made)


def _ragged(call: Call, options: QueryOptions) -> None:
    """Sequences that differ: their bounds, lengths, offsets and pages."""
    problem, given = call.problem, dict[str, Any](options)
    batch: int | None = None
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        if (bounds := given.get(name)) is not None:
            found, length = _numbers(call, bounds, name, None if batch is None else batch + 1)
            if length < 1:
                raise bad(name, "no numbers", "batch + 1 of them")
            setattr(problem, name, found)  # the library checks that they rise
            batch = problem.batch = length - 1
    if batch is None:
        batch = int(problem.q.shape[0])
    for name in ("seqused_k", "q_offsets"):
        if (values := given.get(name)) is not None:
            setattr(problem, name, _numbers(call, values, name, batch)[0])
    if (pages := given.get("block_table")) is not None:
        on_device = call.device == _arrays.CUDA and _arrays.is_torch(call.q)
        table: Any = (
            _cuda.block_table(pages, call.q.device)
            if on_device
            else _arrays.whole_numbers(pages, "block_table", "int32")
        )
        if table.ndim != 2 or len(table) != batch:
            raise bad("block_table", f"shape {table.shape}", f"[{batch}, pages of a sequence]")
        call.keep.append(table)
        problem.block_table = ffi.cast("int32_t *", table.data_ptr() if on_device else table.ctypes.data)
        problem.block_table_stride = table.shape[1]


def _window(window: Window | None) -> tuple[int, int]:
    if window is None:
        return -1, -1
    expected = "keys before, or (keys before, keys after), as whole numbers"
    if isinstance(window, Sequence) and not isinstance(window, str):
        if len(window) != 2:
            raise bad("window", f"{len(window)} numbers", expected)
        return whole(window[0], "window", expected), whole(window[1], "window", expected)
    return whole(window, "window", expected), -1


def _set_numbers(problem: Any, options: QueryOptions) -> None:
    scale, softcap, offset = options.get("scale"), options.get("softcap"), options.get("q_offset")
    if scale is not None:
        expected = "a finite number, or None for 1/sqrt(D)"
        problem.softmax_scale = real(scale, "scale", expected)
        if not math.isfinite(problem.softmax_scale):  # NaN is the library's word for the default, but no caller's
            raise bad("scale", problem.softmax_scale, expected)
    if softcap is not None:
        problem.softcap = real(softcap, "softcap", "a positive number, or None for none")
    if offset is not None:
        problem.q_offset = whole(offset, "q_offset", "a whole number, or None for Skv - Sq")


def build(q: Array, k: Array, v: Array, options: ProblemOptions) -> Call:
    """Describes inputs and masks; outputs come with Call.set_outputs(). What the library can check, it checks."""
    return describe({"q": q, "k": k, "v": v}, options)


def describe(arrays: dict[str, Array], options: QueryOptions, dim_v: int = 0) -> Call:
    """build() of q, k and v, or of q alone (a cache has the rest; dim_v is then its values')."""
    layout = options.get("layout", "hnd")
    known(options, _PROBLEM_NAMES if "k" in arrays else _QUERY_NAMES)
    check_layout(layout)
    views = {name: _arrays.view(array, name) for name, array in arrays.items()}
    first = views["q"]
    for name, found in views.items():
        if found.device != first.device:
            raise bad(name, f"device {found.device}", f"{first.device}, as q")
    problem = ffi.new("apa_problem *")
    lib.apa_problem_init(problem)
    for name, found in views.items():
        setattr(problem, name, _arrays.tensor(found, axes(found, name, layout))[0])
    dim_v = problem.v.shape[3] if "v" in views else dim_v
    keep = list(views.values())
    call = Call(problem, arrays["q"], len(first.shape), layout, first.dtype, first.device, dim_v, keep)

    causal = options.get("causal", False)
    if not isinstance(causal, Hashable) or causal not in _CAUSAL:
        raise bad("causal", shown(causal), 'True, False, "bottom-right" or "top-left"')
    problem.causal = _CAUSAL[causal]
    _set_numbers(problem, options)
    problem.window_left, problem.window_right = _window(options.get("window"))
    if (mask := options.get("attn_mask")) is not None:
        problem.attn_mask = _mask(call, mask)
    for name in ("mask_slopes", "alibi_slopes", "sinks"):
        if (values := options.get(name)) is not None:
            setattr(problem, name, _per_head(call, values, name))
    _ragged(call, options)
    return call


def out_dtype(call: Call, out: Array | None) -> str:
    """q's, or that of a given output."""
    return call.dtype if out is None else _arrays.view(out, "out", output=True).dtype


def lse_dtype(dtype: str) -> str:
    return "f64" if dtype == "f64" else "f32"


def empty_lse(call: Call, dtype: str) -> Any:
    return _arrays.empty(call.q, call.lse_shape, lse_dtype(dtype))
