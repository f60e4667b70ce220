"""attention() against the formula: shapes, dtypes, layouts, masks, ragged and paged keys."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import apa_attention as apa
from conftest import bound, close, make, oracle

ENGINES = ["cpu", "reference"]
SHAPES = [
    (1, 1, 1, 1, 1, 1),
    (2, 4, 2, 33, 130, 32),
    (1, 6, 2, 70, 70, 64),
    (1, 2, 1, 65, 200, 80),
    (2, 3, 3, 5, 7, 16),
]
HALF = {np.dtype(np.float16): 2.0**-11, np.dtype(ml_dtypes.bfloat16): 2.0**-8}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("causal", [False, True])
def test_exact(rng, engine, shape, causal):
    q, k, v = make(rng, *shape)
    out, lse, statistics = apa.attention(
        q, k, v, method="exact", causal=causal, engine=engine, return_lse=True, return_statistics=True
    )
    wanted, wanted_lse = oracle(q, k, v, causal=causal)
    assert out.dtype == np.float32 and lse.dtype == np.float32 and statistics.engine == engine
    assert statistics.hot_share == 1.0 and statistics.visible == statistics.hot
    close(out, wanted, bound(q, k, v))
    close(lse, wanted_lse, bound(q, k, np.ones(1)) + 2.0**-22 * abs(wanted_lse).max())


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_dtypes(rng, dtype):
    q, k, v = make(rng, 1, 4, 2, 20, 100, 32, dtype=dtype)
    out, lse = apa.attention(q, k, v, method="exact", return_lse=True)
    wanted, wanted_lse = oracle(q, k, v)
    half = HALF.get(np.dtype(dtype), 0.0)
    assert out.dtype == dtype and lse.dtype == (np.float64 if dtype is np.float64 else np.float32)
    close(out, wanted, 1e-13 if dtype is np.float64 else bound(q, k, v) + half * abs(wanted).max())
    close(lse, wanted_lse, 1e-13 if dtype is np.float64 else 1e-5)


def test_output_of_another_dtype(rng):
    q, k, v = make(rng, 1, 4, 2, 20, 100, 32, dtype=np.float16)
    out = np.full((1, 4, 20, 32), np.nan, np.float32)
    assert apa.attention(q, k, v, method="exact", out=out) is out
    close(out, oracle(q, k, v)[0], bound(q, k, v))


def test_dtypes_of_their_own(rng):
    q, k, v = make(rng, 1, 4, 2, 20, 100, 32)
    k, v = k.astype(np.float16), v.astype(ml_dtypes.bfloat16)
    out = apa.attention(q, k, v, method="exact")
    assert out.dtype == np.float32
    close(out, oracle(q, k, v)[0], bound(q, k, v))


@pytest.mark.parametrize("dims", [3, 4])
def test_layouts_are_the_same_numbers(rng, dims):
    q, k, v = make(rng, 1, 4, 2, 33, 90, 32)
    if dims == 3:
        q, k, v = q[0], k[0], v[0]
    plain, lse = apa.attention(q, k, v, causal=True, return_lse=True)
    turned = [np.ascontiguousarray(x.swapaxes(-2, -3)) for x in (q, k, v)]
    out, lse_turned = apa.attention(*turned, causal=True, layout="nhd", return_lse=True)
    assert plain.ndim == dims and out.shape == turned[0].shape
    assert np.array_equal(out.swapaxes(-2, -3), plain) and np.array_equal(lse, lse_turned)


@pytest.mark.parametrize("shape", [(0, 2, 1, 5, 7, 8), (1, 2, 1, 0, 7, 8), (1, 2, 1, 5, 0, 8), (2, 4, 4, 0, 0, 16)])
def test_empty(rng, shape):
    q, k, v = make(rng, *shape)
    out, lse = apa.attention(q, k, v, return_lse=True)
    assert out.shape == q.shape and not out.any() and (lse == -np.inf).all()


def test_rows_without_keys(rng):
    q, k, v = make(rng, 1, 2, 2, 9, 4, 16)
    out, lse = apa.attention(q, k, v, causal=True, return_lse=True)
    assert not out[:, :, :5].any() and (lse[:, :, :5] == -np.inf).all() and np.isfinite(lse[:, :, 5:]).all()
    close(out, oracle(q, k, v, causal=True)[0], bound(q, k, v))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("window", [(3, 0), (0, 5), (7, -1), (40, 2)])
def test_window(rng, engine, window):
    q, k, v = make(rng, 1, 2, 1, 40, 130, 32)
    out = apa.attention(q, k, v, method="exact", engine=engine, window=window)
    close(out, oracle(q, k, v, window=window)[0], bound(q, k, v))
    if window[1] == -1:
        assert np.array_equal(out, apa.attention(q, k, v, method="exact", engine=engine, window=window[0]))


def test_offsets_and_scale(rng):
    q, k, v = make(rng, 2, 2, 1, 10, 130, 32)
    out = apa.attention(q, k, v, method="exact", causal=True, q_offset=50, scale=0.5)
    close(out, oracle(q, k, v, causal=True, q_offset=50, scale=0.5)[0], bound(q, k, v, 0.5))
    top = apa.attention(q, k, v, method="exact", causal="top-left")
    assert np.array_equal(top, apa.attention(q, k, v, method="exact", causal=True, q_offset=0))
    close(top, oracle(q, k, v, causal=True, q_offset=0)[0], bound(q, k, v))
    assert np.array_equal(apa.attention(q, k, v, causal="bottom-right"), apa.attention(q, k, v, causal=True))


MASKS = ["rows", "keys", "heads", "bool", "float", "half", "longer", "repeated"]


def make_mask(rng, kind, B, H, Sq, Skv):
    chosen = rng.random((B, H, Sq, Skv)) < 0.6
    numbers = rng.standard_normal((B, H, Sq, Skv)).astype(np.float32)
    numbers[~chosen] = -np.inf
    return {
        "rows": chosen[0, 0, :, :1],
        "keys": chosen[:, :1, :1],
        "heads": chosen[0],
        "bool": chosen,
        "float": numbers,
        "half": numbers.astype(np.float16),
        "longer": np.pad(numbers, [(0, 0)] * 3 + [(0, 9)], constant_values=np.nan),
        "repeated": np.broadcast_to(chosen[:, :, :, :1], chosen.shape),
    }[kind]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", MASKS)
def test_masks(rng, engine, kind):
    q, k, v = make(rng, 2, 4, 2, 33, 130, 32)
    mask = make_mask(rng, kind, 2, 4, 33, 130)
    wanted, wanted_lse = oracle(q, k, v, mask=mask[..., :130])
    out, lse = apa.attention(q, k, v, method="exact", engine=engine, attn_mask=mask, return_lse=True)
    close(out, wanted, bound(q, k, v, extra=5))
    close(lse, wanted_lse, 1e-4)


def test_a_masked_nan_stays_away(rng):
    q, k, v = make(rng, 1, 2, 2, 20, 100, 32)
    mask = np.ones(100, bool)
    mask[[3, 70]] = False
    clean = apa.attention(q, k, v, method="exact", attn_mask=mask)
    k[:, :, 3], v[:, :, 70] = np.nan, np.inf
    assert np.array_equal(apa.attention(q, k, v, method="exact", attn_mask=mask), clean)


@pytest.mark.parametrize("engine", ENGINES)
def test_softcap_slopes_sinks(rng, engine):
    q, k, v = make(rng, 2, 4, 2, 33, 130, 32)
    slopes = np.array([0.5, 0.25, 0.125, 0.0625], np.float32)
    sinks = np.array([1.0, -2.0, 0.0, 3.0], np.float32)
    options = {"causal": True, "softcap": 3.0, "sinks": sinks}
    out, lse = apa.attention(q, k, v, method="exact", engine=engine, alibi_slopes=slopes, return_lse=True, **options)
    wanted, wanted_lse = oracle(q, k, v, slopes=slopes, **options)
    close(out, wanted, bound(q, k, v, extra=65))
    close(lse, wanted_lse, 1e-4)


def test_sink_of_a_row_without_keys(rng):
    q, k, v = make(rng, 1, 2, 2, 5, 3, 16)
    out, lse = apa.attention(q, k, v, causal=True, sinks=np.array([0.5, -1.0]), return_lse=True)
    assert not out[:, :, :2].any() and (lse[0, :, :2] == np.array([[0.5], [-1.0]], np.float32)).all()


def test_ragged_batch(rng):
    lengths_q, lengths_k = [3, 0, 40, 17], [70, 5, 40, 200]
    cu_q, cu_k = np.cumsum([0, *lengths_q]), np.cumsum([0, *lengths_k])
    q = rng.standard_normal((cu_q[-1], 4, 32), dtype=np.float32)
    k, v = (rng.standard_normal((cu_k[-1], 2, 32), dtype=np.float32) for _ in range(2))
    out, lse = apa.attention(q, k, v, causal=True, layout="nhd", cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, return_lse=True)
    assert out.shape == q.shape and lse.shape == (4, len(q))
    for b in range(4):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        alone, lse_alone = apa.attention(q[rows], k[keys], v[keys], causal=True, layout="nhd", return_lse=True)
        assert np.array_equal(out[rows], alone) and np.array_equal(lse[:, rows], lse_alone)


def test_keys_in_use(rng):
    q, k, v = make(rng, 2, 2, 1, 4, 100, 32)
    k[0, :, 60:], v[1, :, 9:] = np.nan, np.nan
    out = apa.attention(q, k, v, causal=True, seqused_k=[60, 9])
    for b, used in enumerate((60, 9)):
        alone = apa.attention(q[b], k[b, :, :used], v[b, :, :used], causal=True)
        assert np.array_equal(out[b], alone)


def test_pages(rng):
    pages, size, used = 7, 16, [40, 21]
    table = np.array([[5, 0, 3], [2, 6, 1]])
    k, v = (rng.standard_normal((pages, size, 2, 32), dtype=np.float32) for _ in range(2))
    q = rng.standard_normal((2, 5, 4, 32), dtype=np.float32)
    out = apa.attention(q, k, v, method="exact", causal=True, layout="nhd", seqused_k=used, block_table=table)
    for b in range(2):
        flat_k, flat_v = (x[table[b]].reshape(-1, 2, 32)[: used[b]] for x in (k, v))
        wanted = oracle(*(x.swapaxes(0, 1)[None] for x in (q[b], flat_k, flat_v)), causal=True)[0]
        close(out[b], wanted[0].swapaxes(0, 1), bound(q, k, v))


def test_adaptive_lies_between_exact_and_cold(rng):
    q, k, v = make(rng, 1, 4, 2, 64, 4096, 64)
    q *= 3
    truth = oracle(q, k, v, causal=True)[0]
    error = {m: np.linalg.norm(apa.attention(q, k, v, method=m, causal=True) - truth) for m in ("exact", "apa", "cold")}
    assert error["exact"] < error["apa"] < error["cold"] < 0.1 * np.linalg.norm(truth)
    all_hot = apa.attention(q, k, v, eps=-1.0, causal=True)
    assert np.linalg.norm(all_hot - truth) < 4 * error["exact"]


def test_knobs(rng):
    q, k, v = make(rng, 1, 4, 2, 64, 512, 64)
    statistics = apa.attention(q, k, v, eps=0.03, set={"second_look": False, "group": 16}, return_statistics=True)[1]
    assert (statistics.recipe["eps"], statistics.recipe["second_look"], statistics.recipe["group"]) == (0.03, "off", 16)
    assert statistics.visible == statistics.hot + statistics.cold > 0
    assert np.array_equal(apa.attention(q, k, v, set={"eps": 0.03}), apa.attention(q, k, v, eps=0.03))
