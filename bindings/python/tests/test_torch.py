"""apa_attention.torch against PyTorch's own function in float64."""

from __future__ import annotations

import itertools
import warnings

import pytest

torch = pytest.importorskip("torch")
F = torch.nn.functional

import apa_attention as apa  # noqa: E402
from apa_attention import torch as apa_torch  # noqa: E402
from conftest import SEED, bound, close  # noqa: E402

OWN_ERROR = {torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


@pytest.fixture(autouse=True)
def fresh():
    torch.manual_seed(SEED)
    apa_torch._warned.clear()


def wide(tensor):
    return tensor.double() if tensor is not None and tensor.is_floating_point() else tensor


def check(q, k, v, mask=None, causal=False, scale=None, gqa=False, extra=0.0, **more):
    """Nothing may fall through: the warning would be an error (pyproject.toml)."""
    found = apa_torch.scaled_dot_product_attention(
        q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=gqa, method="exact", **more
    )
    with torch.no_grad():
        wanted = F.scaled_dot_product_attention(
            wide(q), wide(k), wide(v), wide(mask), 0.0, causal, scale=scale, enable_gqa=gqa
        )
    assert found.shape == wanted.shape and found.dtype == q.dtype
    own = OWN_ERROR[q.dtype] * float(wanted.abs().max()) if wanted.numel() else 0.0
    close(found.double(), wanted, bound(*(x.detach().double().numpy() for x in (q, k, v)), scale, extra) + own)
    return found


SHAPES = [
    (2, 4, 33, 70, 32, 32),
    (1, 1, 1, 5, 16, 16),
    (2, 3, 64, 64, 64, 40),
    (1, 2, 65, 200, 80, 80),
    (1, 2, 70, 33, 8, 8),
]


@pytest.mark.parametrize("dtype", OWN_ERROR, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, causal, dtype):
    B, H, L, S, E, Ev = shape
    q, k, v = (torch.randn(B, H, *s).to(dtype) for s in ((L, E), (S, E), (S, Ev)))
    check(q, k, v, causal=causal)
    check(q, k, v, causal=causal, scale=0.3)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(1, 2, 0, 5, 8), (1, 2, 5, 0, 8), (0, 2, 5, 7, 8), (2, 0, 5, 7, 8)], ids=str)
def test_empty(shape, causal):
    B, H, L, S, E = shape
    check(torch.randn(B, H, L, E), torch.randn(B, H, S, E), torch.randn(B, H, S, E), causal=causal)


@pytest.mark.parametrize(
    "q, k",
    [
        ((5, 8), (7, 8)),
        ((3, 5, 8), (3, 7, 8)),
        ((2, 3, 4, 5, 8), (2, 3, 4, 7, 8)),
        ((1, 4, 5, 8), (3, 1, 7, 8)),
        ((2, 1, 4, 5, 8), (3, 4, 7, 8)),
        ((3, 1, 5, 8), (1, 4, 7, 8)),
    ],
)
def test_leading_axes(q, k):
    check(torch.randn(q), torch.randn(k), torch.randn(k))


