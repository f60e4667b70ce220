"""attn_implementation="apa" on small random models, against "eager"."""

from __future__ import annotations

import warnings

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import apa_attention.transformers as apa_transformers  # noqa: E402
from apa_attention import ApaError, InvalidArgument  # noqa: E402
from apa_attention.torch import FellThrough  # noqa: E402
from conftest import SEED  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")  # Transformers has warnings of its own
SMALL = dict(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=512,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
MODELS = {
    "llama": (transformers.LlamaConfig, {}),
    "mistral": (transformers.MistralConfig, {"sliding_window": 20}),
    "gemma2": (
        transformers.Gemma2Config,
        {"sliding_window": 20, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16},
    ),
    "gpt_oss": (transformers.GptOssConfig, {"sliding_window": 20, "num_local_experts": 4, "num_experts_per_tok": 2}),
}


def make(kind):
    torch.manual_seed(SEED)
    make_config, more = MODELS[kind]
    model = transformers.AutoModelForCausalLM.from_config(make_config(**{**SMALL, **more}), attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "sinks" in name or "norm" not in name:
                parameter.normal_(0, 0.15)
    return model.eval()


def both(model, name, **inputs):
    with torch.no_grad():
        model.set_attn_implementation("eager")
        wanted = model(**inputs).logits
        model.set_attn_implementation(name)
        return model(**inputs).logits, wanted


def assert_close(found, wanted):
    assert found.isfinite().all() and not ((found - wanted).abs() > 2e-4 * (1 + wanted.abs().max())).any()


@pytest.mark.parametrize("kind", MODELS)
def test_prefill(kind):
    usage = apa_transformers.register("apa-test", "exact")
    model = make(kind)
    ids = torch.randint(3, 97, (2, 70))
    assert_close(*both(model, "apa-test", input_ids=ids))
    assert usage.calls == 2 and not usage.fell_through


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(kind, side):
    usage = apa_transformers.register("apa-test", "exact")
    model = make(kind)
    ids = torch.randint(3, 97, (2, 40))
    mask = torch.ones(2, 40, dtype=torch.long)
    padding = slice(0, 9) if side == "left" else slice(31, 40)
    mask[1, padding], ids[1, padding] = 0, 0
    found, wanted = both(model, "apa-test", input_ids=ids, attention_mask=mask)
    assert_close(found[mask.bool()], wanted[mask.bool()])
    assert usage.calls == 2 and not usage.fell_through


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_chunks_and_decoding(kind, cache):
    """A prompt in two chunks, then single tokens, as one whole."""
    usage = apa_transformers.register("apa-test", "exact")
    model = make(kind)
    ids = torch.randint(3, 97, (1, 45))
    with torch.no_grad():
        wanted = model(ids).logits
        model.set_attn_implementation("apa-test")
        made = (
            transformers.DynamicCache(config=model.config)
            if cache == "dynamic"
            else transformers.StaticCache(config=model.config, max_cache_len=64)
        )
        parts, at = [], 0
        for step in (25, 15, 1, 1, 3):
            out = model(ids[:, at : at + step], past_key_values=made, cache_position=torch.arange(at, at + step))
            parts.append(out.logits)
            at += step
    assert_close(torch.cat(parts, 1), wanted)
    assert usage.calls == 10 and not usage.fell_through


def test_generate():
    model = make("llama")
    ids = torch.randint(3, 97, (1, 30))
    apa_transformers.register("apa-test", "exact")
    wanted = model.generate(ids, max_new_tokens=12, do_sample=False)
    model.set_attn_implementation("apa-test")
    assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False), wanted)


def test_training_falls_through():
    usage = apa_transformers.register("apa-test")
    model = make("llama")
    ids = torch.randint(3, 97, (1, 30))
    model.set_attn_implementation("sdpa")
    model.train()
    model(ids, labels=ids).loss.backward()
    wanted = model.model.layers[0].self_attn.q_proj.weight.grad.clone()
    model.zero_grad()
    model.set_attn_implementation("apa-test")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(ids, labels=ids).loss.backward()
    assert torch.allclose(model.model.layers[0].self_attn.q_proj.weight.grad, wanted, atol=1e-6)
    assert usage.calls == 0 and sum(usage.fell_through.values()) == 2
    assert len([w for w in caught if w.category is FellThrough]) <= 1


def test_apa_is_registered_and_close():
    model = make("llama")
    ids = torch.randint(3, 97, (1, 400))
    before = apa_transformers.usage.calls
    found, wanted = both(model, "apa", input_ids=ids)
    assert apa_transformers.usage.calls == before + 2
    assert (found - wanted).norm() < 0.02 * wanted.norm()


@pytest.mark.parametrize(
    "name", ["sdpa", "eager", "flash_attention_2", "flex_attention", "paged|sdpa", "a/b", "", "mine"]
)
def test_names_of_others_are_left_alone(name):
    interface = transformers.AttentionInterface
    if name == "mine":
        interface.register(name, lambda *_: None)
    before = dict(interface())
    with pytest.raises(InvalidArgument, match="^name: "):
        apa_transformers.register(name)
    assert dict(interface()) == before


def test_own_names_can_be_registered_again():
    for name in ("apa-test", "apa-test"):
        apa_transformers.register(name, "exact")


@pytest.mark.parametrize(
    "chosen, kind",
    [
        ({"engine": "foo"}, InvalidArgument),
        ({"engine": "cuda:foo"}, ApaError),
        ({"method": "best"}, InvalidArgument),
        ({"engine": None}, TypeError),
        ({"name": None}, TypeError),
    ],
    ids=str,
)
def test_a_wrong_choice_is_refused_at_once(chosen, kind):
    with pytest.raises(kind):
        apa_transformers.register(**{"name": "apa-wrong", **chosen})
    assert "apa-wrong" not in transformers.AttentionInterface()
