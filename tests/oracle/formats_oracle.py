"""Formats and block scales against numpy and ml_dtypes.

    python formats_oracle.py PATH/test_formats PATH/test_blocks

The two test programs serve as filters (values in, codes out). numpy is the oracle of f16, ml_dtypes of bf16, E2M1, E4M3, E5M2
and E8M0; INT8 and NVFP4 blocks are written down again with numpy's float32 operations. Exit 0 and one line per comparison
when all agree, 1 with the first differences otherwise.
"""

import subprocess
import sys

import ml_dtypes
import numpy as np

SEED = 4242
FAILURES = []


def run(program, mode, argument, data):
    return subprocess.run([program, mode, str(argument)], input=data.tobytes(), stdout=subprocess.PIPE, check=True).stdout


def compare(name, found, expected, inputs):
    """Counts differences; inputs are shown for the first few."""
    if found.shape != expected.shape or found.size == 0:
        wrong = np.arange(min(3, len(inputs)))
        print(f"{name}: found shape {found.shape}, expected {expected.shape}")
    else:
        differ = (found != expected).reshape(len(found), -1).any(axis=1)
        wrong = np.nonzero(differ)[0]
        print(f"{name}: {len(found)} compared, {len(wrong)} differ")
        for i in wrong[:5]:
            print(f"  {inputs[i]!r}: found {found[i]}, expected {expected[i]}")
    if len(wrong) or found.size == 0:
        FAILURES.append(name)


def inputs_for(dtype, codes):
    """Float32 values: every f16 and bf16 value, all codes of the format, midpoints of neighbours with a float either side,
    random bit patterns; no NaN. float32 because ml_dtypes rounds float64 through it."""
    every = np.arange(65536, dtype=np.uint16)
    with np.errstate(invalid="ignore"):
        half = every.view(np.float16).astype(np.float32)
        brain = every.view(ml_dtypes.bfloat16).astype(np.float32)
        own = codes.view(dtype).astype(np.float64)
    own = np.unique(own[np.isfinite(own)])
    middle = ((own[:-1] + own[1:]) / 2).astype(np.float32)
    random = np.random.default_rng(SEED).integers(0, 2**32, 400000, dtype=np.uint32).view(np.float32)
    base = np.concatenate([own.astype(np.float32), middle])
    with np.errstate(over="ignore"):
        around = [base, np.nextafter(base, np.float32(np.inf)), np.nextafter(base, np.float32(-np.inf))]
    values = np.concatenate([half, brain, random, *around, np.float32([0.0, -0.0, np.inf, -np.inf])])
    return values[~np.isnan(values)]


def check_formats(program):
    limits = {"e4m3": 448.0, "e5m2": 57344.0, "ue4m3": 448.0}  # ours saturates where ml_dtypes has NaN or infinity
    formats = {
        "f16": (np.float16, np.uint16),
        "bf16": (ml_dtypes.bfloat16, np.uint16),
        "e4m3": (ml_dtypes.float8_e4m3fn, np.uint8),
        "ue4m3": (ml_dtypes.float8_e4m3fn, np.uint8),
        "e5m2": (ml_dtypes.float8_e5m2, np.uint8),
        "e2m1": (ml_dtypes.float4_e2m1fn, np.uint8),
        "e8m0": (ml_dtypes.float8_e8m0fnu, np.uint8),
    }
    for name, (dtype, integer) in formats.items():
        codes = np.arange(16 if name == "e2m1" else 128 if name == "ue4m3" else 2 ** (8 * np.dtype(integer).itemsize))
        codes = codes.astype(integer)
        decoded = np.frombuffer(run(program, "decode", name, codes.astype(np.uint32)), np.float64)
        with np.errstate(invalid="ignore"):
            theirs = codes.view(dtype).astype(np.float64)
        real = ~np.isnan(theirs)
        compare(f"{name} NaN codes", np.isnan(decoded), ~real, codes)
        compare(f"{name} decode", decoded[real].view(np.uint64), theirs[real].view(np.uint64), codes[real])

        values = inputs_for(dtype, codes)
        if name == "e8m0":
            # The domain on which the two agree; the header states the rest, check_e8m0_differences() holds it to that.
            values = values[(values >= 2.0**-126) & (values < 1.5 * 2.0**127)]
        clipped = values
        if name in limits:
            clipped = np.clip(values, -limits[name], np.float32(limits[name]))
        if name == "ue4m3":
            clipped = np.where(clipped < 0, np.float32(0), np.abs(clipped))
        with np.errstate(over="ignore"):
            expected = clipped.astype(dtype).view(integer).astype(np.uint32)
        found = np.frombuffer(run(program, "encode", name, values.astype(np.float64)), np.uint32)
        compare(f"{name} encode", found, expected, values)


