"""Programs: JSON that round-trips, hashes that notice every change, files that are damaged."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.ir.actions import Action, Kind, parse_actions
from scheduler.ir.buckets import Bucket, Piece, fuse_by_bytes, one_per_layer
from scheduler.ir.program import Program, data_parallel_program


def example(**changes: Any) -> Program:
    values: dict[str, Any] = dict(
        policy="dear", buckets=one_per_layer([4, 6]), link=parse_actions("RS0 RS1 AG1 AG0"), layers=2
    )
    return data_parallel_program(**{**values, **changes})


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=6),
    st.integers(1, 50),
    st.permutations(range(6)),
    st.sampled_from([("gradients", False), ("parameters", False), ("parameters", True)]),
    st.integers(1, 64),
)
def test_json_round_trips(
    sizes: list[int], limit: int, shuffle: list[int], step: tuple[str, bool], ranks: int
) -> None:
    buckets = fuse_by_bytes(sizes, limit, part=7)
    order = [Action(Kind.RS, i) for i in range(len(buckets))]
    order += [Action(Kind.AG, i) for i in shuffle if i < len(buckets)]
    program = data_parallel_program("x", buckets, order, len(sizes), ranks, *step, meta={"period": 0.5})
    again = Program.from_dict(program.to_dict())
    assert again == program
    assert again.hash == program.hash
    assert again.meta == program.meta
    assert parse_actions(program.plan) == program.link


def test_kernel_starts_with_the_backward() -> None:
    assert {lane: " ".join(map(str, actions)) for lane, actions in example().lanes().items()} == {
        "compute": "B1 B0 F0+1 F1+1",
        "link": "RS0 RS1 AG1 AG0",
    }


@pytest.mark.parametrize(
    "changes",
    [
        {"link": parse_actions("RS0 RS1 AG0 AG1")},
        {"buckets": (Bucket((Piece(1, 0, 6), Piece(0, 0, 4))),)},
        {"buckets": one_per_layer([6, 4])},
        {"ranks": 3},
        {"gather": "parameters"},
        {"policy": "other"},
    ],
)
def test_hash_notices_every_change(changes: dict[str, Any]) -> None:
    assert example(**changes).hash != example().hash


def test_hash_ignores_meta() -> None:
    assert example(meta={"period": 1.0}).hash == example().hash
    assert example(gather="parameters", early_step=True).hash != example(gather="parameters").hash


def test_files_round_trip(tmp_path: Path) -> None:
    example().save(tmp_path / "plan.json")
    assert Program.load(tmp_path / "plan.json") == example()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("format", 99, "field 'format' is 99"),
        ("buckets", [{"pieces": [[0, 0]], "group": 0}], r"buckets\[0\].pieces\[0\]: cannot be read"),
        ("kernel", [{"link": "RS0 XX"}], r"kernel\[0\]: cannot be read.*'XX'"),
        ("gather", "weights", "gather must be .*'weights'"),
        ("early_step", "yes", "early_step: must be true or false, got 'yes'"),
        ("layers", None, "layers: must be a whole number, got None"),
        ("hash", "0" * 16, "field 'hash'.*the file was changed"),
        ("ranks", 3, "field 'hash'.*the file was changed"),
    ],
)
def test_damaged_field_is_named(tmp_path: Path, field: str, value: Any, message: str) -> None:
    path = tmp_path / "plan.json"
    data = example().to_dict()
    data[field] = value
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=message) as error:
        Program.load(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format": 1'])
def test_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=str(path)):
        Program.load(path)


def test_missing_field(tmp_path: Path) -> None:
    data = example().to_dict()
    del data["policy"]
    with pytest.raises(ValueError, match="'policy'"):
        Program.from_dict(data)


def test_early_step_needs_parameters() -> None:
    with pytest.raises(ValueError, match="early_step needs gather='parameters'"):
        example(early_step=True)


def test_kernels_must_match_ranks() -> None:
    lanes = {"link": parse_actions("AR0")}
    with pytest.raises(ValueError, match="3 ranks needs 1 or 3 kernels, got 2"):
        Program("x", one_per_layer([4]), (lanes, lanes), 1, ranks=3)


def test_pickle_round_trip() -> None:
    """Plans travel from rank 0 to the others; plain pickle must do where cloudpickle is not installed."""
    program = example()
    copied = pickle.loads(pickle.dumps(replace(program, meta={"source": "here"})))
    assert copied == program and copied.hash == program.hash and copied.meta == {"source": "here"}
    with pytest.raises(TypeError):
        copied.kernel[0]["link"] = ()
