"""Whose memory is read and written: no copies, no writes, strides, DLPack, refusals."""

from __future__ import annotations

import numpy as np
import pytest

import apa_attention as apa
from conftest import make


class Foreign:
    """An array of a library that nobody has heard of: DLPack alone."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_dlpack(rng):
    q, k, v = make(rng, 1, 4, 2, 33, 90, 32)
    wanted = apa.attention(q, k, v)
    assert np.array_equal(apa.attention(Foreign(q), Foreign(k), Foreign(v)), wanted)
    half = [x.astype(np.float16) for x in (q, k, v)]
    assert np.array_equal(apa.attention(*map(Foreign, half)), apa.attention(*half))
    out = np.zeros_like(q)
    apa.attention(q, k, v, out=Foreign(out))  # described in place, so written in place
    assert np.array_equal(out, wanted)


def test_strided_views_are_not_copied(rng):
    from apa_attention import _arrays

    fused = rng.standard_normal((1, 100, 3, 4, 32), dtype=np.float32)
    q, k, v = (fused[:, :, i] for i in range(3))
    for x in (q, k, v):
        assert _arrays.view(x, "x").address == x.__array_interface__["data"][0]
    wanted = apa.attention(*(np.ascontiguousarray(x) for x in (q, k, v)), layout="nhd", causal=True)
    assert np.array_equal(apa.attention(q, k, v, layout="nhd", causal=True), wanted)
    assert np.array_equal(apa.attention(q[:, ::-1], k, v, layout="nhd"), apa.attention(q, k, v, layout="nhd")[:, ::-1])


def test_what_cannot_be_described_is_copied(rng):
    q, k, v = make(rng, 1, 2, 2, 20, 30, 16)
    wanted = apa.attention(q, k, v)
    wide = np.zeros((1, 2, 20, 32), np.float32)
    wide[..., ::2] = q
    assert np.array_equal(apa.attention(wide[..., ::2], k, v), wanted)
    assert np.array_equal(apa.attention(q.astype(">f4"), k, v), wanted)
    packed = np.zeros((2, 20, 16), np.dtype([("pad", "u1"), ("x", "f4")]))
    packed["x"] = q[0]
    assert np.array_equal(apa.attention(packed["x"][None], k, v), wanted)


def test_inputs_are_left_alone(rng):
    q, k, v = make(rng, 1, 2, 2, 20, 300, 16)
    before = [x.copy() for x in (q, k, v)]
    for x in (q, k, v):
        x.flags.writeable = False
    apa.attention(q, k, v)
    assert all(np.array_equal(a, b) for a, b in zip(before, (q, k, v)))


def test_output_in_a_larger_array(rng):
    q, k, v = make(rng, 1, 2, 2, 20, 30, 16)
    frame = np.full((1, 2, 22, 20), 7.0, np.float32)
    apa.attention(q, k, v, out=frame[:, :, 1:-1, 2:-2])
    assert np.array_equal(frame[:, :, 1:-1, 2:-2], apa.attention(q, k, v))
    frame[:, :, 1:-1, 2:-2] = 7.0
    assert (frame == 7.0).all()


REFUSED = [
    (lambda q, k, v: apa.attention(q, k, 3), TypeError, r"v: 3 \(int\), expected a numpy array"),
    (lambda q, k, v: apa.attention(q, k, [1.0]), TypeError, "v: a list"),
    (lambda q, k, v: apa.attention(q.astype(int), k, v), ValueError, "q: dtype int64"),
    (lambda q, k, v: apa.attention(q[0, 0], k, v), ValueError, r"q: shape \(20, 16\), expected 3 axes"),
    (lambda q, k, v: apa.attention(q, k[..., :8], v), ValueError, "k: dim is 8"),
    (lambda q, k, v: apa.attention(q, k.astype(np.float64), v), ValueError, "dtype"),
    (lambda q, k, v: apa.attention(q[:, :1], k, v), ValueError, "heads"),
    (lambda q, k, v: apa.attention(q, k, v, method="best"), ValueError, 'method: "best", expected one of apa'),
    (lambda q, k, v: apa.attention(q, k, v, eps=float("nan")), ValueError, "eps"),
    (lambda q, k, v: apa.attention(q, k, v, set={"colour": 1}), ValueError, "colour"),
    (lambda q, k, v: apa.attention(q, k, v, set={"group": 65}), ValueError, "group"),
    (lambda q, k, v: apa.attention(q, k, v, engine="tpu"), ValueError, 'engine: "tpu"'),
    (lambda q, k, v: apa.attention(q, k, v, method="sage3", engine="cpu"), NotImplementedError, "cpu"),
    (lambda q, k, v: apa.attention(q, k, v, layout="shd"), ValueError, 'layout: "shd"'),
    (lambda q, k, v: apa.attention(q, k, v, causal="left"), ValueError, "causal: 'left'"),
    (lambda q, k, v: apa.attention(q, k, v, causal="top-left", q_offset=3), ValueError, "top-left"),
    (lambda q, k, v: apa.attention(q, k, v, window=(1, 2, 3)), ValueError, "window"),
    (lambda q, k, v: apa.attention(q, k, v, window=-2), ValueError, "window"),
    (lambda q, k, v: apa.attention(q, k, v, scale=float("inf")), ValueError, "scale"),
    (lambda q, k, v: apa.attention(q, k, v, softcap=-1.0), ValueError, "softcap"),
    (lambda q, k, v: apa.attention(q, k, v, out=np.empty((1, 2, 20, 17), np.float32)), ValueError, "out: shape"),
    (
        lambda q, k, v: apa.attention(q, k, v, out=np.empty((1, 2, 20, 32), np.float32)[..., ::2]),
        ValueError,
        "out: strides",
    ),
    (lambda q, k, v: apa.attention(q, k, v, out=q), ValueError, "out"),
    (lambda q, k, v: apa.attention(q, k, v, attn_mask=np.ones((3, 30), bool)), ValueError, "attn_mask"),
    (
        lambda q, k, v: apa.attention(q, k, v, attn_mask=np.ones((20, 30), np.uint8)),
        ValueError,
        "attn_mask: dtype uint8, expected bool, float16",
    ),
    (lambda q, k, v: apa.attention(q, k, v, sinks=[1.0, 2.0, 3.0]), ValueError, "sinks"),
    (lambda q, k, v: apa.attention(q, k, v, seqused_k=[31]), ValueError, "seqused_k"),
    (
        lambda q, k, v: apa.attention(q, k, v, seqused_k=[1, 2]),
        ValueError,
        r"seqused_k: shape \(2,\), expected 1 numbers",
    ),
    (lambda q, k, v: apa.attention(q, k, v, seqused_k=[1.5]), ValueError, "seqused_k: dtype float64, expected whole"),
    (
        lambda q, k, v: apa.attention(q, k, v, cu_seqlens_q=[0, 5, 3], cu_seqlens_k=[0, 10, 30]),
        ValueError,
        "cu_seqlens_q",
    ),
    (lambda q, k, v: apa.merge_states(q, q[..., 0], q, q), ValueError, "lse_b: shape"),
    (lambda q, k, v: apa.set_threads(-1), ValueError, "threads: -1"),
    (lambda q, k, v: apa.attention(q > 0, k, v), ValueError, "q: dtype bool, expected float16"),
    (lambda q, k, v: apa.attention(q, k, v > 0), ValueError, "v: dtype bool, expected float16"),
    (lambda q, k, v: apa.merge_states(q > 0, q[..., 0], q, q[..., 0]), ValueError, "out_a: dtype bool"),
    (lambda q, k, v: apa.merge_states(q, q[..., 0], q, q[..., 0], layout=3), ValueError, "layout"),
    (lambda q, k, v: apa.attention(q, k, v, seqused_k=30), ValueError, "seqused_k: no axis, expected a list"),
    (lambda q, k, v: apa.attention(q, k, v, cu_seqlens_q=3), ValueError, "cu_seqlens_q: no axis, expected a list"),
    (lambda q, k, v: apa.attention(q, k, v, block_table=[[1], [1, 2]]), ValueError, "block_table: a list that numpy"),
    (lambda q, k, v: apa.attention(q, k, v, sinks=[1j, 2]), ValueError, "sinks: dtype complex128, expected a number"),
    (lambda q, k, v: apa.attention(q, k, v, sinks=["a", "b"]), ValueError, "sinks: dtype <U1, expected a number"),
    (lambda q, k, v: apa.attention(q, k, v, causal=[1]), ValueError, "causal: a list, expected True"),
    (lambda q, k, v: apa.recipe("none"), ValueError, 'method: "none"'),
]


@pytest.mark.parametrize("call, kind, line", REFUSED, ids=[line for _, _, line in REFUSED])
def test_refusals(rng, call, kind, line):
    q, k, v = make(rng, 1, 2, 2, 20, 30, 16)
    with pytest.raises(kind, match=line) as caught:
        call(q, k, v)
    if kind is not TypeError:
        assert isinstance(caught.value, apa.ApaError) and caught.value.status.startswith("APA_STATUS_")
        assert "\n" not in str(caught.value)


def test_read_only_output(rng):
    q, k, v = make(rng, 1, 2, 2, 20, 30, 16)
    out = np.zeros_like(q)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        apa.attention(q, k, v, out=out)


def test_a_refused_call_writes_nothing(rng):
    q, k, v = make(rng, 1, 2, 2, 20, 30, 16)
    out = np.full(q.shape, 7.0, np.float32)
    with pytest.raises(apa.Unsupported):
        apa.attention(q, k, v, method="sage3", engine="cpu", out=out)
    assert (out == 7.0).all()


@pytest.mark.parametrize("name", ["q", "k", "v", "attn_mask", "sinks", "seqused_k", "out"])
def test_masked_arrays_are_refused(rng, name):
    """Their mask would be ignored; one that masks nothing is no different, or the same program would fail by its data."""
    q, k, v = make(rng, 1, 2, 2, 20, 30, 16)
    given = {
        "q": q,
        "k": k,
        "v": v,
        "attn_mask": np.ones((20, 30), bool),
        "sinks": np.zeros(2),
        "out": np.empty_like(q),
    }
    given["seqused_k"] = np.array([30])
    apa.attention(**given)
    given[name] = np.ma.masked_array(given[name])
    with pytest.raises(apa.InvalidArgument, match=f"{name}: a masked array, whose mask would be ignored"):
        apa.attention(**given)
