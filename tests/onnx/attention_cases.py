"""The ONNX backend node tests of Attention (operator sets 23, 24 and 25) through the public C API, on every engine named.

    attention_cases.py LIBAPA.so ENGINE...         an engine written ENGINE? may refuse cases: they are counted and named

What ONNX calls a thing and what it is here:
    3-D inputs [B, S, heads·dim]       a view [B, heads, S, dim]: strides, no copy
    past_key, past_value               joined to K and V by this harness, which also checks present_key and present_value
    is_causal                          q_offset: the length of the past; 0 without one; with nonpad_kv_seqlen the library's
                                       default, keys in use - Sq, per batch entry
    left_window_size, right_…          window_left, window_right: inclusive, -1 no bound, positions as above
    nonpad_kv_seqlen                   seqused_k
    attn_mask                          attn_mask, rank brought to 4; a last axis shorter than the keys is filled up as
                                       ONNX says: nothing there is attended
    softcap, scale                     the same; the cap comes before the mask in both

A case whose model asks for the matrix of scores (qk_matmul_output) can't pass whole, since the library never holds that
matrix: it is excluded by name, and what else it asks for is checked all the same. The cases NAME_expanded hold the inputs
and outputs of NAME with a graph of primitive operators in place of the node; they are excluded by name, after a check
that their data are indeed the same.

Tolerances are those of ONNX's own runner, |y - expected| <= atol + rtol·|expected|, with rtol 1e-3 and atol 1e-7 (bfloat16:
2^-6). Where the expected values were computed in 16 bits, their own distance from the same formula in double is added:
that is the error of the expectation, not of the engine."""

import importlib
import sys
import warnings

import ml_dtypes
import numpy

import library

NARROW = ("float16", "bfloat16")


def load():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("onnx.backend.test.case.node.attention")  # its import makes the cases
        registered = importlib.import_module("onnx.backend.test.case.node")._NodeTestCases
    cases = [c for c in registered if c.name.startswith("test_attention")]
    # several operator sets may share a test's name: all of them count
    return sorted(cases, key=lambda c: c.name)


def named(case):
    """Inputs and outputs by the names of the operator's own parameters, and the attributes."""
    import onnx

    node = case.model.graph.node[0]
    inputs, outputs = case.data_sets[0]
    given = dict(zip([i.name for i in case.model.graph.input], inputs))
    expected = dict(zip([o.name for o in case.model.graph.output], outputs))
    slots_in = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")
    slots_out = ("Y", "present_key", "present_value", "qk_matmul_output")
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    return (
        {slot: given[name] for slot, name in zip(slots_in, node.input) if name},
        {slot: expected[name] for slot, name in zip(slots_out, node.output) if name},
        attributes,
    )


