#!/usr/bin/env python3
"""Holds the reference engine's exact attention against float64 numpy.

    reference_oracle.py PATH/TO/apa [seed]

Runs `apa run --engine reference --method exact --out-dtype f64` on random problems of every input type the command
reads, and compares outputs (relative L2) and LSE with a plain softmax. Exits 1 on the first disagreement. Needs numpy.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy

TOLERANCE = 1e-12  # relative L2 of the output, both sides in double
LSE_TOLERANCE = 1e-7  # the command writes LSE as f32

# B, Hq, Hkv, Sq, Skv, D, causal, q_offset, window (left, right)
PROBLEMS = [
    (1, 1, 1, 1, 1, 16, True, None, None),
    (1, 9, 3, 113, 203, 64, True, None, None),
    (1, 9, 3, 113, 211, 64, False, None, None),
    (2, 5, 1, 108, 256, 80, True, None, None),
    (1, 4, 4, 127, 129, 128, True, None, None),
    (1, 4, 4, 239, 1, 33, False, None, None),
    (1, 2, 1, 64, 512, 256, True, 100, None),
    (1, 2, 1, 64, 512, 64, True, -20, None),
    (1, 2, 2, 90, 300, 64, False, None, (40, 17)),
]


def truth(q, k, v, causal, offset, window):
    """Softmax attention in float64, all logits at once: out, lse."""
    q, k, v = (x.astype(numpy.float64) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (numpy.repeat(x, group, axis=1) for x in (k, v))
    logits = q @ k.swapaxes(2, 3) / numpy.sqrt(q.shape[3])
    offset = k.shape[2] - q.shape[2] if offset is None else offset
    distance = numpy.arange(k.shape[2])[None, :] - (numpy.arange(q.shape[2])[:, None] + offset)
    seen = numpy.ones(distance.shape, bool)
    if causal:
        seen &= distance <= 0
    if window is not None:
        seen &= (distance >= -window[0]) & (distance <= window[1])
    logits = numpy.where(seen, logits, -numpy.inf)
    top = logits.max(axis=3, keepdims=True)
    weights = numpy.where(seen, numpy.exp(logits - numpy.where(numpy.isinf(top), 0, top)), 0)
    total = weights.sum(axis=3, keepdims=True)
    with numpy.errstate(divide="ignore"):
        lse = numpy.where(total > 0, top + numpy.log(total), -numpy.inf)[..., 0]
    return weights @ v / numpy.where(total > 0, total, 1), lse


def run(apa, folder, arrays, causal, offset, window):
    """The command's out and lse."""
    command = [apa, "run", "--engine", "reference", "--method", "exact", "--out-dtype", "f64"]
    for name, array in zip("qkv", arrays):
        numpy.save(folder / f"{name}.npy", array)
        command += [f"--{name}", str(folder / f"{name}.npy")]
    command += ["--out", str(folder / "o.npy"), "--lse", str(folder / "lse.npy")]
    command += ["--causal" if causal else "--no-causal"]
    if offset is not None:
        command += ["--q-offset", str(offset)]
    if window is not None:
        command += ["--window", f"{window[0]},{window[1]}"]
    subprocess.run(command, check=True)
    return numpy.load(folder / "o.npy"), numpy.load(folder / "lse.npy")


def main():
    apa, seed = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1
    print(f"seed {seed}")
    random = numpy.random.default_rng(seed)
    worst = 0.0
    with tempfile.TemporaryDirectory() as name:
        for B, Hq, Hkv, Sq, Skv, D, causal, offset, window in PROBLEMS:
            for dtype in (numpy.float16, numpy.float32, numpy.float64):
                shapes = ((B, Hq, Sq, D), (B, Hkv, Skv, D), (B, Hkv, Skv, D))
                arrays = [random.standard_normal(shape).astype(dtype) for shape in shapes]
                out, lse = run(apa, Path(name), arrays, causal, offset, window)
                true_out, true_lse = truth(*arrays, causal, offset, window)
                error = numpy.linalg.norm(out.ravel() - true_out.ravel()) / numpy.linalg.norm(true_out.ravel())
                lse = lse.reshape(true_lse.shape).astype(numpy.float64)
                finite = numpy.isfinite(true_lse)
                same = numpy.array_equal(lse[~finite], true_lse[~finite])
                lse_error = numpy.max(
                    numpy.abs(lse - true_lse)[finite] / numpy.maximum(1, numpy.abs(true_lse[finite])), initial=0
                )
                if not (error <= TOLERANCE and lse_error <= LSE_TOLERANCE and same):
                    print(f"FAIL {(B, Hq, Hkv, Sq, Skv, D, causal, offset, window)} {dtype.__name__}: {error} {lse_error}")
                    return 1
                worst = max(worst, error)
    print(f"{3 * len(PROBLEMS)} problems agree, worst relative L2 {worst:.2e}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
