"""Arguments of a wrong type or out of range: every line names the argument, what was found and what was expected."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import apa_attention as apa

Q = np.ones((1, 2, 8, 16), np.float32)


def attend(**options):
    return apa.attention(Q, Q, Q, **options)


def cache(heads=2, dim=16, **options):
    return apa.KVCache(heads, dim, **{"dtype": "float32", "pages": 4, **options})


class Vast:
    def __float__(self):
        return float(10**400)


HUGE = 2**70
TYPES = [  # TypeError
    (lambda: attend(set=[1]), r"set: a list, expected a mapping"),
    (lambda: attend(set="group"), r"set: 'group' \(str\), expected a mapping"),
    (lambda: attend(set={1: 2}), r"set: 1 \(int\), expected names of knobs"),
    (lambda: attend(method=None), r"method: None, expected a recipe's name"),
    (lambda: attend(engine=None), r"engine: None, expected the name of an engine"),
    (lambda: attend(engine=3), r"engine: 3 \(int\), expected the name of an engine"),
    (lambda: attend(q_offset=1.5), r"q_offset: 1.5 \(float\), expected a whole number, or None"),
    (lambda: attend(q_offset=True), r"q_offset: True \(bool\), expected a whole number"),
    (lambda: attend(q_offset=np.bool_(True)), r"q_offset: a bool_?, expected a whole number"),
    (lambda: attend(scale="x"), r"scale: 'x' \(str\), expected a finite number, or None"),
    (lambda: attend(scale="0.5"), r"scale: '0.5' \(str\), expected a finite number"),
    (lambda: attend(scale=1j), r"scale: 1j \(complex\), expected a finite number"),
    (lambda: attend(scale=np.ones(1)), r"scale: a ndarray, expected a finite number"),
    (lambda: attend(softcap=[1.0]), r"softcap: a list, expected a positive number"),
    (lambda: attend(window=1.5), r"window: 1.5 \(float\), expected keys before"),
    (lambda: attend(window=(4, None)), r"window: None, expected keys before"),
    (lambda: attend(window="ab"), r"window: 'ab' \(str\), expected keys before"),
    (lambda: apa.resolve(Q, Q, Q, engine=None), r"engine: None, expected"),
    (lambda: apa.recipe(None), r"method: None, expected"),
    (lambda: apa.exact(Q, Q, Q, casual=True), r"casual: no such argument, expected one of causal, "),
    (lambda: apa.resolve(Q, Q, Q, casual=True), r"casual: no such argument"),
    (lambda: apa.evaluate(Q, Q, Q, repeats=1.5), r"repeats: 1.5 \(float\), expected a whole number"),
    (lambda: apa.evaluate(Q, Q, Q, truth=Q), r"truth: a ndarray, expected what exact\(\) gave"),
    (lambda: apa.set_threads(1.5), r"threads: 1.5 \(float\), expected a whole number from 0 to 4096"),
    (lambda: apa.set_threads("2"), r"threads: '2' \(str\), expected"),
    (lambda: apa.set_threads(None), r"threads: None, expected"),
    (lambda: cache(heads=1.5), r"heads: 1.5 \(float\), expected a whole number"),
    (lambda: cache(dim="16"), r"dim: '16' \(str\), expected"),
    (lambda: cache(pages=None), r"pages: None, expected"),
    (lambda: cache(growth="x"), r"growth: 'x' \(str\), expected a number"),
    (lambda: cache(dtype=None), r"dtype: None, expected a dtype"),
    (lambda: cache(dtype=object()), r"dtype: an object, expected a dtype"),
    (lambda: cache().fork("a"), r"sequence: 'a' \(str\), expected a number that add"),
    (lambda: cache().keys(1.5), r"sequence: 1.5 \(float\), expected"),
    (lambda: cache().rollback(0, 0.5), r"keys: 0.5 \(float\), expected"),
    (lambda: cache().append("a", Q, Q), r"sequences: 'a' \(str\), expected"),
    (lambda: cache().append([0.5], Q, Q), r"sequence: 0.5 \(float\), expected"),
    (lambda: cache().append(None, Q, Q), r"sequence: None, expected"),
    (lambda: cache().attend(0, Q, casual=True), r"casual: no such argument"),
    (lambda: cache().attend(0, Q, block_table=[[1]]), r"block_table: no such argument"),
    (lambda: cache().save(3), r"path: 3 \(int\), expected"),
    (lambda: apa.KVCache.load(None), r"path: None, expected"),
]
VALUES = [  # InvalidArgument
    (lambda: attend(q_offset=HUGE), r"q_offset: a number of more than 64 bits, expected a whole number"),
    (lambda: attend(window=(-HUGE, 0)), r"window: a number of more than 64 bits, expected keys before"),
    (lambda: attend(scale=float("nan")), r"scale: nan, expected a finite number, or None"),
    (lambda: attend(scale=float("-inf")), r"scale: -inf, expected a finite number, or None"),
    (lambda: attend(scale=10**400), r"scale: a number beyond double's range, expected a finite number"),
    (lambda: attend(scale=Vast()), r"scale: a number beyond double's range"),
    (lambda: attend(softcap=float("nan")), r"softcap: nan"),
    (lambda: attend(method="apa\0"), r"method: 'apa\\x00' \(str\), expected"),
    (lambda: attend(engine="cpu\0"), r"engine: 'cpu\\x00' \(str\), expected"),
    (lambda: attend(engine="\udc80"), r"engine: .*, expected"),
    (lambda: attend(eps=True), r"eps: found True \(bool\), expected"),
    (lambda: attend(set={"eps": False}), r"eps: found False \(bool\), expected"),
    (lambda: attend(set={"group": 16.0}), r"group: found 16.0 \(float\), expected"),
    (lambda: attend(set={"group": object()}), r"group: found an object, expected"),
    (lambda: attend(set={"second_look": "on\0"}), r"second_look: 'on\\x00' \(str\), expected"),
    (lambda: attend(seqused_k=[HUGE]), r"seqused_k: dtype object, expected whole numbers that fit into int64"),
    (lambda: apa.evaluate(Q, Q, Q, repeats=0), r"repeats: 0, expected a whole number from 1 on"),
    (lambda: apa.set_threads(HUGE), r"threads: a number of more than 64 bits, expected"),
    (lambda: cache(heads=HUGE), r"heads: a number of more than 64 bits"),
    (lambda: cache(dtype="bool"), r"dtype: dtype bool, expected float16"),
    (lambda: cache().append(HUGE, Q, Q), r"sequence: a number of more than 64 bits"),
    (lambda: cache().append(0, Q[0], Q[0], layout=3), r"layout: "),
]


@pytest.mark.parametrize("call, line", TYPES, ids=[line for _, line in TYPES])
def test_wrong_types(call, line):
    with pytest.raises(TypeError, match=f"^{line}") as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("call, line", VALUES, ids=[line for _, line in VALUES])
def test_wrong_values(call, line):
    with pytest.raises(apa.InvalidArgument, match=f"^{line}") as caught:
        call()
    assert caught.value.status == "APA_STATUS_INVALID_ARGUMENT" and "\n" not in str(caught.value)


def test_a_path_with_nul_is_not_cut_there(tmp_path: Path):
    with cache() as made, pytest.raises(apa.InvalidArgument, match="path: .*expected a path without NUL"):
        made.save(f"{tmp_path}/a\0b")
    assert not list(tmp_path.iterdir())


def test_numbers_of_other_libraries_are_taken():
    wanted = attend(scale=0.5, q_offset=3, window=(2, 1))
    for real, whole in ((np.float64, np.int64), (np.float64, np.uint8), (lambda x: np.array(x), np.int32)):
        assert np.array_equal(attend(scale=real(0.5), q_offset=whole(3), window=(whole(2), whole(1))), wanted)
    assert np.array_equal(attend(set={"second_look": np.True_}), attend(set={"second_look": True}))
    with cache() as made:
        sequence = np.int64(made.add())
        made.append(sequence, Q[0], Q[0])
        assert made.keys(sequence) == 8