def check_f16_from_doubles(program):
    """numpy rounds float64 to float16 directly: doubles that float32 would turn into ties."""
    half = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)
    middle = (half[:-1] + half[1:]) / 2
    values = np.concatenate([middle, np.nextafter(middle, np.inf), np.nextafter(middle, -np.inf)])
    values = np.concatenate([values, -values])
    found = np.frombuffer(run(program, "encode", "f16", values), np.uint32)
    compare("f16 encode of doubles", found, values.astype(np.float16).view(np.uint16).astype(np.uint32), values)


def check_nan(program):
    values = np.array([np.nan, np.copysign(np.nan, -1.0)])
    for name, dtype, integer in [("f16", np.float16, np.uint16), ("bf16", ml_dtypes.bfloat16, np.uint16),
                                 ("e4m3", ml_dtypes.float8_e4m3fn, np.uint8), ("e5m2", ml_dtypes.float8_e5m2, np.uint8),
                                 ("e8m0", ml_dtypes.float8_e8m0fnu, np.uint8)]:
        found = np.frombuffer(run(program, "encode", name, values), np.uint32)
        compare(f"{name} NaN", found, values.astype(np.float32).astype(dtype).view(integer).astype(np.uint32), values)


def check_e8m0_differences(program):
    """Where formats.h says that ours differs: nearest in the lowest binade, saturation instead of NaN."""
    values = np.array([0.0, -0.0, -1.0, 1.25 * 2.0**-127, 1.5 * 2.0**-127, 1.5 * 2.0**127, np.inf, -np.inf])
    ours = np.array([0, 0, 0, 0, 1, 254, 254, 0], np.uint32)
    theirs = np.array([255, 255, 255, 1, 1, 255, 255, 255], np.uint8)
    compare("e8m0 outside ml_dtypes", np.frombuffer(run(program, "encode", "e8m0", values), np.uint32), ours, values)
    with np.errstate(over="ignore"):
        compare("ml_dtypes as described", values.astype(np.float32).astype(ml_dtypes.float8_e8m0fnu).view(np.uint8), theirs,
                values)


def blocks(n, count):
    """Random blocks over many magnitudes; some with an outlier, zeros, subnormals, integers (ties)."""
    rng = np.random.default_rng(SEED)
    value = rng.standard_normal((count, n)) * np.exp2(rng.integers(-14, 9, (count, 1)))
    value[::5] = np.round(value[::5])
    value[1::7, 0] *= 100
    value[2::11] = 0
    value[3::13] *= 2.0**-126
    value[4::17, :] *= 2.0**-30
    return value.astype(np.float32)


def check_int8(program):
    f = np.float32
    value = blocks(16, 200000)
    amax = np.abs(value).max(axis=1)
    live = amax >= f(127 * 2.0**-126)
    safe = np.where(live, amax, f(1))
    codes = np.clip(np.rint(value * (f(127) / safe)[:, None]), -127, 127) * live[:, None]
    scale = np.where(live, safe / f(127), f(0))
    raw = np.frombuffer(run(program, "int8", 16, value), np.uint8).reshape(-1, 20)
    compare("int8 scale", raw[:, :4].copy().view(np.uint32)[:, 0], scale.view(np.uint32), value)
    compare("int8 codes", raw[:, 4:].view(np.int8), codes.astype(np.int8), value)


def check_nvfp4(program):
    f = np.float32
    value = blocks(16, 200000)
    value[5::19] *= f(1000)
    magnitude = np.abs(value)
    amax = magnitude.max(axis=1)
    nearest = np.minimum(amax / f(6), f(448)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8).astype(int)
    for mode, offsets in [("nearest", [0]), ("search", [0, -1, 1, -2, 3, 4, 5, 6])]:
        best = np.full(len(value), -1)
        least = np.zeros(len(value), f)
        codes = np.zeros(value.shape, np.uint8)
        for offset in offsets:
            trial = np.clip(nearest + offset, 1, 126)
            scale = trial.astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(f)[:, None]
            rounded = (value / scale).astype(ml_dtypes.float4_e2m1fn)
            difference = magnitude - np.abs(rounded.astype(f)) * scale
            error = np.zeros(len(value), f)
            for i in range(16):
                error = error + difference[:, i] * difference[:, i]
            take = (best < 0) | (error < least)
            best[take], least[take], codes[take] = trial[take], error[take], rounded.view(np.uint8)[take]
        best[amax == 0] = 0
        codes[amax == 0] = 0
        raw = np.frombuffer(run(program, mode, 16, value), np.uint8).reshape(-1, 17)
        compare(f"nvfp4 {mode} scale", raw[:, 0], best.astype(np.uint8), value)
        compare(f"nvfp4 {mode} codes", raw[:, 1:], codes, value)


def main():
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    formats, block = sys.argv[1:]
    print(f"numpy {np.__version__}, ml_dtypes {ml_dtypes.__version__}, seed {SEED}")
    check_formats(formats)
    check_f16_from_doubles(formats)
    check_nan(formats)
    check_e8m0_differences(formats)
    check_int8(block)
    check_nvfp4(block)
    print(f"FAILED: {', '.join(FAILURES)}" if FAILURES else "all agree")
    return 1 if FAILURES else 0


if __name__ == "__main__":
    sys.exit(main())
