"""The cost model: what it says, and the file it lives in. And the clock."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minserve.errors import ParameterError
from minserve.simulate.cost_model import FORMAT, CostModel, StepWork
from minserve.simulate.virtual_clock import VirtualClock

MODEL = CostModel(
    token_counts=(1, 2, 8, 64),
    token_seconds=(0.010, 0.011, 0.014, 0.070),
    key_seconds=2e-6,
    pair_seconds=1e-6,
    sequence_seconds=1e-5,
    row_seconds=3e-4,
    source={"model": "tiny", "vocab_size": 280},
)


def batch(*parts: tuple[int, int, int]) -> list[Any]:
    """(tokens, computed before, logits) a sequence."""
    return [
        SimpleNamespace(seq=SimpleNamespace(num_computed_tokens=c, token_ids=array("i")), num_tokens=t, num_logits=n)
        for t, c, n in parts
    ]


@pytest.mark.parametrize(
    ("parts", "work"),
    [
        ([(1, 0, 1)], StepWork(tokens=1, keys=1, pairs=1, sequences=1, rows=1)),
        ([(1, 99, 1), (1, 9, 1)], StepWork(tokens=2, keys=110, pairs=110, sequences=2, rows=2)),
        ([(3, 0, 0)], StepWork(tokens=3, keys=3, pairs=6, sequences=1, rows=0)),  # 1 + 2 + 3
        ([(3, 10, 1), (1, 4, 1)], StepWork(tokens=4, keys=18, pairs=41, sequences=2, rows=2)),  # 11 + 12 + 13 + 5
    ],
)
def test_the_work_of_a_batch(parts: list[tuple[int, int, int]], work: StepWork) -> None:
    assert StepWork.of(batch(*parts)) == work


@pytest.mark.parametrize(
    ("tokens", "seconds"), [(1, 0.010), (2, 0.011), (5, 0.0125), (8, 0.014), (36, 0.042), (64, 0.070), (120, 0.126)]
)
def test_the_curve_over_tokens_is_made_of_straight_lines_and_the_last_one_goes_on(tokens: int, seconds: float) -> None:
    assert MODEL.seconds_of_tokens(tokens) == pytest.approx(seconds)


def test_each_rate_counts_once() -> None:
    work = StepWork(tokens=2, keys=500, pairs=1000, sequences=2, rows=1)
    assert MODEL.seconds(work) == pytest.approx(0.011 + 1e-3 + 1e-3 + 2e-5 + 3e-4)
    assert MODEL.scaled(2).seconds(work) == pytest.approx(2 * MODEL.seconds(work))


def test_a_file_is_read_back_as_it_was(tmp_path: Path) -> None:
    MODEL.save(tmp_path / "cost.json")
    assert CostModel.load(tmp_path / "cost.json") == MODEL


@given(st.dictionaries(st.text(), st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists)))
def test_no_json_object_gets_past_the_checks_by_accident(document: dict[str, Any]) -> None:
    """Whatever is in it, the file is refused by name and nothing else is raised."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cost.json"
        path.write_text(json.dumps({"format": FORMAT, **document}), encoding="utf-8")
        with pytest.raises(ParameterError, match=r"cost\.json"):
            CostModel.load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "something else"}, "is not a cost model: its format is not"),
        ({"format": None}, "is not a cost model: its format is not"),
        ({"row_seconds": None}, "row_seconds must be a number of seconds"),
        ({"row_seconds": -1e-9}, "row_seconds must be a number of seconds"),
        ({"pair_seconds": float("nan")}, "pair_seconds must be a number of seconds"),
        ({"key_seconds": float("inf")}, "key_seconds must be a number of seconds"),
        ({"sequence_seconds": True}, "sequence_seconds must be a number of seconds"),
        ({"sequence_seconds": "1"}, "sequence_seconds must be a number of seconds"),
        ({"sequence_seconds": 10**400}, "sequence_seconds must be a number of seconds"),
        ({"token_counts": 5}, "token_counts must be a list"),
        ({"token_counts": [1]}, "must be two lists of one length"),
        ({"token_counts": [1, 2, 8]}, "must be two lists of one length"),
        ({"token_counts": [2, 3, 8, 64]}, "whole numbers that start at 1"),
        ({"token_counts": [1, 8, 2, 64]}, "token_counts must rise"),
        ({"token_counts": [1, 2, 2, 64]}, "token_counts must rise"),
        ({"token_counts": [1, 2.0, 8, 64]}, "whole numbers that start at 1"),
        ({"token_counts": [True, 2, 8, 64]}, "whole numbers that start at 1"),
        ({"token_seconds": [0.01, 0.02, 0.03, "0.04"]}, "a value of token_seconds must be a number of seconds"),
        ({"token_seconds": [0.01, 0.02, 0.03, 0.02]}, "start above 0 and never fall"),
        ({"token_seconds": [0, 0.02, 0.03, 0.04]}, "start above 0 and never fall"),
        ({"token_counts": list(range(1, 2000)), "token_seconds": [1] * 1999}, "must be two lists of one length"),
        ({"source": [1]}, "source must be an object"),
        ({"extra": 1}, "there is no 'extra' in a cost model"),
    ],
)
def test_a_file_with_a_wrong_value_is_refused_by_name(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    MODEL.save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ParameterError, match=message) as caught:
        CostModel.load(path)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize("name", ["token_counts", "row_seconds", "source"])
def test_a_missing_value_is_named(name: str, tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    MODEL.save(path)
    document = json.loads(path.read_text())
    del document[name]
    path.write_text(json.dumps(document))
    with pytest.raises(ParameterError, match=f"{name} is missing"):
        CostModel.load(path)


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"3", b"\xff\xfe\x00", b"[" * 100_000, b" " * (2**20 + 1)], ids=lambda d: repr(d[:4])
)
def test_a_file_that_is_none(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    path.write_bytes(data)
    with pytest.raises(ParameterError, match="not a cost model"):
        CostModel.load(path)


def test_the_clock_goes_on_only_when_told_and_never_back() -> None:
    clock = VirtualClock()
    assert (clock(), clock()) == (0.0, 0.0)
    clock.advance(1.5)
    clock.advance(-1.0)
    clock.advance(float("nan"))
    assert clock() == 1.5