@pytest.mark.parametrize("heads", [(6, 2), (6, 1), (4, 4)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_grouped_heads(heads, causal):
    Hq, H = heads
    check(torch.randn(2, Hq, 33, 32), torch.randn(2, H, 70, 32), torch.randn(2, H, 70, 32), causal=causal, gqa=True)


def masks(B, H, L, S):
    """Every way to broadcast, as bool and as numbers with -inf, fully masked rows among them."""
    for b, h, l, s in itertools.product((1, B), (1, H), (1, L), (1, S)):
        yield torch.rand(b, h, l, s) > 0.5
    for shape in ((L, S), (H, L, S), (1, S)):
        yield torch.rand(shape) > 0.5
        yield torch.randn(shape).masked_fill(torch.rand(shape) > 0.5, -torch.inf)
    yield (torch.rand(B, 1, 1, S) > 0.3).expand(B, H, L, S)
    yield torch.randn(B, 1, 1, S).expand(B, H, L, S)
    yield torch.randn(B, H, L, 2 * S)[..., ::2]
    yield torch.zeros(L, S).masked_fill(torch.rand(L, S) > 0.5, torch.finfo(torch.float32).min)
    yield torch.zeros(L, S, dtype=torch.bool)


@pytest.mark.parametrize("engine", ["auto", "reference"])
def test_masks(engine):
    B, H, L, S, E = 2, 4, 17, 40, 16
    q, k, v = (torch.randn(B, n, s, E) for n, s in ((H, L), (2, S), (2, S)))
    for mask in masks(B, H, L, S):
        check(q, k, v, mask, gqa=True, extra=5.0, engine=engine)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_masks_of_half_numbers(dtype):
    q, k, v = (torch.randn(2, 2, s, 16).to(dtype) for s in (17, 40, 40))
    check(q, k, v, torch.randn(2, 1, 17, 40).to(dtype), extra=5.0)


def test_masks_with_other_axes():
    check(*(torch.randn(3, s, 16) for s in (17, 40, 40)), torch.rand(3, 17, 40) > 0.5)
    check(*(torch.randn(2, 3, 4, s, 16) for s in (17, 40, 40)), torch.rand(2, 1, 4, 17, 40) > 0.5)
    check(*(torch.randn(s, 16) for s in (17, 40, 40)), torch.rand(17, 40) > 0.5)


def test_no_copy_of_plain_tensors():
    from apa_attention import _arrays

    fused = torch.randn(2, 33, 3, 4, 32)
    for part in (t.transpose(1, 2) for t in fused.unbind(2)):
        assert _arrays.view(part, "x").address == part.data_ptr()
    q, k, v = (t.transpose(1, 2) for t in fused.unbind(2))
    check(q, k, v, causal=True)
    check(q[..., ::2], k[..., ::2], v, causal=True)  # copied, and right


def test_attention_takes_tensors():
    q, k, v = torch.randn(1, 4, 33, 32), torch.randn(1, 2, 70, 32), torch.randn(1, 2, 70, 32)
    out, lse = apa.attention(q, k, v, causal=True, return_lse=True)
    same, lse_same = apa.attention(q.numpy(), k.numpy(), v.numpy(), causal=True, return_lse=True)
    assert isinstance(out, torch.Tensor) and torch.equal(out, torch.from_numpy(same))
    assert torch.equal(lse, torch.from_numpy(lse_same))
    assert apa.attention(q.bfloat16(), k.bfloat16(), v.bfloat16()).dtype == torch.bfloat16
    lengths = apa.attention(q, k, v, seqused_k=torch.tensor([50]), sinks=torch.zeros(4), method="exact")
    assert lengths.shape == q.shape
    merged, _ = apa.merge_states(out, lse, torch.zeros_like(out), torch.full_like(lse, -torch.inf))
    assert torch.equal(merged, out)
    q.requires_grad_(True)
    with pytest.raises(NotImplementedError, match="requires a gradient"):
        apa.attention(q, k, v)
    with torch.no_grad():
        assert torch.equal(apa.attention(q, k, v, causal=True), out)


def test_dtypes_and_layouts_are_refused():
    """All that PyTorch has, but the four that are taken."""
    taken = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
    dtypes = {x for x in vars(torch).values() if isinstance(x, torch.dtype)}
    assert len(dtypes) > 15
    shape = (1, 2, 8, 16)
    for dtype in dtypes:
        if dtype in taken:
            x = torch.ones(shape, dtype=dtype)
            assert apa.attention(x, x, x).dtype == dtype
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # "experimental", "deprecated"
                x = torch.empty(shape, dtype=dtype)
        except RuntimeError:  # this version makes no tensor of it
            continue
        with pytest.raises(apa.InvalidArgument, match=f"q: dtype {dtype}, expected float16"):
            apa.attention(x, x, x)
        with pytest.raises(apa.InvalidArgument, match=f"out_a: dtype {dtype}, expected float16"):
            apa.merge_states(x, torch.zeros(1, 2, 8), x, torch.zeros(1, 2, 8))
    x = torch.randn(shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "prototype"
        nested = torch.nested.nested_tensor([x[0, 0], x[0, 1]])
    for kind, line in (
        (x.to_sparse(), "q: layout torch.sparse_coo"),
        (x.to("meta"), "q: device meta"),
        (nested, "q: a nested tensor"),
    ):
        with pytest.raises(apa.InvalidArgument, match=line):
            apa.attention(kind, kind, kind)
    with pytest.raises(apa.InvalidArgument, match="a tensor without memory of its own"):
        torch.vmap(lambda y: apa.attention(y, y, y))(x[None])


def test_negative_bit_of_conjugate_views():
    """imag of a conjugate says "the negative of this memory": read so, and no place to write to."""
    z = torch.randn(1, 16, 2, 8, dtype=torch.complex64)
    x = z.conj().imag.transpose(1, 3)
    assert x.is_neg() and torch.equal(apa.attention(x, x, x), apa.attention(*[x.clone()] * 3))
    out = torch.zeros(1, 1, 8, 1, dtype=torch.complex64).conj().imag  # one element an axis: strides say nothing
    with pytest.raises(apa.InvalidArgument, match="out: a view with its negative bit set"):
        apa.attention(x[:, :1], x[:, :1], x[:, :1, :, :1], out=out)


def test_lists_of_numbers_as_tensors():
    q = torch.randn(1, 2, 8, 16)
    assert torch.equal(apa.attention(q, q, q, sinks=torch.ones(2).bfloat16()), apa.attention(q, q, q, sinks=[1.0, 1.0]))
    for name, value, line in (
        ("sinks", torch.zeros(2, device="meta"), "sinks: device meta"),
        ("sinks", torch.zeros(2).to_sparse(), "sinks: layout torch.sparse_coo"),
        ("sinks", torch.zeros(2, dtype=torch.bool), "sinks: dtype bool, expected a number"),
        ("seqused_k", torch.zeros(1, dtype=torch.bfloat16), "seqused_k: dtype float32, expected whole numbers"),
        ("seqused_k", torch.zeros(1, dtype=torch.int64, device="meta"), "seqused_k: device meta"),
    ):
        with pytest.raises(apa.InvalidArgument, match=line):
            apa.attention(q, q, q, **{name: value})
    with pytest.raises(apa.Unsupported, match="sinks: requires a gradient"):
        apa.attention(q, q, q, sinks=torch.zeros(2, requires_grad=True))


# ------------------------------------------------------------------------------- what falls through

Q, K, V = (torch.ones(1, 2, s, 16) for s in (5, 9, 9))
FALLS = {
    "dropout_p is 0.5": lambda sdpa: sdpa(Q, K, V, dropout_p=0.5),
    "query requires a gradient": lambda sdpa: sdpa(Q.clone().requires_grad_(), K, V).sum().backward(),
    "attn_mask requires a gradient": lambda sdpa: sdpa(Q, K, V, torch.zeros(5, 9, requires_grad=True)),
    "dtype torch.float64": lambda sdpa: sdpa(Q.double(), K.double(), V.double()),
    "on meta": lambda sdpa: sdpa(Q.to("meta"), K.to("meta"), V.to("meta")),
    "expected 1 … 1024": lambda sdpa: sdpa(*(torch.ones(1, 1, 3, 1030) for _ in range(3))),
}


@pytest.mark.parametrize("reason", FALLS)
def test_falls_through_with_one_warning(reason):
    with apa_torch.replace_sdpa() as usage:
        with pytest.warns(apa_torch.FellThrough) as caught:
            FALLS[reason](F.scaled_dot_product_attention)
            FALLS[reason](F.scaled_dot_product_attention)
    assert len(caught) == 1 and reason in str(caught[0].message) and caught[0].filename == __file__
    assert usage.calls == 0 and list(usage.fell_through.values()) == [2] and reason in next(iter(usage.fell_through))


def test_gradients_are_pytorchs():
    q, k, v = (torch.randn(1, 2, 9, 16, requires_grad=True) for _ in range(3))
    wanted = torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True).sum(), (q, k, v))
    with apa_torch.replace_sdpa(), pytest.warns(apa_torch.FellThrough):
        found = torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True).sum(), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted))


