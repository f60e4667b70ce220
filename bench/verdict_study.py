#!/usr/bin/env python3
"""What should a verdict look at? A NumPy simulation of the INT8 recipe on QKV dumps, independent of the library.

For each rule and threshold: relative L2 error over all pairs of the queries taken, at the share of (row, tile) pairs computed
exactly (groups of 16 positions of one head, judged against the final sum). Rules, all per row and tile:
  mass    share of the row's probability mass, l_t / sum                       (what the library does)
  largest largest probability of the tile over the row's sum
  l2      sqrt(sum p^2) of the tile over the row's sum
  value   share times |mean value of the tile - output| / |output|
Also, with --attribute: the error when one operand at a time is quantised (mass rule, one threshold).

Usage: bench/verdict_study.py DUMP... [--queries 64] [--attribute EPS]"""
import argparse
import os

import numpy as np

TILE, GROUP, LOG2E = 64, 16, 1.4426950408889634


def load(path):
    raw = open(path, "rb").read()
    n, kv, nh, nkv, hd, off = np.frombuffer(raw, "<i4", 6)
    values = np.frombuffer(raw, "<f2", offset=24).astype(np.float32)
    q, k, v = np.split(values, [n * nh * hd, n * nh * hd + kv * nkv * hd])
    return q.reshape(n, nh, hd), k.reshape(kv, nkv, hd), v.reshape(kv, nkv, hd), int(off)


def hadamard(d):
    h = np.array([[1.0]])
    while h.shape[0] < d:
        h = np.block([[h, h], [h, -h]])
    return (h / np.sqrt(d)).astype(np.float32)


def int8(x, axis):
    scale = np.abs(x).max(axis=axis, keepdims=True) / 127
    scale[scale == 0] = 1
    return np.rint(x / scale) * scale


class Parts:
    """Per row and tile: quantised (num, den) and exact (num, den) sums in one frame, and the exact output."""

    def __init__(self, q, k, v, off, quantise="qkvp"):
        n, d = q.shape
        keys = k.shape[0]
        tiles = -(-keys // TILE)
        visible = np.arange(keys)[None, :] <= (np.arange(n) + off)[:, None]
        factor = LOG2E / np.sqrt(d)
        s = np.where(visible, q @ k.T * factor, -np.inf)
        frame = s.max(1, keepdims=True)
        p = np.exp2(s - frame)
        self.truth = p @ v / p.sum(1, keepdims=True)
        mean, rotation = k.mean(0), hadamard(d)
        k8, q8 = (k - mean) @ rotation, q @ rotation
        k8 = int8(k8, 1) if "k" in quantise else k8
        q8 = int8(q8, 1) if "q" in quantise else q8
        s8 = np.where(visible, q8 @ k8.T * factor, -np.inf)
        frame8 = frame - (q @ mean)[:, None] * factor
        shape = (n, tiles)
        self.num, self.exact_num = np.zeros(shape + (v.shape[1],)), np.zeros(shape + (v.shape[1],))
        self.den, self.exact_den, self.largest, self.l2 = (np.zeros(shape) for _ in range(4))
        for t in range(tiles):
            span = slice(t * TILE, min(keys, (t + 1) * TILE))
            top = s8[:, span].max(1, keepdims=True)
            top = np.where(np.isinf(top), 0, top)
            pt = np.exp2(s8[:, span] - top)
            pt = np.rint(255 * pt) / 255 if "p" in quantise else pt
            pt = pt * np.exp2(np.clip(top - frame8, -120, 60))
            vt = int8(v[span], 0) if "v" in quantise else v[span]
            self.den[:, t], self.num[:, t] = pt.sum(1), pt @ vt
            self.exact_den[:, t], self.exact_num[:, t] = p[:, span].sum(1), p[:, span] @ v[span]
            self.largest[:, t], self.l2[:, t] = pt.max(1), np.sqrt((pt * pt).sum(1))
        self.total = self.den.sum(1, keepdims=True)

    def rules(self):
        mean = self.num / np.maximum(self.den, 1e-30)[:, :, None]
        away = np.linalg.norm(mean - self.truth[:, None], axis=2) / np.linalg.norm(self.truth, axis=1)[:, None]
        share = self.den / self.total
        return {"mass": share, "largest": self.largest / self.total, "l2": self.l2 / self.total, "value": share * away}

    def error(self, measure, threshold):
        n, tiles = measure.shape
        hot = np.repeat((measure > threshold).reshape(n // GROUP, GROUP, tiles).any(1), GROUP, 0)
        num = np.where(hot[:, :, None], self.exact_num, self.num).sum(1)
        den = np.where(hot, self.exact_den, self.den).sum(1, keepdims=True)
        return ((num / den - self.truth) ** 2).sum(), (self.truth ** 2).sum(), hot.mean()


THRESHOLDS = {"mass": [.005, .01, .02, .04, .08], "largest": [.002, .004, .008, .016, .03],
              "l2": [.003, .006, .012, .024], "value": [.005, .01, .02, .04, .08]}


def heads(path, queries):
    q, k, v, off = load(path)
    queries = min(queries, q.shape[0]) // GROUP * GROUP
    start = q.shape[0] - queries
    for h in range(q.shape[1]):
        kv = h // (q.shape[1] // k.shape[1])
        yield q[start:, h], k[:, kv], v[:, kv], off + start


def show(name, sums):
    cells = [f"{key}: {np.sqrt(e / r):.1e} at {100 * hot / n:.1f} %" for key, (e, r, hot, n) in sums.items()]
    print(f"  {name:8s} " + "   ".join(cells), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dumps", nargs="+")
    parser.add_argument("--queries", type=int, default=64)
    parser.add_argument("--attribute", type=float, metavar="EPS")
    options = parser.parse_args()
    for path in options.dumps:
        print(os.path.basename(path))
        sums = {}
        for q, k, v, off in heads(path, options.queries):
            if options.attribute:
                for which in ("qkvp", "q", "k", "v", "p"):
                    parts = Parts(q, k, v, off, which)
                    e, r, hot = parts.error(parts.rules()["mass"], options.attribute)
                    old = sums.setdefault("operand", {}).get(which, (0, 0, 0, 0))
                    sums["operand"][which] = tuple(a + b for a, b in zip(old, (e, r, hot, 1)))
                continue
            parts = Parts(q, k, v, off)
            for name, measure in parts.rules().items():
                for threshold in THRESHOLDS[name]:
                    e, r, hot = parts.error(measure, threshold)
                    old = sums.setdefault(name, {}).get(threshold, (0, 0, 0, 0))
                    sums[name][threshold] = tuple(a + b for a, b in zip(old, (e, r, hot, 1)))
        for name, results in sums.items():
            show(name, results)


if __name__ == "__main__":
    main()
