"""libapa for PyTorch: scaled_dot_product_attention with PyTorch's own signature and meaning.

    from apa_attention.torch import replace_sdpa

    with torch.no_grad(), replace_sdpa() as usage:      # every SDPA call of existing code
        y = model(x)
    print(usage)                                         # what ran, how much of it exactly, what fell through and why

What libapa cannot take (dropout, gradients, dtypes and devices that it does not know, a combination that no engine has)
goes to PyTorch as if nothing had been replaced, with one warning for each reason.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from apa_attention import _arrays, _attention, _problem, _recipe
from apa_attention._library import ApaError, text

__all__ = ["FellThrough", "Settings", "Usage", "replace_sdpa", "scaled_dot_product_attention"]

_pytorch_sdpa = functional.scaled_dot_product_attention
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class FellThrough(UserWarning):
    """A call went to PyTorch; the text says why. Once per reason in a process."""


@dataclass(frozen=True)
class Settings:
    """How calls run: attention()'s arguments of the same names."""

    method: str = "apa"
    eps: float | None = None
    engine: str = "auto"
    set: Mapping[str, object] | None = None

    def check(self) -> None:
        """Raises InvalidArgument, Unsupported or TypeError: the caller's mistakes are no reason to fall through."""
        self.recipe()
        _attention.check_engine(self.engine)

    def recipe(self) -> Any:
        return _recipe.make(self.method, self.eps, self.set)


@dataclass
class Usage:
    """What became of the calls: counts, tiles, milliseconds."""

    calls: int = 0  # that libapa ran
    fell_through: dict[str, int] = field(default_factory=dict)  # calls that went to PyTorch, by reason
    kernels: dict[str, int] = field(default_factory=dict)  # calls by "engine: kernel"
    visible: int = 0  # (row, tile) pairs
    hot: int = 0
    skipped: int = 0
    prep_ms: float = 0.0
    attention_ms: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    @property
    def hot_share(self) -> float:
        """Share of the visible (row, tile) pairs that were computed exactly."""
        return self.hot / self.visible if self.visible else 0.0

    def _count(self, statistics: Any) -> None:
        kernel = f"{text(statistics.engine)}: {text(statistics.kernel)}"
        with self._lock:
            self.calls += 1
            self.kernels[kernel] = self.kernels.get(kernel, 0) + 1
            for name in ("visible", "hot", "skipped", "prep_ms", "attention_ms"):
                setattr(self, name, getattr(self, name) + getattr(statistics, name))

    def _fell(self, reason: str) -> None:
        with self._lock:
            self.fell_through[reason] = self.fell_through.get(reason, 0) + 1

    def __str__(self) -> str:
        lines = [
            f"{self.calls} call{'' if self.calls == 1 else 's'} by libapa, {100 * self.hot_share:.1f} % of the tiles exact, "
            f"{self.prep_ms:.1f} ms prep + {self.attention_ms:.1f} ms attention"
        ]
        lines += [f"  {count} by {kernel}" for kernel, count in self.kernels.items()]
        lines += [f"  {count} by PyTorch: {reason}" for reason, count in self.fell_through.items()]
        return "\n".join(lines)


_warned: set[str] = set()


def _stack_level() -> int:
    """Of the first frame that is neither this package's nor PyTorch's compiler's, as warn_once() counts."""
    inside = (str(Path(__file__).parent), str(Path(torch.__file__).parent / "_dynamo"))
    level, frame = 2, sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        level, frame = level + 1, frame.f_back
    return level


def warn_once(reason: str) -> None:
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(f"apa_attention: to PyTorch instead: {reason}", FellThrough, stacklevel=_stack_level())


# ------------------------------------------------------------------------------- what can be taken