def test_errors_stay_pytorchs():
    for call in (
        lambda f: f(Q, K, V, torch.ones(5, 9, dtype=torch.bool), is_causal=True),
        lambda f: f(Q, K[..., :8], V),
        lambda f: f(Q, K.double(), V),
    ):
        with pytest.raises(RuntimeError) as wanted:
            call(F.scaled_dot_product_attention)
        with warnings.catch_warnings(), pytest.raises(RuntimeError) as found:
            warnings.simplefilter("ignore", apa_torch.FellThrough)
            call(apa_torch.scaled_dot_product_attention)
        assert str(found.value) == str(wanted.value)
    for wrong in (
        {"dropout_p": float("nan")},
        {"dropout_p": -1.0},
        {"dropout_p": 2.0},
        {"dropout_p": "x"},
        {"dropout_p": None},
        {"scale": "x"},
        {"is_causal": None},
        {"is_causal": 3},
        {"enable_gqa": 3},
        {"attn_mask": torch.ones(5, 9, dtype=torch.int32)},
        {"query": None},
    ):
        given = {"query": Q, "key": K, "value": V, **wrong}
        with pytest.raises((RuntimeError, TypeError)) as wanted:
            F.scaled_dot_product_attention(**given)
        with warnings.catch_warnings(), pytest.raises(wanted.type) as found:
            warnings.simplefilter("ignore", apa_torch.FellThrough)
            apa_torch.scaled_dot_product_attention(**given)
        assert "libapa" not in str(found.value)
    with pytest.raises(apa.InvalidArgument, match="best"):
        apa_torch.scaled_dot_product_attention(Q, K, V, method="best")
    with pytest.raises(apa.InvalidArgument, match="colour"), apa_torch.replace_sdpa(set={"colour": 1}):
        pass


