"""What methods of the literature do to the same inputs: error over every output vector, worst one first."""

import numpy as np

import apa_attention as apa

rng = np.random.default_rng(0)
q = 2 * rng.standard_normal((1, 2, 64, 64), dtype=np.float32)
k, v = (rng.standard_normal((1, 1, 1024, 64), dtype=np.float32) for _ in range(2))
k[..., ::21] += 6  # outlier channels

truth = apa.exact(q, k, v, causal=True)
rows = []
for method in ("apa", "cold", "apa-nvfp4", "sage2", "sage3", "ffpa-fp8", "thrift", "lamp"):
    rows.append(apa.evaluate(q, k, v, causal=True, method=method, truth=truth, time_exact=False))
for e in sorted(rows, key=lambda e: e.min_cos):
    print(
        f"{e.method:10} worst cosine {e.min_cos:8.5f}   rel L2 {e.rel_l2:.2e}   hot {100 * e.hot_share:5.1f} %   {e.engine}"
    )

print(
    "one knob changed:", apa.evaluate(q, k, v, causal=True, method="sage3", set={"smooth_q": False}, truth=truth).rel_l2
)