def heads_first(array, heads):
    """[B, S, heads·dim] → a view [B, heads, S, dim]."""
    batch, seq, width = array.shape
    return array.reshape(batch, seq, heads, width // heads).transpose(0, 2, 1, 3)


def padded_mask(mask, keys):
    """Rank 4, at least as long as the keys."""
    mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    missing = keys - mask.shape[3]
    if missing > 0 and mask.shape[3] > 1:
        fill = numpy.full(mask.shape[:3] + (missing,), False if mask.dtype == bool else -numpy.inf, dtype=mask.dtype)
        mask = numpy.concatenate((mask, fill), axis=3)
    return numpy.ascontiguousarray(mask)


class Call:
    """A case as tensors of the library."""

    def __init__(self, given, attributes):
        self.three = given["Q"].ndim == 3
        q, k, v = (numpy.ascontiguousarray(given[name]) for name in "QKV")
        if self.three:
            q = heads_first(q, attributes["q_num_heads"])
            k, v = (heads_first(x, attributes["kv_num_heads"]) for x in (k, v))
        self.past = 0
        if "past_key" in given:
            self.past = given["past_key"].shape[2]
            k = numpy.concatenate((given["past_key"], k), axis=2)
            v = numpy.concatenate((given["past_value"], v), axis=2)
        self.q, self.k, self.v = q, k, v
        self.mask = padded_mask(given["attn_mask"], k.shape[2]) if "attn_mask" in given else None
        self.used = given.get("nonpad_kv_seqlen")
        self.used = None if self.used is None else numpy.ascontiguousarray(self.used.astype(numpy.int64).reshape(-1))
        self.scale = attributes.get("scale", 1 / numpy.sqrt(q.shape[3]))
        self.softcap = attributes.get("softcap", 0.0)
        self.causal = attributes.get("is_causal", 0)
        self.window = attributes.get("left_window_size", -1), attributes.get("right_window_size", -1)

    def run(self, apa, method, engine):
        p = apa.problem()
        out = library.empty(self.q.shape[:3] + (self.v.shape[3],), self.q.dtype)
        p.q, p.k, p.v, p.out = (library.tensor(x) for x in (self.q, self.k, self.v, out))
        p.softmax_scale, p.softcap = self.scale, self.softcap
        p.causal = library.CAUSAL_BOTTOM_RIGHT if self.causal else library.CAUSAL_NONE
        p.window_left, p.window_right = self.window
        if self.mask is not None:
            p.attn_mask = library.tensor(self.mask)
        if self.used is not None:
            p.seqused_k = self.used.ctypes.data  # the library's default offset is ONNX's: keys in use - Sq
        else:
            p.q_offset = self.past
        apa.attention(p, method, engine)
        return out.transpose(0, 2, 1, 3).reshape(out.shape[0], out.shape[2], -1) if self.three else out

    def in_double(self):
        """The formula in double: what the expectation of a 16-bit case is worth."""
        q, k, v = (x.astype(numpy.float64) for x in (self.q, self.k, self.v))
        group = q.shape[1] // k.shape[1]
        k, v = (numpy.repeat(x, group, axis=1) for x in (k, v))
        s = numpy.einsum("bhid,bhjd->bhij", q, k) * self.scale
        s = self.softcap * numpy.tanh(s / self.softcap) if self.softcap > 0 else s
        seen = numpy.ones(s.shape, dtype=bool)
        j = numpy.arange(s.shape[3])
        used = self.used if self.used is not None else numpy.full(s.shape[0], s.shape[3])
        offset = used - s.shape[2] if self.used is not None else numpy.full(s.shape[0], self.past)
        at = (numpy.arange(s.shape[2]) + offset[:, None])[:, None, :, None]
        seen &= j < used[:, None, None, None]
        seen &= (j <= at) if self.causal else True
        seen &= (j >= at - self.window[0]) if self.window[0] >= 0 else True
        seen &= (j <= at + self.window[1]) if self.window[1] >= 0 else True
        if self.mask is not None and self.mask.dtype == bool:
            seen &= self.mask
        elif self.mask is not None:
            s = s + self.mask.astype(numpy.float64)
            seen &= numpy.broadcast_to(self.mask != -numpy.inf, s.shape)
        s = numpy.where(seen, s, -numpy.inf)
        top = numpy.max(s, axis=-1, keepdims=True, initial=-numpy.inf)
        p = numpy.where(seen, numpy.exp(s - numpy.where(numpy.isneginf(top), 0, top)), 0)
        total = p.sum(axis=-1, keepdims=True)
        p /= numpy.where(total == 0, 1, total)
        y = numpy.einsum("bhij,bhjd->bhid", p, numpy.where(numpy.isnan(v), 0, v))
        return y.transpose(0, 2, 1, 3).reshape(y.shape[0], y.shape[2], -1) if self.three else y


def difference(case, call, found, expected):
    """"" if the output is what it should be."""
    rtol, atol = case.rtol, case.atol
    narrow = expected.dtype.name in NARROW
    if expected.dtype.name == "bfloat16":
        rtol = max(rtol, 2.0**-6)
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return f"shape {found.shape} of {found.dtype}, expected {expected.shape} of {expected.dtype}"
    y, want = found.astype(numpy.float64), expected.astype(numpy.float64)
    slack = numpy.abs(call.in_double() - want) if narrow else 0
    excess = numpy.abs(y - want) - (atol + rtol * numpy.abs(want) + slack)
    return "" if (excess <= 0).all() else f"off by {numpy.nanmax(numpy.abs(y - want)):.3g}, NaN: {numpy.isnan(y).sum()}"


def check(case, apa, engine, method="exact"):
    """(verdict, what to say): passed, failed, refused."""
    given, expected, attributes = named(case)
    call = Call(given, attributes)
    for name, part in (("present_key", call.k), ("present_value", call.v)):
        if name in expected and not numpy.array_equal(part, expected[name]):
            return "failed", f"{name} differs"
    try:
        wrong = difference(case, call, call.run(apa, method, engine), expected["Y"])
    except library.Refused as refusal:
        return "refused", str(refusal)
    return ("failed", wrong) if wrong else ("passed", "")


def same_data(a, b):
    pairs = zip(a.data_sets[0][0] + a.data_sets[0][1], b.data_sets[0][0] + b.data_sets[0][1])
    return all(x.dtype == y.dtype and numpy.array_equal(x, y, equal_nan=x.dtype.kind == "f") for x, y in pairs)


def main():
    apa = library.Library(sys.argv[1])
    engines = [name.rstrip("?") for name in sys.argv[2:]]
    may_refuse = {name.rstrip("?") for name in sys.argv[2:] if name.endswith("?")}
    cases = load()
    by_name = {c.name: c for c in cases}
    nodes = [c for c in cases if [n.op_type for n in c.model.graph.node] == ["Attention"]]
    others = [c for c in cases if c not in nodes]
    matrix = [c for c in nodes if any(o.name == "qk_matmul_output" for o in c.model.graph.output)]
    failed = 0

    for case in others:
        twin = by_name.get(case.name.removesuffix("_expanded"))
        same = twin is not None and twin is not case and same_data(case, twin)
        failed += not same
        print(f"excluded {case.name}: primitive operators; {'data are those of ' + twin.name if same else 'DATA OF NO NODE TEST'}")
    for engine in engines:
        count = {"passed": 0, "failed": 0, "refused": 0}
        beside = 0
        for case in nodes:
            verdict, why = check(case, apa, engine)
            if case in matrix and verdict == "passed":
                beside += 1
                print(f"excluded {case.name} ({engine}): asks for the matrix of scores; Y and the rest agree")
                continue
            count[verdict] += 1
            if verdict != "passed":
                print(f"{verdict} {case.name} ({engine}): {why}")
        failed += count["failed"] + (0 if engine in may_refuse else count["refused"])
        sets = sorted({o.version for c in nodes for o in c.model.opset_import})
        print(
            f"{engine}: operator sets {sets}: {count['passed']} passed, {count['failed']} failed, {count['refused']} refused; "
            f"excluded by name: {beside} (matrix of scores), {len(others)} (expanded)"
        )
    return failed > 0 or not nodes


if __name__ == "__main__":
    sys.exit(main())
