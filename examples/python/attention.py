"""Attention of numpy arrays: the adaptive method, its error over every output vector, and two halves merged."""

import numpy as np

import apa_attention as apa

rng = np.random.default_rng(0)
Hq, Hkv, Sq, Skv, D = 6, 2, 256, 8192, 64
q = 2 * rng.standard_normal((1, Hq, Sq, D), dtype=np.float32)
k, v = (rng.standard_normal((1, Hkv, Skv, D), dtype=np.float32) for _ in range(2))

# The last 256 queries of a sequence of 8192.
out, statistics = apa.attention(q, k, v, causal=True, return_statistics=True)
print(f"{statistics.kernel} on engine {statistics.engine}: {100 * statistics.hot_share:.1f} % of the tiles exact")

truth = apa.exact(q, k, v, causal=True)  # in double; shared by the methods below
for method in ("exact", "apa", "cold"):
    e = apa.evaluate(q, k, v, causal=True, method=method, truth=truth, repeats=1)
    print(f"{method:6} rel L2 {e.rel_l2:.2e}, worst cosine {e.min_cos:.6f}, {e.prep_ms + e.attention_ms:7.2f} ms")

# The same keys in two halves, as two machines or two passes would have them. Every query sees all of the first half.
half = Skv // 2
whole = apa.attention(q, k, v, method="exact", causal=True)
first = apa.attention(q, k[:, :, :half], v[:, :, :half], method="exact", return_lse=True)
second = apa.attention(q, k[:, :, half:], v[:, :, half:], method="exact", causal=True, return_lse=True)
merged, lse = apa.merge_states(*first, *second)
print("merged halves against the whole:", float(abs(merged - whole).max()))
