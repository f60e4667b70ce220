"""KVCache: appended, forked, rolled back, saved; attention over it is attention over the same keys."""

from __future__ import annotations

import numpy as np
import pytest

import apa_attention as apa
from conftest import bound, close, oracle


def keys(rng, n, heads=2, dim=32):
    return tuple(rng.standard_normal((heads, n, dim)).astype(np.float16) for _ in range(2))


def test_is_attention_over_the_same_keys(rng):
    k, v = keys(rng, 300)
    q = rng.standard_normal((6, 9, 32), dtype=np.float32)
    with apa.KVCache(2, 32, pages=16, method="exact") as cache:
        sequence = cache.add()
        for at in (0, 100, 164, 299):
            step = {0: 100, 100: 64, 164: 135, 299: 1}[at]
            cache.append(sequence, k[:, at : at + step], v[:, at : at + step])
        assert cache.keys(sequence) == 300
        out, lse, statistics = cache.attend(sequence, q, causal=True, return_lse=True, return_statistics=True)
    assert out.shape == q.shape and lse.shape == (6, 9) and statistics.hot_share == 1.0
    wanted, wanted_lse = oracle(q[None], k[None], v[None], causal=True)
    close(out, wanted[0], bound(q, k, v))
    close(lse, wanted_lse[0], 1e-5)


def test_chunks_forks_and_rollbacks_change_no_bit(rng):
    k, v = keys(rng, 400)
    q = rng.standard_normal((6, 5, 32), dtype=np.float32)
    cache = apa.KVCache(2, 32, pages=64)
    whole, parts = cache.add(), cache.add()
    cache.append(whole, k, v)
    for at in range(0, 400, 50):
        cache.append(parts, k[:, at : at + 50], v[:, at : at + 50])
    wanted = cache.attend(whole, q, causal=True)
    assert np.array_equal(cache.attend(parts, q, causal=True), wanted)
    fork = cache.fork(whole)
    cache.append(fork, k[:, :30], v[:, :30])
    cache.rollback(fork, 400)
    cache.rollback(parts, 190)
    cache.append(parts, k[:, 190:], v[:, 190:])
    for sequence in (whole, fork, parts):
        assert np.array_equal(cache.attend(sequence, q, causal=True), wanted)
    close(wanted, oracle(q[None], k[None], v[None], causal=True)[0][0], 0.05)


def test_batches(rng):
    cache = apa.KVCache(2, 32, pages=32, dtype=np.float32, method="exact")
    a, b = cache.add(), cache.add()
    k, v = (rng.standard_normal((2, 70, 2, 32), dtype=np.float32) for _ in range(2))
    cache.append([a, b], k, v, layout="nhd")
    cache.append(b, k[1, :5], v[1, :5], layout="nhd")
    q = rng.standard_normal((2, 3, 4, 32), dtype=np.float32)
    out = cache.attend([a, b], q, causal=True, layout="nhd")
    for i, sequence in enumerate((a, b)):
        assert np.array_equal(out[i], cache.attend(sequence, q[i], causal=True, layout="nhd"))
    packed = cache.attend([a, b], q.reshape(6, 4, 32), causal=True, layout="nhd", cu_seqlens_q=[0, 3, 6])
    assert np.array_equal(packed, out.reshape(6, 4, 32))


def test_values_of_another_size(rng):
    cache = apa.KVCache(2, 32, dim_v=8, pages=4)
    sequence = cache.add()
    k, v = keys(rng, 90)
    cache.append(sequence, k, v[..., :8])
    q = rng.standard_normal((2, 3, 32), dtype=np.float32)
    assert cache.attend(sequence, q, causal=True).shape == (2, 3, 8)


def test_usage_and_mistakes(rng):
    k, v = keys(rng, 100)
    cache = apa.KVCache(2, 32, pages=2)
    sequence = cache.add()
    cache.append(sequence, k, v)
    usage = cache.usage()
    assert (usage.sequences, usage.pages_used, usage.pages_free, usage.tiles) == (1, 2, 0, 1) and usage.tile_bytes > 0
    with pytest.raises(apa.OutOfMemory):
        cache.append(sequence, k, v)
    assert cache.keys(sequence) == 100
    for call in (
        lambda: cache.keys(7),
        lambda: cache.append(7, k, v),
        lambda: cache.rollback(sequence, 101),
        lambda: cache.append(sequence, k[..., :8], v),
        lambda: apa.KVCache(2, 0),
        lambda: apa.KVCache(2, 8, dtype=int),
    ):
        with pytest.raises(apa.InvalidArgument):
            call()
    cache.remove(sequence)
    assert cache.usage().pages_used == 0
    cache.close()
    with pytest.raises(apa.InvalidArgument, match="closed"):
        cache.add()


def test_files(rng, tmp_path):
    k, v = keys(rng, 200)
    q = rng.standard_normal((6, 5, 32), dtype=np.float32)
    cache = apa.KVCache(2, 32, pages=8)
    sequence = cache.add()
    cache.append(sequence, k, v)
    wanted = cache.attend(sequence, q, causal=True)
    cache.save(tmp_path / "cache")
    loaded = apa.KVCache.load(tmp_path / "cache")
    assert np.array_equal(loaded.attend(sequence, q, causal=True), wanted)
    (tmp_path / "broken").write_bytes((tmp_path / "cache").read_bytes()[:-9])
    with pytest.raises(apa.ApaError):
        apa.KVCache.load(tmp_path / "broken")
    with pytest.raises(apa.ApaError):
        apa.KVCache.load(tmp_path / "missing")
