#!/usr/bin/env python3
"""Holds the presets of the reference engine against their formulas, written again in numpy.

    recipes_oracle.py PATH/TO/apa [seed]

Runs `apa run --engine reference --method NAME` on random problems and compares outputs (relative L2) and LSE with a
transcription of the method that shares nothing with the library: formats come from ml_dtypes, sums of narrow
accumulators from integer arithmetic, and each method is a function of whole arrays or of one row. Exits 1 on the first
disagreement. Needs numpy and ml_dtypes.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import ml_dtypes
import numpy

F32, F64 = numpy.float32, numpy.float64
TILE = 64
LOG2E = 1.4426950408889634074


# ---- formats -------------------------------------------------------------------------------------------------------


def e4m3(x):
    return numpy.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(F64)


def e2m1(x):
    return numpy.clip(x, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(F64)


def f16(x):
    return numpy.asarray(x, F64).astype(numpy.float16).astype(F64)


def f32(x):
    return numpy.asarray(x, F64).astype(F32).astype(F64)


def small_float(x, mantissa, bias, largest):
    """Nearest value of an unsigned-or-signed small float, by scaling with the exponent."""
    x = numpy.asarray(x, F64)
    with numpy.errstate(divide="ignore"):
        exponent = numpy.floor(numpy.log2(numpy.abs(x), where=x != 0, out=numpy.full(x.shape, -1e9)))
    exponent = numpy.maximum(exponent, 1 - bias)
    unit = 2.0 ** (exponent - mantissa)
    return numpy.sign(x) * numpy.minimum(numpy.round(numpy.abs(x) / unit) * unit, largest)


# ---- scales --------------------------------------------------------------------------------------------------------


def int8_groups(x, groups):
    """x [n, d] f32, groups [n]: rows of equal number share amax/127. Codes and a scale per row."""
    codes, scales = numpy.zeros(x.shape), numpy.zeros(len(x))
    for g in numpy.unique(groups):
        rows = groups == g
        amax = numpy.abs(x[rows]).max()
        codes[rows] = numpy.rint(x[rows] * F32(F32(127) / amax))
        scales[rows] = F32(amax / F32(127))
    return codes, scales


def e4m3_groups(x, groups, largest=448):
    codes, scales = numpy.zeros(x.shape), numpy.zeros(len(x))
    for g in numpy.unique(groups):
        rows = groups == g
        scale = F32(numpy.abs(x[rows]).max() / F32(largest))
        codes[rows] = e4m3(x[rows] / scale)
        scales[rows] = scale
    return codes, scales


def nvfp4_row(x, tensor, search=False):
    """One vector through NVFP4 along its length: values after the round trip."""
    out = numpy.zeros(len(x))
    for i in range(0, len(x), 16):
        u = (x[i : i + 16] / F32(tensor)).astype(F32)
        amax = numpy.abs(u).max()
        if amax == 0:
            continue
        nearest = numpy.array(min(F32(amax / F32(6)), F32(448)), F32).astype(ml_dtypes.float8_e4m3fn).view(numpy.uint8)
        best, least = None, None
        for offset in (0, -1, 1, -2, 3, 4, 5, 6) if search else (0,):
            code = numpy.uint8(min(126, max(1, int(nearest) + offset)))
            scale = F64(code.view(ml_dtypes.float8_e4m3fn))
            value = e2m1(u.astype(F64) / scale) * scale
            error = F32(0)
            for a, b in zip(numpy.abs(u), numpy.abs(value).astype(F32)):
                error = F32(error + F32(F32(a - b) * F32(a - b)))
            if best is None or error < least:
                best, least = value, error
        out[i : i + 16] = best * F64(tensor)
    return out


def mx_row(x, element, largest, up):
    out = numpy.zeros(len(x))
    for i in range(0, len(x), 32):
        block = x[i : i + 32].astype(F64)
        amax = numpy.abs(block).max()
        if amax == 0:
            continue
        exponent = numpy.floor(numpy.log2(amax)) - numpy.floor(numpy.log2(largest))
        if up and largest * 2.0**exponent < amax:
            exponent += 1
        out[i : i + 32] = element(block / 2.0**exponent) * 2.0**exponent
    return out


def pow2_at_least(x):
    return 2.0 ** numpy.ceil(numpy.log2(x))


def hadamard(n):
    h = numpy.ones((1, 1))
    while len(h) < n:
        h = numpy.block([[h, h], [h, -h]])
    return h / numpy.sqrt(n)


# ---- accumulators --------------------------------------------------------------------------------------------------


def fp22(total, products):
    """Alignment to the largest exponent and cuts to 13 bits, in integers."""
    everything = [total, *products]
    most = max(abs(x) for x in everything)
    if most == 0:
        return 0.0
    last = int(numpy.floor(numpy.log2(most))) - 13
    integer = sum(int(x / 2.0**last) for x in everything)  # int() cuts toward zero
    while abs(integer) >= 2**14:
        integer, last = int(integer / 2), last + 1
    # a result with fewer bits than 14 keeps all of them
    return integer * 2.0**last


def pv_columns(code, units, kind, step):
    """code [n], units [n, Dv] → sums over keys: steps through one narrow accumulator, then FP32."""
    out = numpy.zeros(units.shape[1])
    for c in range(units.shape[1]):
        total = 0.0
        for j in range(0, len(code), step):
            products = code[j : j + step] * units[j : j + step, c]
            if kind == "fp22":
                total = fp22(total, products)
            else:
                total = {"f16": f16, "f32": f32}[kind](total + products.sum())
        out[c] = f32(total)
    return out


# ---- problems ------------------------------------------------------------------------------------------------------


class Problem:
    def __init__(self, random, Hq, Hkv, Sq, Skv, D, causal, boost=1.0):
        self.Hq, self.Hkv, self.Sq, self.Skv, self.D, self.causal = Hq, Hkv, Sq, Skv, D, causal
        self.q = random.standard_normal((Hq, Sq, D)).astype(F32) * F32(boost)
        self.k = random.standard_normal((Hkv, Skv, D)).astype(F32) + random.standard_normal((Hkv, 1, D)).astype(F32)
        self.v = random.standard_normal((Hkv, Skv, D)).astype(F32)
        self.scale = 1 / numpy.sqrt(D)

    def seen(self, i):
        return min(self.Skv, max(0, i + self.Skv - self.Sq + 1)) if self.causal else self.Skv


def exact_rows(p, h, keys=None):
    """Exact natural scores of head h: [Sq, Skv], -inf where unseen."""
    k = p.k[h // (p.Hq // p.Hkv)].astype(F64)
    s = p.q[h].astype(F64) @ k.T * p.scale
    for i in range(p.Sq):
        s[i, p.seen(i) :] = -numpy.inf
    return s


def attend(p, row):
    """row(h, i, n) → (out, lse) of a query that sees n keys, over all."""
    out, lse = numpy.zeros((p.Hq, p.Sq, p.D)), numpy.full((p.Hq, p.Sq), -numpy.inf)
    for h in range(p.Hq):
        for i in range(p.Sq):
            if p.seen(i) > 0:
                out[h, i], lse[h, i] = row(h, i, p.seen(i))
    return out, lse


def merge(parts):
    """Exact merge of (o/l, lse)."""
    top = max(lse for _, lse in parts)
    weights = [numpy.exp(lse - top) for _, lse in parts]
    return sum(w * o for w, (o, _) in zip(weights, parts)) / sum(weights), top + numpy.log(sum(weights))


def smooth(x):
    mean = x.astype(F64).mean(axis=0).astype(F32)
    return (x - mean).astype(F32), mean


# ---- the cold pass of a row ----------------------------------------------------------------------------------------


def quantised_p(s, frame, kind, scale, exponential=numpy.exp2):
    """s [n] log2 scores of one tile, from the tile's first key. P·range as the matrix unit sees it, range, the exact P."""
    top = s.max()
    if kind == "static-e4m3":
        x = exponential(s - frame)
        return e4m3(scale * x), scale, x
    if kind == "static-e2m1":
        x = exponential(s - frame)
        return e2m1(scale * x), scale, x
    if kind == "two-level":
        x = exponential(s - top)
        code = numpy.zeros(len(x))
        for i in range(0, len(x), 16):
            block = e4m3(2688 * x[i : i + 16].max() / 6)
            if block > 0:
                code[i : i + 16] = e2m1(2688 * x[i : i + 16] / block) * block
        return code, 2688, x
    raise KeyError(kind)


