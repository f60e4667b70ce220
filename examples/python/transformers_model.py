"""A Transformers model with attn_implementation="apa" (a small one with random weights, so that nothing is fetched)."""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import apa_attention.transformers  # registers "apa"

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    max_position_embeddings=8192,
    pad_token_id=0,
)
model = AutoModelForCausalLM.from_config(config, attn_implementation="apa").eval()

prompt = torch.randint(1, 512, (1, 3000))
tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False)
print(tokens[0, -8:].tolist())
print(apa_attention.transformers.usage)
