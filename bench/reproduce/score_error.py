#!/usr/bin/env python3
"""Why a verdict was wrong: scores of one row of a dump from exact keys and from keys in NVFP4, with block scales of least squared error
and with nearest ones. NumPy and ml_dtypes (build/venv); shares no code with the library. Query exact, K less its mean, head scale as
apa-0.6 has it. Fills the part score-error of docs/reproduce/frame-collapse.md.

Usage: bench/reproduce/score_error.py [--dumps dumps] [--write]"""
import ml_dtypes
import numpy as np

import lab

E4M3, E2M1 = ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn
CODES = np.arange(127, dtype=np.uint8).view(E4M3).astype(np.float64)
LAYER, KV_HEAD, QUERIES, ROW, HEAD, TILE = 18, 2, 64, 57, 2, 135


def load(path):
    raw = open(path, "rb").read()
    n, kv, nh, nkv, hd, off = (int(x) for x in np.frombuffer(raw, "<i4", 6))
    x = np.frombuffer(raw, "<f2", offset=24).astype(np.float64)
    return x[:n * nh * hd].reshape(n, nh, hd), x[n * nh * hd:n * nh * hd + kv * nkv * hd].reshape(kv, nkv, hd)[:, 0], off


def round_row(row, offsets):
    """One key in NVFP4: per 16 channels the scale among nearest + offsets with the least squared error, the first of equals."""
    out = np.empty_like(row)
    for at in range(0, len(row), 16):
        block, best = row[at:at + 16], np.inf
        nearest = int(np.array(np.abs(block).max() / 6).astype(E4M3).view(np.uint8))
        for offset in offsets:
            scale = CODES[min(126, max(1, nearest + offset))]
            rounded = np.clip(block / scale, -6, 6).astype(E2M1).astype(np.float64) * scale
            error = ((rounded - block) ** 2).sum()
            if error < best:
                best, out[at:at + 16] = error, rounded
    return out


def main():
    page = lab.Lab("frame-collapse", __doc__)
    path = page.dump(f"smollm2-135m_L{LAYER}_32768.dump")
    if not path:
        return
    q, k, off = load(page.slice(path, QUERIES, KV_HEAD)[1])
    row, keys = q[ROW, HEAD] / np.sqrt(k.shape[1]), k - k.mean(0)
    head = 2.0 ** np.ceil(np.log2(4 * np.abs(keys).max() / 2688))
    scores = k[:off + ROW + 1] @ row
    worst = 64 * TILE + int(np.argmax(scores[64 * TILE:64 * TILE + 64]))
    largest, rows = np.argsort(-scores)[:200], []
    for label, offsets in (("searched", (0, -1, 1, -2, 3, 4, 5, 6)), ("nearest", (0,))):
        errors = {j: (round_row(keys[j] / head, offsets) * head - keys[j]) @ row for j in set(largest) | {worst}}
        over = np.array([errors[j] for j in largest])
        rows.append([label, f"{errors[worst]:.2f}", f"{np.exp(-errors[worst]):.0f}x", f"{over.mean():.2f}", f"{over.std():.2f}",
                     f"{over.min():.2f} … {over.max():.2f}"])
    page.put("score-error", f"Norms: query {np.linalg.norm(q[ROW, HEAD]):.1f}, key {np.linalg.norm(keys[worst]):.1f}; score {scores[worst]:.2f}, the "
             f"row's largest {scores.max():.2f} (natural units). Error that K's rounding adds to scores:\n\n" + lab.table(
                 ["block scales", "that key", "its mass is underestimated", "200 largest: mean", "standard deviation", "range"], rows))


if __name__ == "__main__":
    main()