def cold_row(scores, units, kind, p_scale, accum=None, step=64, order=1, only=None):
    """scores [n] in log2 units, units [n, Dv] with a scale per channel folded out by the caller. (o/l, lse in log2)."""
    n = len(scores)
    tiles = list(range((n + TILE - 1) // TILE))[::order]
    m, l, o = -numpy.inf, 0.0, numpy.zeros(units.shape[1])
    store = f32 if accum else (lambda x: x)
    for t in tiles:
        if only is not None and not only[t]:
            continue
        s = scores[t * TILE : min(n, (t + 1) * TILE)]
        new = max(m, s.max())
        code, span, x = quantised_p(s, new, kind, p_scale)
        move = numpy.exp2(m - new)
        l, o = store(l * move), store(o * move)
        weight = 1.0 if kind != "two-level" else numpy.exp2(s.max() - new)
        l = store(l + weight * x.sum())
        if accum:
            padded = numpy.zeros(TILE), numpy.zeros((TILE, units.shape[1]))
            padded[0][: len(s)], padded[1][: len(s)] = code, units[t * TILE : t * TILE + len(s)]
            o = f32(o + f32(weight / span * pv_columns(*padded, accum, step)))
        else:
            o = o + weight / span * (code @ units[t * TILE : t * TILE + len(s)])
        m = new
    return (o / l if l > 0 else o), (m + numpy.log2(l)) if l > 0 else -numpy.inf


def per_thread(n):
    i = numpy.arange(n)
    return i // 32 * 8 + i % 8


def key_threads(n):
    j = numpy.arange(n)
    return j // 64 * 4 + j % 8 // 2


# ---- methods -------------------------------------------------------------------------------------------------------


def sage2(p, accum="fp22", v_range=448, q_groups=per_thread, k_groups=key_threads, v_block=False, qk=int8_groups):
    prepared = []
    for h in range(p.Hkv):
        k, mean = smooth(p.k[h])
        v = p.v[h]
        if v_block:
            amax = numpy.repeat([numpy.abs(v[t : t + TILE]).max() for t in range(0, p.Skv, TILE)], TILE)[: p.Skv, None]
        else:
            amax = numpy.abs(v).max(axis=0)
        v_scale = (amax / F32(v_range)).astype(F32) * numpy.ones_like(v)
        prepared.append((qk(k, k_groups(p.Skv)), mean, e4m3(v / v_scale), v_scale.astype(F64)))
    queries = [qk(p.q[h], q_groups(p.Sq)) for h in range(p.Hq)]

    def row(h, i, n):
        (kc, ks), mean, units, v_scale = prepared[h // (p.Hq // p.Hkv)]
        qc, qs = queries[h]
        scores = p.scale * LOG2E * (qs[i] * (kc[:n] @ qc[i])) * ks[:n]
        if v_block:
            o, lse = cold_row_scaled(scores, units[:n], v_scale[:n, 0], accum)
        else:
            o, lse = cold_row(scores, units[:n], "static-e4m3", 448, accum, 32)
            o = o * v_scale[0]
        return o, lse / LOG2E + p.scale * (p.q[h, i].astype(F64) @ mean.astype(F64))

    return attend(p, row)


def cold_row_scaled(scores, units, tile_scale, accum):
    """The same with a scale of V per tile."""
    n, m, l, o = len(scores), -numpy.inf, 0.0, numpy.zeros(units.shape[1])
    for t in range(0, n, TILE):
        s = scores[t : t + TILE]
        new = max(m, s.max())
        code, span, x = quantised_p(s, new, "static-e4m3", 448)
        l, o = f32(f32(l * numpy.exp2(m - new)) + x.sum()), f32(o * numpy.exp2(m - new))
        padded = numpy.zeros(TILE), numpy.zeros((TILE, units.shape[1]))
        padded[0][: len(s)], padded[1][: len(s)] = code, units[t : t + TILE]
        o = f32(o + f32(tile_scale[t] / span * pv_columns(*padded, accum, 32)))
        m = new
    return o / l, m + numpy.log2(l)


def with_early(p, method, early):
    """Rows before position `early` exact, the others by the method."""
    out, lse = method
    for h in range(p.Hq):
        s = exact_rows(p, h)
        for i in range(p.Sq):
            if p.causal and 0 < p.seen(i) <= early:
                w = numpy.exp(s[i, : p.seen(i)] - s[i, : p.seen(i)].max())
                out[h, i] = w @ p.v[h // (p.Hq // p.Hkv)][: p.seen(i)].astype(F64) / w.sum()
                lse[h, i] = s[i, : p.seen(i)].max() + numpy.log(w.sum())
    return out, lse


def columns(v, code):
    """V along keys, a tile at a time."""
    out = numpy.zeros(v.shape)
    for t in range(0, len(v), TILE):
        for c in range(v.shape[1]):
            out[t : t + TILE, c] = code(v[t : t + TILE, c])
    return out


def sage3(p, values=None, p_kind="two-level", p_scale=1):
    values = values or (lambda x: nvfp4_row(x, 1))
    prepared = []
    for h in range(p.Hkv):
        k, mean = smooth(p.k[h])
        prepared.append((k, numpy.array([nvfp4_row(x, 1) for x in k]), mean, columns(p.v[h], values)))

    def row(h, i, n):
        k, kq, mean, v = prepared[h // (p.Hq // p.Hkv)]
        block = p.q[h, i // 128 * 128 : i // 128 * 128 + 128]
        q_mean = block.astype(F64).mean(axis=0).astype(F32)
        q = nvfp4_row((p.q[h, i] - q_mean).astype(F32), 1)
        delta = f32(k[:n].astype(F64) @ q_mean.astype(F64))
        scores = p.scale * LOG2E * (kq[:n] @ q + delta)
        o, lse = cold_row(scores, v[:n], p_kind, p_scale)
        return o, lse / LOG2E + p.scale * (p.q[h, i].astype(F64) @ mean.astype(F64))

    return attend(p, row)


def pcast(p, scale, order):
    def row(h, i, n):
        s = exact_rows_cache(p, h)[i, :n] * LOG2E
        o, lse = cold_row(s, p.v[h // (p.Hq // p.Hkv)][:n].astype(F64), "static-e4m3", scale, order=order)
        return o, lse / LOG2E

    cache = {}

    def exact_rows_cache(problem, h):
        if h not in cache:
            cache[h] = exact_rows(problem, h)
        return cache[h]

    return attend(p, row)


def thrift_count(p, fraction, tiles, seen):
    if not p.causal:
        return min(seen, max(1, int(numpy.floor(fraction * seen + 0.5))))
    root = numpy.sqrt((2 * tiles + 1) ** 2 - 4 * fraction * tiles * (tiles + 1))
    return min(seen, max(1, int(numpy.floor((2 * tiles + 1 - root) / 2 + 0.5))))


def thrift(p, rule="block_mean", fraction=0.05, row_code=None, p_kind="static-e2m1", sink=False, diagonal=False):
    row_code = row_code or (lambda x: nvfp4_row(x, 1))
    assert not p.causal or p.Sq == p.Skv
    tiles = (p.Skv + TILE - 1) // TILE
    cold = [
        (numpy.array([row_code(x) for x in p.k[h]]), columns(p.v[h], row_code)) for h in range(p.Hkv)
    ]
    q_cold = [numpy.array([row_code(x) for x in p.q[h]]) for h in range(p.Hq)]

    def chosen(h, block):
        rows = p.q[h, block * TILE : block * TILE + TILE].astype(F64)
        q = rows.mean(axis=0)
        seen = (p.seen(min(p.Sq, block * TILE + TILE) - 1) + TILE - 1) // TILE
        k = p.k[h // (p.Hq // p.Hkv)].astype(F64)
        scores = numpy.zeros(seen)
        for t in range(seen):
            keys = k[t * TILE : t * TILE + TILE]
            if rule == "block_mean":
                scores[t] = q @ keys.mean(axis=0)
            elif rule == "quest":
                scores[t] = numpy.maximum(q * keys.max(axis=0), q * keys.min(axis=0)).sum()
            else:
                scores[t] = t
        if sink:
            scores[0] = numpy.inf
        if diagonal:
            scores[-1] = numpy.inf
        best = numpy.argsort(-scores, kind="stable")
        count = max(thrift_count(p, fraction, tiles, seen), len({0} & {0} if sink else set()) + diagonal)
        return set(best[:count].tolist())

    picks = {(h, b): chosen(h, b) for h in range(p.Hq) for b in range((p.Sq + TILE - 1) // TILE)}

    def row(h, i, n):
        kq, vq = cold[h // (p.Hq // p.Hkv)]
        hot = picks[h, i // TILE]
        count = (n + TILE - 1) // TILE
        only = [t not in hot for t in range(count)]
        parts = []
        scores = p.scale * LOG2E * (kq[:n] @ q_cold[h][i])
        if any(only):
            o, lse = cold_row(scores, vq[:n], p_kind, 6, only=only)
            parts.append((o, lse / LOG2E))
        keys = numpy.concatenate([numpy.arange(t * TILE, min(n, t * TILE + TILE)) for t in sorted(hot) if t < count] or [[]])
        keys = keys.astype(int)
        if len(keys):
            q, k, v = (f16(x) for x in (p.q[h, i], p.k[h // (p.Hq // p.Hkv)][keys], p.v[h // (p.Hq // p.Hkv)][keys]))
            s = k @ q * p.scale
            w = numpy.exp(s - s.max())
            parts.append((w @ v / w.sum(), s.max() + numpy.log(w.sum())))
        return merge(parts)

    return attend(p, row)


def standard(p):
    def row(h, i, n):
        s = f16(p.q[h, i].astype(F64) @ p.k[h // (p.Hq // p.Hkv)][:n].astype(F64).T * p.scale)
        l = F32(0)
        for x in numpy.exp(s - s.max()):
            l = F32(l + x)
        w = f16(numpy.exp(s - s.max()) / F64(l))
        v = p.v[h // (p.Hq // p.Hkv)][:n].astype(F64)
        o = numpy.zeros(p.D)
        for j in range(0, n, 16):
            o = f32(o + w[j : j + 16] @ v[j : j + 16])
        return o, s.max() + numpy.log(F64(l))

    return attend(p, row)


def elsa(p):
    def both(a, b):
        m = max(a[0], b[0])
        u, w = (1.0 if x[0] == m else f32(numpy.exp(f32(x[0] - m))) for x in (a, b))
        return m, f32(f32(a[1] * u) + f32(b[1] * w)), f32(f32(a[2] * u) + f32(b[2] * w))

    def whole(states):
        """Largest power of two first: that many keys make a full tree."""
        if len(states) == 1:
            return states[0]
        half = 1
        while half * 2 < len(states):
            half *= 2
        return both(whole(states[:half]), whole(states[half:]))

    def row(h, i, n):
        v = p.v[h // (p.Hq // p.Hkv)][:n].astype(F64)
        s = f32(p.q[h, i].astype(F64) @ p.k[h // (p.Hq // p.Hkv)][:n].astype(F64).T * p.scale)
        m, l, o = whole([(s[j], 1.0, v[j]) for j in range(n)])
        return o / l, m + numpy.log(l)

    return attend(p, row)


MIDPOINTS = numpy.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
E2M1 = numpy.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def direct(p, fp8):
    prepared = []
    for h in range(p.Hkv):
        k, mean = smooth(p.k[h])
        if fp8:
            codes, scales = e4m3_groups(k, numpy.arange(p.Skv))
            v = numpy.zeros(p.v[h].shape)
            for t in range(0, p.Skv, TILE):
                c, s = e4m3_groups(p.v[h][t : t + TILE].T, numpy.arange(p.D))
                v[t : t + TILE] = (c * s[:, None]).T
            prepared.append((codes * scales[:, None], mean, v))
        else:
            prepared.append((numpy.array([nvfp4_row(x, 1) for x in k]), mean, columns(p.v[h], lambda x: nvfp4_row(x, 1))))

    def codes_of(x):
        """x = log2 P of a tile."""
        if fp8:
            number = numpy.clip(numpy.floor(8 * (x + 8) + 56 - 0.455 + 0.5), 0, 126).astype(numpy.uint8)
            return number.view(ml_dtypes.float8_e4m3fn).astype(F64) / 256
        out = numpy.zeros(len(x))
        for i in range(0, len(x), 16):
            exponent = max(-6, numpy.ceil(8 + x[i : i + 16].max()))
            passed = (x[i : i + 16, None] + numpy.log2(1536.0) - exponent >= numpy.log2(MIDPOINTS)).sum(axis=1)
            out[i : i + 16] = E2M1[passed] * 2.0**exponent / 1536
        return out

    def row(h, i, n):
        k, mean, v = prepared[h // (p.Hq // p.Hkv)]
        if fp8:
            codes, scales = e4m3_groups(p.q[h, i : i + 1], numpy.zeros(1))
            q = codes[0] * scales[0]
        else:
            q = nvfp4_row(p.q[h, i], 1)
        s = p.scale * LOG2E * (k[:n] @ q)
        m, l, o = -numpy.inf, 0.0, numpy.zeros(p.D)
        for t in range(0, n, TILE):
            new = max(m, s[t : t + TILE].max())
            x = codes_of(s[t : t + TILE] - new)
            l, o = l * numpy.exp2(m - new) + x.sum(), o * numpy.exp2(m - new) + x @ v[t : min(n, t + TILE)]
            m = new
        return o / l, (m + numpy.log2(l)) / LOG2E + p.scale * (p.q[h, i].astype(F64) @ mean.astype(F64))

    return attend(p, row)


def pow2_tiles(x, rows):
    """E4M3 of x [n, d], a power of two as scale for every `rows` rows: values after the round trip."""
    out = numpy.zeros(x.shape)
    for first in range(0, len(x), rows):
        part = x[first : first + rows].astype(F64)
        scale = pow2_at_least(F64(F32(numpy.abs(part).max()) / F32(448)))
        out[first : first + rows] = e4m3(part / scale) * scale
    return out


def hopper(p, mean=None, phase=False, smooth_v=False):
    """Every tile cold in E4M3: scales powers of two, direct codes against frames of whole, half or quarter octaves."""
    offset = 2.0 ** (0.455 / 8)
    keys = [smooth(k) for k in p.k]
    values = [smooth(v) if smooth_v else (v, numpy.zeros(p.D, F32)) for v in p.v]
    kq = [pow2_tiles(k, TILE) for k, _ in keys]
    vq = [pow2_tiles(v, TILE) for v, _ in values]
    q_mean, q_codes = [], []
    for q in p.q:
        span = {"block": 128, "head": p.Sq}.get(mean)
        shared = numpy.zeros(q.shape, F32)
        for first in range(0, p.Sq, span or p.Sq):
            if span:
                shared[first : first + span] = q[first : first + span].astype(F64).mean(axis=0).astype(F32)
        q_mean.append(shared.astype(F64))
        q_codes.append(pow2_tiles((q - shared).astype(F32), 32))

    def row(h, i, n):
        kv = h // (p.Hq // p.Hkv)
        (k, k_mean), (_, v_mean) = keys[kv], values[kv]
        s = p.scale * LOG2E * (kq[kv][:n] @ q_codes[h][i] + f32(k[:n].astype(F64) @ q_mean[h][i]))
        weights = numpy.zeros(n)
        for t in range(0, n, TILE):
            part = s[t : t + TILE]
            shift = (0, 0.5, 0.25, 0.75)[t // (2 * TILE) % 4] if phase else 0
            frame = numpy.ceil(part.max() - shift) + shift
            code = numpy.clip(numpy.floor(8 * (part - frame) + 120.5), 0, 126).astype(numpy.uint8)
            weights[t : t + TILE] = code.view(ml_dtypes.float8_e4m3fn).astype(F64) / 256 / offset * 2.0**frame
        o = weights @ vq[kv][:n] / weights.sum() + v_mean.astype(F64)
        return o, numpy.log(weights.sum()) + p.scale * (p.q[h, i].astype(F64) @ k_mean.astype(F64))

    return attend(p, row)


def apa_all_cold(p, terms, p_scale, search, tensor):
    """APA's numerics with no hot tile (force=low): lazy frames per 16 packed rows, tile 0 first, then backwards."""
    G = p.Hq // p.Hkv
    out, lse = numpy.zeros((p.Hq, p.Sq, p.D)), numpy.full((p.Hq, p.Sq), -numpy.inf)
    for hk in range(p.Hkv):
        k, mean = smooth(p.k[hk])
        amax_k, amax_v = F64(numpy.abs(k).max()), F64(numpy.abs(p.v[hk]).max())
        if tensor == "amax":
            ts, tv = F32(numpy.abs(k).max() / F32(2688)), F32(numpy.abs(p.v[hk]).max() / F32(2688))
        else:
            ts, tv = pow2_at_least(4 * amax_k / 2688), pow2_at_least(4 * amax_v / 2688)
        kq = numpy.array([nvfp4_row(x, ts, search) for x in k])
        vq = columns(p.v[hk], lambda x: nvfp4_row(x, tv, search))
        packed = [(i, hk * G + g) for i in range(p.Sq) for g in range(G)]
        for first in range(0, len(packed), 16):
            rows = packed[first : first + 16]
            q = []
            for i, h in rows:
                rest, total = p.q[h, i].copy(), numpy.zeros(p.D)
                row_scale = F32(numpy.abs(rest).max() / F32(2688))
                for _ in range(terms):
                    term = nvfp4_row(rest, row_scale, search)
                    total += term
                    rest = (rest.astype(F64) - term).astype(F32)
                q.append(total)
            state = [[-numpy.inf, 0.0, numpy.zeros(p.D)] for _ in rows]
            tiles = (max(p.seen(i) for i, _ in rows) + TILE - 1) // TILE
            for t in [0, *range(tiles - 1, 0, -1)][:tiles]:
                s = [p.scale * LOG2E * (kq[t * TILE : min(p.seen(i), t * TILE + TILE)] @ q[r]) for r, (i, _) in enumerate(rows)]
                move = any(len(x) and x.max() > state[r][0] + 4 for r, x in enumerate(s))
                for r, x in enumerate(s):
                    if len(x) == 0:
                        continue
                    new = max(state[r][0], x.max()) if move else state[r][0]
                    weights = numpy.exp2(x - new - 4)
                    quantised = numpy.zeros(len(x))
                    for b in range(0, len(x), 16):
                        need = max(256 * weights[b : b + 16].max(), 2.0**-6)
                        if p_scale == "pow2":
                            scale = pow2_at_least(need)
                        else:
                            values = numpy.arange(8, 127, dtype=numpy.uint8).view(ml_dtypes.float8_e4m3fn).astype(F64)
                            scale = values[values >= need].min()
                        quantised[b : b + 16] = e2m1(weights[b : b + 16] * 1536 / scale) * scale / 1536
                    down = numpy.exp2(state[r][0] - new)
                    state[r][1] = state[r][1] * down + quantised.sum()
                    state[r][2] = state[r][2] * down + quantised @ vq[t * TILE : t * TILE + len(x)]
                    state[r][0] = new
            for r, (i, h) in enumerate(rows):
                if p.seen(i) > 0:
                    out[h, i] = state[r][2] / state[r][1]
                    lse[h, i] = (state[r][0] + 4 + numpy.log2(state[r][1])) / LOG2E + p.scale * (
                        f16(p.q[h, i]) @ mean.astype(F64)  # what the exact pass reads
                    )
    return out, lse


def lamp(p, choose):
    """LampAttention with groups of one row; choose(low sub-block masses, …) is written out in lamp_row."""

    def summed(q, k, low):
        total = numpy.zeros(len(k))
        for d in range(0, p.D, 16):
            total = total + (p.scale * q[d : d + 16] * k[:, d : d + 16]).sum(axis=1)
            total = e4m3(total) if low else small_float(total, 11, 7, 511.75)
        return total

    def weights(y, low):
        y = numpy.maximum(y, 0)
        if low:
            return small_float(numpy.exp(-small_float(y, 3, 15, 114688)), 3, 15, 114688)
        return small_float(numpy.exp(-small_float(y, 11, 15, 131008)), 11, 15, 131008)

    margin, tau, size = choose

    def row(h, i, n):
        q, k = p.q[h, i].astype(F64), p.k[h // (p.Hq // p.Hkv)][:n].astype(F64)
        v = p.v[h // (p.Hq // p.Hkv)][:n].astype(F64)
        m, l, o = -numpy.inf, 0.0, numpy.zeros(p.D)
        for t in range(0, n, TILE):
            blocks = [numpy.arange(b, min(n, t + TILE, b + size)) for b in range(t, min(n, t + TILE), size)]
            scores = [summed(q, k[b], True) for b in blocks]
            high = [False] * len(blocks)
            top = m
            for b in sorted(range(len(blocks)), key=lambda b: -scores[b].max()):
                if scores[b].max() <= top - margin:
                    break
                scores[b], high[b] = summed(q, k[blocks[b]], False), True
                top = max(top, scores[b].max())
            mass = [weights(top - s, not x).sum() for s, x in zip(scores, high)]
            total = sum(mass) + (l * numpy.exp(m - top) if l > 0 else 0)
            for b in sorted(range(len(blocks)), key=lambda b: -mass[b]):
                if sum(x for x, y in zip(mass, high_now(high)) if not y) <= tau * total:
                    break
                if not high[b]:
                    high[b] = True
            for b, wanted in enumerate(high):
                if wanted:
                    scores[b] = summed(q, k[blocks[b]], False)
            l, o = (l * numpy.exp(m - top), o * numpy.exp(m - top)) if l > 0 else (0.0, o)
            for b, s, x in zip(blocks, scores, high):
                w = weights(top - s, not x)
                l, o = l + w.sum(), o + w @ v[b]
            m = top
        return o / l, m + numpy.log(l)

    def high_now(high):
        return list(high)

    return attend(p, row)


def mxfp4(up):
    return lambda x: mx_row(x, e2m1, 6, up)


def mxfp8(x):
    return mx_row(x, e4m3, 448, False)


def q_block(n):
    return numpy.arange(n) // 128


def k_block(n):
    return numpy.arange(n) // 64


BIG = dict(Hq=2, Hkv=1, Sq=140, Skv=200, D=32, causal=True)
SQUARE = dict(Hq=2, Hkv=1, Sq=330, Skv=330, D=16, causal=True)
FULL = dict(Hq=2, Hkv=2, Sq=70, Skv=650, D=16, causal=False)
SMALL = dict(Hq=3, Hkv=1, Sq=40, Skv=150, D=16, causal=True)

HOPPER = ["force=low", "pow2_scales=on", "qk_scale_granularity=warp", "v_scale_granularity=block", "hadamard=off"]
HOPPER += ["p_scale=row-tile-pow2", "p_map=direct", "smooth_k=on"]

# method, settings, problem, the formula, tolerance of the relative L2
CASES = [
    ("standard", [], BIG, standard, 1e-12),
    ("elsa", [], BIG, elsa, 1e-12),
    ("sage2", [], SMALL, sage2, 1e-7),
    ("sage2", [], BIG, sage2, 1e-7),
    ("sage2pp", [], BIG, lambda p: sage2(p, "f16", 2.25), 1e-7),
    ("ffpa-fp8-default", [], BIG, lambda p: sage2(p, "f16", 2.25), 1e-7),
    ("ffpa-fp8-cache-dit", ["early_rows=96"], SQUARE, lambda p: with_early(p, sage2(p, "f16", 2.25), 96), 1e-7),
    ("ffpa-fp8-perblock", [], BIG, lambda p: sage2(p, "f16", 2.25, q_block, k_block, True), 1e-7),
    ("ffpa-fp8", [], SQUARE, lambda p: with_early(p, sage2(p, "f32", 448, q_block, k_block, qk=e4m3_groups), 256), 1e-7),
    ("ffpa-fp8", ["early_rows=0"], BIG, lambda p: sage2(p, "f32", 448, q_block, k_block, qk=e4m3_groups), 1e-7),
    ("sage3", [], BIG, sage3, 1e-11),
    ("ffpa-fp4", ["early_rows=0"], SMALL, sage3, 1e-11),
    ("ffpa-fp4", [], SQUARE, lambda p: with_early(p, sage3(p), 256), 1e-11),
    ("ffpa-fp4-mxfp8", ["early_rows=0"], BIG, lambda p: sage3(p, mxfp8, "static-e4m3", 448), 1e-11),
    ("pcast", [], BIG, lambda p: pcast(p, 1, 1), 1e-11),
    ("pcast-reverse", [], BIG, lambda p: pcast(p, 256, -1), 1e-11),
    ("pcast", ["p_static_scale=448"], FULL, lambda p: pcast(p, 448, 1), 1e-11),
    ("thrift", [], SQUARE, thrift, 1e-6),
    ("thrift", ["fraction=0.3"], FULL, lambda p: thrift(p, fraction=0.3), 1e-6),
    ("thrift-quest", ["fraction=0.4"], SQUARE, lambda p: thrift(p, "quest", 0.4), 1e-6),
    ("thrift-local", ["fraction=0.4"], SQUARE, lambda p: thrift(p, "local", 0.4), 1e-6),
    ("thrift", ["fraction=0.5", "force_sink=on", "force_diagonal=on"], SQUARE,
     lambda p: thrift(p, "block_mean", 0.5, sink=True, diagonal=True), 1e-6),
    ("thrift-mxfp4", ["fraction=0.3"], FULL, lambda p: thrift(p, fraction=0.3, row_code=mxfp4(True)), 1e-6),
    ("directp", [], BIG, lambda p: direct(p, False), 1e-11),
    ("directp-e4m3", [], BIG, lambda p: direct(p, True), 1e-11),
    ("apa-e4m3", HOPPER, BIG, hopper, 1e-11),
    ("apa-e4m3", [*HOPPER, "p_phase=on"], FULL, lambda p: hopper(p, phase=True), 1e-11),
    ("apa-e4m3", [*HOPPER, "smooth_q=on", "smooth_v=on"], BIG, lambda p: hopper(p, "block", smooth_v=True), 1e-11),
    ("apa-e4m3", [*HOPPER, "smooth_q=on", "q_mean=head", "p_phase=on", "smooth_v=on"], SQUARE,
     lambda p: hopper(p, "head", True, True), 1e-11),
    ("apa-0.2", ["force=low"], SMALL, lambda p: apa_all_cold(p, 1, "pow2", False, "amax"), 1e-11),
    ("apa-0.4", ["force=low"], SMALL, lambda p: apa_all_cold(p, 1, "pow2", False, "pow2"), 1e-11),
    ("apa-0.5", ["force=low"], SMALL, lambda p: apa_all_cold(p, 2, "ue4m3", False, "pow2"), 1e-11),
    ("apa-0.6", ["force=low"], SMALL, lambda p: apa_all_cold(p, 2, "ue4m3", True, "pow2"), 1e-11),
    ("lamp", ["group=1"], BIG, lambda p: lamp(p, (2, 0.5, 16)), 1e-11),
    ("lamp", ["group=1", "tau=0.05", "margin=1", "sub_block=8"], BIG, lambda p: lamp(p, (1, 0.05, 8)), 1e-11),
    ("lamp", ["group=1", "tau=1", "margin=4"], SMALL, lambda p: lamp(p, (4, 1, 16)), 1e-11),
]


def run(apa, folder, p, method, settings):
    command = [apa, "run", "--engine", "reference", "--method", method, "--out-dtype", "f64"]
    for name in "qkv":
        numpy.save(folder / f"{name}.npy", getattr(p, name))
        command += [f"--{name}", str(folder / f"{name}.npy")]
    for setting in settings:
        command += ["--set", setting]
    command += ["--out", str(folder / "o.npy"), "--lse", str(folder / "lse.npy")]
    command += ["--causal" if p.causal else "--no-causal"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return numpy.load(folder / "o.npy"), numpy.load(folder / "lse.npy").reshape(p.Hq, p.Sq)


def main():
    apa, seed = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1
    print(f"seed {seed}")
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        for number, (method, settings, shape, formula, tolerance) in enumerate(CASES):
            p = Problem(numpy.random.default_rng([seed, number]), **shape)
            out, lse = run(apa, Path(name), p, method, settings)
            true_out, true_lse = formula(p)
            error = numpy.linalg.norm(out - true_out) / numpy.linalg.norm(true_out)
            finite = numpy.isfinite(true_lse)
            lse_error = numpy.abs(lse - true_lse)[finite].max()
            good = error <= tolerance and lse_error <= max(1e-6, tolerance) and (lse[~finite] == -numpy.inf).all()
            print(f"{'ok  ' if good else 'FAIL'} {method:20} {' '.join(settings):40} rel L2 {error:.2e} lse {lse_error:.2e}")
            failed += not good
    print(f"{len(CASES) - failed} of {len(CASES)} cases agree")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
