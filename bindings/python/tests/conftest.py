"""A plain oracle in double, inputs with a seed, and a bound that follows from FP32 sums."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
import pytest

SEED = int(os.environ.get("APA_TEST_SEED", "1"))
F32 = 2.0**-24  # half a unit in the last place of 1


def pytest_report_header() -> str:
    return f"APA_TEST_SEED={SEED}"


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(SEED)


def oracle(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    scale: float | None = None,
    q_offset: int | None = None,
    window: tuple[int, int] = (-1, -1),
    mask: Any = None,
    softcap: float = 0.0,
    slopes: Any = None,
    sinks: Any = None,
) -> tuple[Any, Any]:
    """Attention of [B, H, S, D] arrays by the formula; output and LSE in double."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    G = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, G, 1), np.repeat(v, G, 1)
    Sq, Skv = q.shape[2], k.shape[2]
    s = q @ k.swapaxes(-1, -2) * (1 / math.sqrt(q.shape[3]) if scale is None else scale)
    if softcap:
        s = softcap * np.tanh(s / softcap)
    offset = Skv - Sq if q_offset is None else q_offset
    i, j = np.arange(Sq)[:, None] + offset, np.arange(Skv)[None, :]
    if slopes is not None:
        s = s - np.asarray(slopes, np.float64).reshape(-1, q.shape[1], 1, 1) * abs(i - j)
    seen = np.ones((Sq, Skv), bool)
    if causal:
        seen &= j <= i
    if window[0] >= 0:
        seen &= j >= i - window[0]
    if window[1] >= 0:
        seen &= j <= i + window[1]
    seen = np.broadcast_to(seen, s.shape)
    if mask is not None:
        mask = np.asarray(mask)
        if mask.dtype == bool:
            seen = seen & mask
        else:
            s = s + mask.astype(np.float64)
            seen = seen & (s > -np.inf)
    s = np.where(seen, s, -np.inf)
    if sinks is not None:
        extra = np.broadcast_to(np.asarray(sinks, np.float64).reshape(1, -1, 1, 1), (*s.shape[:3], 1))
        s, v = np.concatenate([s, extra], -1), np.concatenate([v, np.zeros_like(v[:, :, :1])], 2)
    top = s.max(-1, keepdims=True, initial=-np.inf)
    p = np.exp(s - np.where(np.isfinite(top), top, 0))
    total = p.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = np.log(total) + np.where(np.isfinite(top), top, 0)
    return np.where(total > 0, p / np.where(total > 0, total, 1), 0) @ v, lse[..., 0]


def bound(q: Any, k: Any, v: Any, scale: float | None = None, extra: float = 0.0) -> float:
    """Of an exact method with FP32 sums. A score is off by at most (D + 2) roundings of |q||k| and, with what is added
    to it (at most `extra` in size), a few of its own; a probability by twice that and by its exponential; the output by
    that times the largest value, and by the sums over keys in blocks of 64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    if q.size == 0 or k.size == 0:
        return 0.0
    D = q.shape[-1]
    size = (
        np.linalg.norm(q, axis=-1).max() * np.linalg.norm(k, axis=-1).max() * (D**-0.5 if scale is None else abs(scale))
    )
    score = (D + 2) * F32 * size + 4 * F32 * (size + extra)
    return float(abs(v).max() * (2 * score + (64 + 8) * F32))


def close(found: Any, wanted: Any, tolerance: float) -> None:
    """Every element; a NaN fails."""
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    assert found.shape == wanted.shape
    same_infinity = np.isinf(wanted) & (found == wanted)
    with np.errstate(invalid="ignore"):
        error = np.where(same_infinity, 0, abs(found - wanted))
    assert (error <= tolerance).all(), f"off by {error.max()}, allowed {tolerance}"


def make(
    rng: np.random.Generator,
    B: int,
    Hq: int,
    Hkv: int,
    Sq: int,
    Skv: int,
    D: int,
    Dv: int | None = None,
    dtype: Any = np.float32,
) -> tuple[Any, Any, Any]:
    shapes = ((B, Hq, Sq, D), (B, Hkv, Skv, D), (B, Hkv, Skv, D if Dv is None else Dv))
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in shapes)  # type: ignore[return-value]