def _refusal(tensors: dict[str, Tensor | None], dropout_p: float, settings: Settings) -> str | None:
    """Why these tensors are PyTorch's, or None."""
    given: dict[str, Any] = {
        name: t for name, t in tensors.items() if t is not None or name in ("query", "key", "value")
    }
    if dropout_p != 0.0:  # NaN, a negative one and what is no number too: PyTorch raises
        return f"dropout_p is {dropout_p}, libapa has no dropout"
    for name, t in given.items():
        if type(t) not in (Tensor, torch.nn.Parameter):
            return f"{name} is a {type(t).__name__}, libapa takes plain tensors"
        if t.layout != torch.strided or t.device.type not in (_arrays.CPU, _arrays.CUDA):
            return f"{name} is {t.layout} on {t.device.type}, libapa takes strided tensors on cpu and cuda"
        if t.requires_grad and torch.is_grad_enabled():
            return f"{name} requires a gradient, libapa computes none (torch.no_grad() says that none is wanted)"
    query = given["query"]
    wide = settings.engine == "reference" and query.dtype == torch.float64
    if query.dtype not in _DTYPES and not wide:
        return f'dtype {query.dtype}, libapa takes float32, float16 and bfloat16 (float64 with engine="reference")'
    return None


def _is_consistent(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, gqa: bool) -> bool:
    """False where PyTorch itself has something to say: its errors are its own."""
    if min(query.dim(), key.dim(), value.dim()) < 2 or not query.dtype == key.dtype == value.dtype:
        return False
    if query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2] or 0 in (query.shape[-1], value.shape[-1]):
        return False
    heads = [t.shape[-3] if t.dim() > 2 else 1 for t in (query, key, value)]
    if gqa:
        if heads[1] != heads[2] or heads[1] == 0 or heads[0] % heads[1]:
            return False
    elif len(set(heads) - {1}) > 1:
        return False
    return mask is None or (not is_causal and mask.dim() > 0 and mask.dtype in (torch.bool, torch.float32, query.dtype))


def _is_number(scale: object) -> bool:
    return scale is None or (isinstance(scale, (float, int)) and not isinstance(scale, bool))


def _with_autocast(tensors: list[Tensor]) -> list[Tensor]:
    """What autocast would do before PyTorch's function."""
    kind = tensors[0].device.type
    if torch.is_autocast_enabled(kind):
        wanted = torch.get_autocast_dtype(kind)
        return [t.to(wanted) if t.dtype in _DTYPES else t for t in tensors]
    return tensors


# ------------------------------------------------------------------------------- the computation


def run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    settings: Settings,
    usage: Usage | None,
    options: _problem.ProblemOptions,
) -> None:
    """One call on [B, H, S, D] tensors (or the layout of options), with PyTorch's number of threads."""
    call = _problem.build(query, key, value, options)
    call.set_outputs(out, None)
    statistics = _attention.run(call, settings.recipe(), settings.engine, min(torch.get_num_threads(), 4096))
    if usage is not None:
        usage._count(statistics)


def _four_axes(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Any, ...]:
    """Broadcasts the leading axes and folds them into one; a head axis of length 1 is shared by all heads."""
    tensors = [t if t.dim() > 2 else t.unsqueeze(0) for t in (query, key, value)]
    lead: tuple[int, ...] = torch.broadcast_shapes(*(t.shape[:-3] for t in tensors))  # type: ignore[no-untyped-call]
    kv_heads = (
        max(tensors[1].shape[-3], tensors[2].shape[-3]) if 0 not in (tensors[1].shape[-3], tensors[2].shape[-3]) else 0
    )
    heads = tensors[0].shape[-3] if tensors[0].shape[-3] != 1 else kv_heads
    folded = [t.expand(*lead, n, *t.shape[-2:]) for t, n in zip(tensors, (heads, kv_heads, kv_heads))]
    batch = 1
    for n in lead:
        batch *= n
    folded = [t.reshape(batch, *t.shape[-3:]) for t in folded]
    if mask is not None and len(lead) != 1 and mask.dim() > 3:
        mask = mask.expand(*lead, *mask.shape[-3:]).reshape(batch, *mask.shape[-3:])
    return (*folded, mask, lead)


