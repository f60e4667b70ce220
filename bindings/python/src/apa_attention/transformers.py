"""libapa for Transformers: the attention implementation "apa".

    import apa_attention.transformers                                     # registers "apa"
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="apa")

register() adds others under names of their own, such as register("apa-fine", eps=0.01), and returns a Usage that counts.
Grouped heads, windows, soft caps (Gemma 2) and attention sinks (GPT-OSS) are taken as they are; causal prompts, chunks and
decoding need no mask in memory. Training (gradients, dropout) goes to PyTorch's SDPA with one warning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from apa_attention import _problem
from apa_attention._checks import name_bytes, shown
from apa_attention._library import ApaError, Unsupported, bad
from apa_attention.torch import Settings, Usage, _refusal, run, warn_once

__all__ = ["register", "usage"]

OURS = "_apa_attention"  # marks what this module has registered


def _is_whole(mask: Tensor | None, length: int) -> bool:
    """No padding among the keys?"""
    return mask is None or (mask.shape[-1] >= length and bool(mask[..., -length:].all()))


def apa_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    *,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **options: Any,
) -> Tensor | None:
    """SDPA's boolean mask, or None where "the queries are the last keys, each sees what is before it" says it all.

    SDPA's None has another meaning (top-left) when a static cache is longer than the prompt; that one gets a mask."""
    queries_are_last = int(q_offset) + q_length == int(kv_offset) + kv_length
    within = local_size is None or kv_length < local_size
    if allow_is_causal_skip and queries_are_last and within and _is_whole(attention_mask, kv_length):
        return None
    made: Tensor | None = sdpa_mask(
        batch_size,
        q_length,
        kv_length,
        q_offset,
        kv_offset,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=False,
        **options,
    )
    return made


def _forward(settings: Settings, counts: Usage) -> Callable[..., tuple[Tensor, None]]:
    """An attention function as Transformers calls it: query [B, Hq, L, D], key and value [B, Hkv, S, D]; returns
    [B, L, Hq, Dv] and no weights."""

    def forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        position_bias: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        causal = (getattr(module, "is_causal", True) if is_causal is None else is_causal) and attention_mask is None
        reason = _refusal(
            {"query": query, "key": key, "value": value, "attn_mask": attention_mask, "sinks": s_aux}, dropout, settings
        )
        if position_bias is not None:
            reason = "position_bias is given"
        if reason is None:
            batch, heads, length, _ = query.shape
            out = torch.empty(batch, length, heads, value.shape[-1], dtype=query.dtype, device=query.device)
            options: _problem.ProblemOptions = {
                "scale": scaling,
                "causal": causal,
                "attn_mask": attention_mask,
                "softcap": softcap,
                "sinks": s_aux,
            }
            try:
                run(query, key, value, out.transpose(1, 2), settings, counts, options)
                return out, None
            except ApaError as error:
                reason = str(error)
        if softcap is not None or s_aux is not None:
            raise Unsupported(f"{reason}; and PyTorch's SDPA has neither soft cap nor sinks", "APA_STATUS_UNSUPPORTED")
        counts._fell(reason)
        warn_once(reason)
        return _sdpa(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            position_bias=position_bias,
            causal=causal,
            **kwargs,
        )

    setattr(forward, OURS, True)
    return forward


def _sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    causal: bool,
    position_bias: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Transformers' own SDPA. apa_mask()'s None is spelled out where SDPA would read it as top-left."""
    if causal and 1 < query.shape[2] != key.shape[2]:
        seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
        attention_mask = seen.tril(key.shape[2] - query.shape[2])[None, None]
    if position_bias is not None:
        kwargs["position_bias"] = position_bias
    found: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return found


def _check_name(name: str) -> None:
    """New, or one of ours. "/" and "|" have meanings of their own in Transformers (a kernel of the hub, paged)."""
    expected = 'a name for attn_implementation, without "/" and "|"'
    if not name_bytes(name, "name", expected) or "/" in name or "|" in name:
        raise bad("name", shown(name), expected)
    interfaces = [kind() for kind in (AttentionMaskInterface, AttentionInterface)]  # type: ignore[no-untyped-call, unused-ignore]
    theirs = {**interfaces[0], **interfaces[1]}
    if name == "eager" or (name in theirs and not hasattr(theirs[name], OURS)):
        raise bad("name", f'"{name}"', 'one that is not taken, such as "apa-fine"')


def register(
    name: str,
    method: str = "apa",
    *,
    eps: float | None = None,
    engine: str = "auto",
    set: Mapping[str, object] | None = None,
) -> Usage:
    """Makes attn_implementation=name mean this method; the arguments are attention()'s. Registering a name again
    replaces it for models that are already loaded too. Returns the Usage of its calls.

    Raises InvalidArgument for a name that Transformers or others have ("sdpa"), and for a method, knob or engine that
    does not exist; Unsupported for "cuda" without a device."""
    _check_name(name)
    settings, counts = Settings(method, eps, engine, set), Usage()
    settings.check()
    AttentionInterface.register(name, _forward(settings, counts))
    AttentionMaskInterface.register(name, apa_mask)
    return counts


usage = register("apa")
"""Counts the calls of attn_implementation="apa"."""