@pytest.mark.parametrize(
    "chosen, kind, line",
    [
        ({"engine": "foo"}, apa.InvalidArgument, 'engine: "foo", expected one of auto, .*cpu, reference'),
        ({"engine": "cp"}, apa.InvalidArgument, 'engine: "cp"'),
        ({"engine": "cpu:x"}, apa.InvalidArgument, 'engine: "cpu:x"'),
        ({"engine": "cuda:wgmma"}, apa.InvalidArgument, 'engine: "cuda:wgmma"'),
        ({"engine": None}, TypeError, "engine: None"),
        ({"method": None}, TypeError, "method: None"),
        ({"set": [1]}, TypeError, "set: a list"),
        ({"eps": True}, apa.InvalidArgument, "eps: found True"),
    ],
    ids=str,
)
def test_a_wrong_choice_is_refused_at_once(chosen, kind, line):
    before = F.scaled_dot_product_attention
    with pytest.raises(kind, match=line), apa_torch.replace_sdpa(**chosen):
        pytest.fail("it was let in")
    with pytest.raises(kind, match=line):
        apa_torch.scaled_dot_product_attention(Q, K, V, **chosen)
    assert F.scaled_dot_product_attention is before


def test_cuda_without_a_device_is_refused_at_once():
    if apa.info()["cuda_devices"]:
        pytest.skip("there is a device")
    with pytest.raises(apa.ApaError), apa_torch.replace_sdpa(engine="cuda"):
        pytest.fail("it was let in")


def test_every_engine_can_be_chosen():
    for engine in ("auto", "cpu", "reference"):
        with apa_torch.replace_sdpa(engine=engine) as usage:
            F.scaled_dot_product_attention(Q, K, V)
        assert usage.calls == 1 and "1 call by libapa" in str(usage)


# ------------------------------------------------------------------------------- existing code


def test_replaces_and_restores():
    original = F.scaled_dot_product_attention
    q, k, v = (torch.randn(1, 2, 300, 32) for _ in range(3))
    with apa_torch.replace_sdpa("cold") as outer:
        cold = F.scaled_dot_product_attention(q, k, v)
        with apa_torch.replace_sdpa("exact") as inner:
            exact = F.scaled_dot_product_attention(q, k, v)
        assert torch.equal(F.scaled_dot_product_attention(q, k, v), cold)
    assert F.scaled_dot_product_attention is original
    assert (outer.calls, inner.calls) == (2, 1) and outer.hot_share == 0.0 and inner.hot_share == 1.0
    assert torch.equal(cold, apa_torch.scaled_dot_product_attention(q, k, v, method="cold"))
    truth = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    assert (exact - truth).norm() < 1e-2 * (cold - truth).norm()
    with pytest.raises(ZeroDivisionError), apa_torch.replace_sdpa():
        raise ZeroDivisionError
    assert F.scaled_dot_product_attention is original
    assert "2 calls by libapa" in str(outer)


def test_multihead_attention():
    module = torch.nn.MultiheadAttention(64, 4, batch_first=True)
    x = torch.randn(2, 50, 64)
    with torch.no_grad():
        module.train()  # the fast path of eval() does not call SDPA
        wanted = module(x, x, x, need_weights=False)[0]
        with apa_torch.replace_sdpa("exact") as usage:
            found = module(x, x, x, need_weights=False)[0]
    assert usage.calls == 1
    close(found, wanted, 1e-5)


def test_compiled_code():
    q, k, v = (torch.randn(1, 2, 40, 16) for _ in range(3))

    def block(q, k, v):
        return F.scaled_dot_product_attention(2 * q, k, v, is_causal=True) + 1

    with torch.no_grad(), apa_torch.replace_sdpa("exact") as usage:
        found = torch.compile(block, backend="eager")(q, k, v)
    assert usage.calls == 1
    close(found, block(q, k, v), 1e-5)


def test_autocast():
    q, k, v = torch.randn(1, 2, 40, 32), torch.randn(1, 2, 90, 32), torch.randn(1, 2, 90, 32).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        wanted = F.scaled_dot_product_attention(q, k, v)
        found = apa_torch.scaled_dot_product_attention(q, k, v, method="exact")
    assert found.dtype == wanted.dtype == torch.bfloat16
    close(found.double(), wanted.double(), 2.0**-6)
