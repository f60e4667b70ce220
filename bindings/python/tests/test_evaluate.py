"""evaluate() against the command's JSON, merge_states(), resolve(), info()."""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

import apa_attention as apa
from conftest import close, make, oracle

COMMAND = os.environ.get("APA_COMMAND")  # build/apa
TIMES = {"prep_ms", "attention_ms", "exact_ms", "speedup"}


@pytest.mark.skipif(not COMMAND, reason="APA_COMMAND names no apa to compare with")
@pytest.mark.parametrize(
    "method, more", [("apa", []), ("cold", []), ("sage3", ["--window", "90"]), ("lamp", ["--no-causal"])]
)
def test_the_figures_of_the_command(rng, tmp_path: Path, method, more):
    arrays = dict(zip("qkv", make(rng, 1, 4, 2, 40, 300, 64, dtype=np.float16)))
    files = []
    for name, array in arrays.items():
        np.save(tmp_path / name, array)
        files += [f"--{name}", str(tmp_path / f"{name}.npy")]
    done = subprocess.run(
        [COMMAND, "eval", *files, "--method", method, "--json", "-", *more], check=True, text=True, capture_output=True
    )
    wanted = json.loads(done.stdout)
    window = 90 if "--window" in more else None
    found = apa.evaluate(*arrays.values(), method=method, causal="--no-causal" not in more, window=window).to_dict()
    assert set(found) == set(wanted)
    for key in wanted.keys() - TIMES:
        assert found[key] == wanted[key], key
    for key in TIMES:
        assert found[key] > 0
    assert json.loads(json.dumps(found)) == found


def test_a_truth_that_is_not_finite_is_not_perfect(rng):
    q, k, v = make(rng, 1, 2, 2, 8, 40, 16)
    k[0, 1] = np.nan
    e = apa.evaluate(q, k, v, repeats=1)
    assert (e.pairs, e.truth_not_finite, e.non_finite) == (16, 8, 0) and e.min_cos > 0.9
    k[:] = np.nan
    e = apa.evaluate(q, k, v, repeats=1)
    assert e.truth_not_finite == e.pairs == 16 and math.isnan(e.min_cos) and math.isnan(e.rel_l2)


def test_against_a_given_truth(rng):
    q, k, v = make(rng, 2, 4, 2, 40, 300, 64)
    truth = apa.exact(q, k, v, causal=True)
    wanted, lse = oracle(q, k, v, causal=True)
    close(truth.out, wanted, 1e-12)
    close(truth.lse, lse, 1e-12)
    a = apa.evaluate(q, k, v, causal=True, truth=truth, time_exact=False, repeats=1)
    b = apa.evaluate(q, k, v, causal=True, repeats=1)
    assert (a.rel_l2, a.min_cos, a.pairs) == (b.rel_l2, b.min_cos, 2 * 4 * 40) and a.repeats == 1
    assert math.isnan(a.exact_ms) and a.to_dict()["exact_ms"] is None and b.exact_ms > 0
    out = apa.attention(q, k, v, causal=True)
    assert a.rel_l2 == pytest.approx(np.linalg.norm(out - wanted) / np.linalg.norm(wanted), rel=1e-6)
    with pytest.raises(ValueError, match="truth.out"):
        apa.evaluate(q[:, :, 1:], k, v, truth=truth)


@pytest.mark.parametrize("layout", ["hnd", "nhd"])
def test_merge(rng, layout):
    q, k, v = make(rng, 1, 4, 2, 9, 300, 32)
    if layout == "nhd":
        q, k, v = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v))
    cut = (lambda x, a, b: x[:, :, a:b]) if layout == "hnd" else (lambda x, a, b: x[:, a:b])
    whole, whole_lse = apa.attention(q, k, v, method="exact", return_lse=True, layout=layout)
    a, b = (
        apa.attention(q, cut(k, *s), cut(v, *s), method="exact", return_lse=True, layout=layout)
        for s in ((0, 100), (100, 300))
    )
    out, lse = apa.merge_states(*a, *b, layout=layout)
    close(out, whole, 1e-6)
    close(lse, whole_lse, 1e-6)
    nothing = np.zeros_like(a[0]), np.full_like(a[1], -np.inf)
    same, same_lse = apa.merge_states(*nothing, *a, layout=layout)
    assert np.array_equal(same, a[0]) and np.array_equal(same_lse, a[1])
    empty, empty_lse = apa.merge_states(*nothing, *nothing, layout=layout)
    assert not empty.any() and (empty_lse == -np.inf).all()
    assert apa.merge_states(*a, *b, layout=layout, out=a[0], lse=a[1])[0] is a[0] and np.array_equal(a[0], out)


def test_resolve_says_what_runs(rng):
    q, k, v = make(rng, 1, 4, 2, 40, 300, 64)
    plan = apa.resolve(q, k, v, causal=True)
    statistics = apa.attention(q, k, v, causal=True, return_statistics=True)[1]
    assert (plan.engine, plan.kernel, plan.recipe) == (statistics.engine, statistics.kernel, statistics.recipe)
    assert plan.softmax_scale == 0.125 and plan.q_offset == 260 and plan.workspace_bytes > 0
    assert "auto" not in plan.recipe.values()
    assert apa.resolve(q, k, v, method="sage3").engine == "reference"


def test_names():
    names = apa.recipes()
    assert {"apa", "exact", "cold", "sage3"} <= set(names) and all(names.values())
    assert "engines" in apa.info() and apa.info()["engines"][-1] == "reference" and apa.info()["recipes"] == list(names)
    knobs = {knob.name: knob for knob in apa.knobs()}
    assert knobs["eps"].type == "number" and knobs["second_look"].range == "auto|off|on"
    assert set(apa.recipe()) == {"name", *knobs}
    assert apa.recipe("cold")["force"] == "low" and apa.recipe(eps=0.25)["eps"] == 0.25
    for name in names:  # text that was given out is taken back
        knobs_of = {k: v for k, v in apa.recipe(name).items() if k != "name"}
        assert apa.recipe(name, set=knobs_of) == apa.recipe(name)
