"""PyTorch code that knows nothing of libapa, with and without it."""

import torch

from apa_attention.torch import replace_sdpa, scaled_dot_product_attention

torch.manual_seed(0)
block = torch.nn.MultiheadAttention(512, 8, batch_first=True)
x = torch.randn(1, 2048, 512)

with torch.no_grad():
    wanted, _ = block(x, x, x, need_weights=False)
    with replace_sdpa() as usage:
        found, _ = block(x, x, x, need_weights=False)
    print("difference:", float((found - wanted).norm() / wanted.norm()))
    print(usage)

    # Or the function itself: PyTorch's signature, and libapa's choices as keywords.
    q, k, v = torch.randn(1, 8, 2048, 64), torch.randn(1, 2, 2048, 64), torch.randn(1, 2, 2048, 64)
    out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, eps=0.05)
    print(out.shape)