def _compute(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    settings: Settings,
    usage: Usage | None,
) -> Tensor:
    q, k, v, m, lead = _four_axes(query, key, value, mask)
    batch, heads, length, _ = q.shape
    # Positions before heads in memory, as PyTorch's CPU kernel returns it: what follows is most often that transposition.
    out = torch.empty(batch, length, heads, v.shape[-1], dtype=q.dtype, device=q.device).transpose(1, 2)
    options: _problem.ProblemOptions = {"scale": scale, "causal": "top-left" if is_causal else False, "attn_mask": m}
    if out.numel():
        run(q, k, v, out, settings, usage, options)
    if len(lead) == 1 and query.dim() > 3:
        return out
    shape = out.shape[1:] if max(query.dim(), key.dim(), value.dim()) > 2 else out.shape[2:]
    return out.reshape(*lead, *shape)


@torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
def attend(
    settings: Settings,
    usage: Usage | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """libapa where it can, else PyTorch."""
    reason = _refusal({"query": query, "key": key, "value": value, "attn_mask": attn_mask}, dropout_p, settings)
    if reason is None:
        q, k, v = _with_autocast([query, key, value])
        plain = isinstance(is_causal, bool) and isinstance(enable_gqa, bool) and _is_number(scale)
        if plain and _is_consistent(q, k, v, attn_mask, is_causal, enable_gqa):
            try:
                return _compute(q, k, v, attn_mask, is_causal, scale, settings, usage)
            except ApaError as error:
                reason = str(error)
        else:
            reason = "shapes, dtypes or types of arguments that do not go together by libapa's rules"
    if usage is not None:
        usage._fell(reason)
    warn_once(reason)
    gqa = {} if enable_gqa is False else {"enable_gqa": enable_gqa}  # older versions have no such argument
    result: Tensor = _pytorch_sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **gqa)
    return result


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    method: str = "apa",
    eps: float | None = None,
    engine: str = "auto",
    set: Mapping[str, object] | None = None,
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention by libapa.

    query [N, ..., Hq, L, E], key [N, ..., H, S, E], value [N, ..., H, S, Ev]; float32, float16 or bfloat16, CPU (or CUDA,
    where libapa was built with it); any strides. attn_mask broadcasts to [N, ..., Hq, L, S]: bool (True takes part) or
    float (added). is_causal is PyTorch's: query i sees keys 0 to i, also where L and S differ. scale defaults to 1/√E.
    enable_gqa: H divides Hq, query head h reads head h // (Hq // H). A row that sees nothing is 0.

    method, eps, engine, set: as attention()'s.

    Returns [N, ..., Hq, L, Ev] of query's dtype. Dropout, gradients, other dtypes and what no engine can do go to PyTorch,
    with one FellThrough warning for each reason. Wrong shapes and types raise PyTorch's own errors; a method, knob or
    engine that does not exist raises InvalidArgument. Uses torch.get_num_threads() threads."""
    settings = Settings(method, eps, engine, set)
    settings.check()
    found: Tensor = attend(settings, None, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return found


@contextlib.contextmanager
def replace_sdpa(
    method: str = "apa",
    *,
    eps: float | None = None,
    engine: str = "auto",
    set: Mapping[str, object] | None = None,
) -> Iterator[Usage]:
    """While it is open, torch.nn.functional.scaled_dot_product_attention is libapa's, in every thread.

    It reaches code that looks the function up when it calls it (torch.nn.MultiheadAttention without its fast path,
    Transformers with attn_implementation="sdpa", most models); not a `from torch.nn.functional import ...` that was
    executed before. torch.compile cuts its graph in two there. Yields a Usage that counts. Can be nested: the inner one
    counts. Raises at once: InvalidArgument for a method, knob or engine that does not exist, Unsupported for "cuda"
    without a device."""
    settings, usage = Settings(method, eps, engine, set), Usage()
    settings.check()

    def replacement(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        found: Tensor = attend(settings, usage, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        return found

    before = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = replacement
    try:
        yield usage
    finally:
        functional.scaled_dot_product_attention = before
