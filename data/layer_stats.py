#!/usr/bin/env python3
"""What the attention in dump files looks like, one table row per file and KV head, over all pairs.

Every query row of every head that the file holds is judged by its exact, causal softmax. Columns:
  first, tile0   mean probability mass on key 0, and on the first tile of keys
  near           mean mass on the last two visible tiles
  keys           effective number of keys, exp(entropy), as the median and the 90th percentile of the rows
  hot            % of the visible (row, tile) that hold more than --share of their row's mass
  hot16          the same for groups of 16 packed rows, hot if one of the rows is
  kept           mean mass inside the hot tiles of a row
  smax           largest |scaled score|
  kmean, kout    K: largest |channel mean| over its deviation; largest over median channel peak after centring
  vout           V: largest over median channel peak
  rel, cos, min  scores from INT8 (K centred per channel, one scale per key; Q one scale per row), P and V
                 exact: relative L2 error over all outputs, mean and worst cosine of a pair
"""
import os
for _name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"

import argparse
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

try:
    import numpy as np
except ImportError as missing:
    sys.exit(f"layer_stats.py: {missing}; data/make_dumps.sh makes an environment that has it")

TILE = 64
BLOCK = 16         # query positions per job: with any number of heads a whole number of 16-row groups
COLUMNS = "first tile0 near keys keys90 hot hot16 kept smax kmean kout vout rel cos min".split()


def read_dump(path):
    data = np.fromfile(path, dtype=np.uint8)
    if len(data) < 24:
        raise ValueError(f"{path}: {len(data)} bytes; expected a header of 24")
    n, kv, nh, nkv, hd, off = (int(i) for i in data[:24].view("<i4"))
    sizes = [n * nh * hd, kv * nkv * hd, kv * nkv * hd]
    if min(n, kv, nh, nkv, hd) < 1 or off < 0 or nh % nkv or len(data) != 24 + 2 * sum(sizes):
        raise ValueError(f"{path}: header {n, kv, nh, nkv, hd, off} does not match {len(data)} bytes")
    q, k, v = np.split(data[24:].view("<f2").astype(np.float32), np.cumsum(sizes)[:2])
    return q.reshape(n, nh, hd), k.reshape(kv, nkv, hd), v.reshape(kv, nkv, hd), off


def int8_rows(x):
    scale = np.abs(x).max(-1, keepdims=True) / np.float32(127)
    scale[scale == 0] = 1
    return np.rint(x / scale), scale


def softmax(score):
    """In place; returns the natural log of the sum of exponentials."""
    top = score.max(-1, keepdims=True)
    score -= top
    np.exp(score, out=score)
    mass = score.sum(-1, keepdims=True)
    score /= mass
    return (np.log(mass) + top)[:, 0]


