"""Sequences of different lengths in one call: packed end to end, and in pages as inference servers keep them."""

import numpy as np

import apa_attention as apa

rng = np.random.default_rng(0)
Hq, Hkv, D = 8, 2, 64
queries, keys = [1, 30, 200], [700, 90, 200]  # decoding, a chunk of a prompt, a whole prompt
cu_q, cu_k = np.cumsum([0, *queries]), np.cumsum([0, *keys])

q = rng.standard_normal((cu_q[-1], Hq, D), dtype=np.float32)
k, v = (rng.standard_normal((cu_k[-1], Hkv, D), dtype=np.float32) for _ in range(2))
packed = apa.attention(q, k, v, causal=True, layout="nhd", cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
print("packed:", packed.shape)

# The same keys in pages of 16, handed out in no order.
size = 16
pages = [-(-n // size) for n in keys]
free = list(rng.permutation(sum(pages)))
table = np.zeros((len(keys), max(pages)), np.int32)
k_pages, v_pages = (np.zeros((sum(pages), size, Hkv, D), np.float32) for _ in range(2))
for b, n in enumerate(keys):
    for i in range(pages[b]):
        page = table[b, i] = free.pop()
        rows = slice(cu_k[b] + i * size, cu_k[b] + min((i + 1) * size, n))
        k_pages[page, : rows.stop - rows.start], v_pages[page, : rows.stop - rows.start] = k[rows], v[rows]
paged = apa.attention(
    q, k_pages, v_pages, causal=True, layout="nhd", cu_seqlens_q=cu_q, seqused_k=keys, block_table=table
)
print("paged against packed:", float(abs(paged - packed).max()))