def head_stats(executor, q, k, v, off, share, window):
    """q[n][G][hd], k and v [kv][hd] of one KV head; window counts the keys before the row's own, or -1."""
    count, group, dim = q.shape
    centred = k - k.mean(0)
    cold_k, k_scale = int8_rows(centred)
    scale = np.float32(1 / math.sqrt(dim))

    def job(first):
        last = min(first + BLOCK, count)
        rows = (q[first:last] * scale).reshape(-1, dim)
        visible = np.minimum(np.repeat(np.arange(first, last), group) + off + 1, len(k))
        seen = visible.max()
        begin = np.maximum(visible - 1 - window, 0) if window >= 0 else np.zeros_like(visible)
        hidden = (np.arange(seen) >= visible[:, None]) | (np.arange(seen) < begin[:, None])
        tiles = -(-visible // TILE)
        exact = rows @ k[:seen].T
        smax = np.abs(np.where(hidden, 0, exact)).max()
        exact[hidden] = -np.inf
        raw = np.where(hidden, 0, exact)
        lse = softmax(exact)
        entropy = lse - (exact * raw).sum(1)
        starts = np.arange(0, seen, TILE)
        mass = np.add.reduceat(exact, starts, axis=1)
        real = (np.arange(len(starts)) < tiles[:, None]) & (starts + TILE > begin[:, None])
        hot = (mass > share) & real
        grouped = [np.s_[i:i + 16] for i in range(0, len(rows), 16)]
        hot16 = sum(int(hot[g].any(0).sum()) for g in grouped)
        real16 = sum(int(real[g].any(0).sum()) for g in grouped)
        at = np.arange(len(rows))
        near = mass[at, tiles - 1] + np.where(tiles > 1, mass[at, np.maximum(tiles - 2, 0)], 0)
        truth = exact @ v[:seen]
        cold_q, q_scale = int8_rows(rows)
        cold = (cold_q @ cold_k[:seen].T) * q_scale * k_scale[:seen, 0]
        cold[hidden] = -np.inf
        softmax(cold)
        output = cold @ v[:seen]
        cos = (truth * output).sum(1) / np.sqrt((truth ** 2).sum(1) * (output ** 2).sum(1))
        sums = np.array([exact[:, 0].sum(), mass[:, 0].sum(), near.sum(), hot.sum(), real.sum(), hot16, real16,
                         np.where(hot, mass, 0).sum(), ((output - truth) ** 2).sum(), (truth ** 2).sum(), cos.sum()],
                        dtype=np.float64)
        return sums, np.exp(entropy), smax, cos.min()

    parts = list(executor.map(job, range(0, count, BLOCK)))
    s = sum(p[0] for p in parts)
    pairs, keys = count * group, np.concatenate([p[1] for p in parts])
    peak = lambda x: np.abs(x).max(0).max() / np.median(np.abs(x).max(0))
    return dict(zip(COLUMNS, (
        s[0] / pairs, s[1] / pairs, s[2] / pairs, np.median(keys), np.percentile(keys, 90), 100 * s[3] / s[4],
        100 * s[5] / s[6], s[7] / pairs, max(p[2] for p in parts), (np.abs(k.mean(0)) / (k.std(0) + 1e-9)).max(),
        peak(centred), peak(v), math.sqrt(s[8] / s[9]), s[10] / pairs, min(p[3] for p in parts))))


def main(argv):
    parser = argparse.ArgumentParser(
        prog="layer_stats.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dumps", nargs="+", type=Path, metavar="DUMP")
    parser.add_argument("--share", type=float, default=0.02, help="mass above which a tile is hot (default %(default)s)")
    parser.add_argument("--window", type=int, default=-1, metavar="L",
                        help="each row sees the L keys before its own and its own (default: all)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: all cores")
    args = parser.parse_args(argv)
    form = ("{:6.3f} {:6.3f} {:6.3f} {:7.1f} {:7.1f} {:6.2f} {:6.2f} {:6.3f} {:6.1f} {:6.1f} {:6.1f} {:6.1f} "
            "{:9.2e} {:9.6f} {:9.6f}")
    width = max(len(p.name) for p in args.dumps)
    print(f"{'file':{width}s} kv  " + "{:>6s} {:>6s} {:>6s} {:>7s} {:>7s} {:>6s} {:>6s} {:>6s} {:>6s} {:>6s} {:>6s} {:>6s} "
          "{:>9s} {:>9s} {:>9s}".format(*COLUMNS))
    with ThreadPoolExecutor(args.threads) as executor:
        for path in args.dumps:
            q, k, v, off = read_dump(path)
            group = q.shape[1] // k.shape[1]
            for head in range(k.shape[1]):
                own = slice(head * group, (head + 1) * group)
                stats = head_stats(executor, q[:, own], k[:, head], v[:, head], off, args.share, args.window)
                print(f"{path.name:{width}s} {head:2d}  " + form.format(*stats.values()), flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (OSError, ValueError) as error:
        print(f"layer_stats.py: {error}", file=sys.stderr)
        sys.exit(2)
