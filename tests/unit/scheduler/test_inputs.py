"""Files and options that once hung, filled the memory or raised an error without a place."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from commsched.cli.options import _model_arguments, bytes_of, cuts_of
from commsched.cli.simulate import parse_ranks
from commsched.pipeline.factory import Weights
from commsched.training.data_jobs import read_table
from dnn_bench.cluster import Link as HostLink
from dnn_bench.report import page, results
from dnn_bench.settings import hosts_of
from scheduler import profiles
from scheduler.formats.pipedream import Graph
from scheduler.formats.pipeline_plan import PipelinePlan
from scheduler.ir import inputs
from scheduler.ir.inputs import InputError, read_json, read_text, reading
from scheduler.ir.layout import Tiles
from scheduler.ir.link import Link
from scheduler.ir.profile import Layer, Profile
from scheduler.ir.program import Program
from scheduler.pipelines.convert import read_plan
from scheduler.validate import InvalidProgram, validate
from tests import fuzz


def refused(read: Callable[[Any], object], path: Path, content: str | bytes) -> str:
    """What a parser says of a file; the error names the file."""
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(InputError) as error:
        read(path)
    assert str(error.value).startswith(str(path))
    return str(error.value)[len(str(path)) :]


# -- files as such -------------------------------------------------------------------------------------------


def test_files_have_a_largest_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "MOST_BYTES", 1 << 20)
    assert refused(read_text, tmp_path / "a.txt", b"x" * ((1 << 20) + 1)) == (
        ": is larger than 1 MiB, the most that is read"
    )
    (tmp_path / "b.txt").write_bytes(b"x" * (1 << 20))
    assert len(read_text(tmp_path / "b.txt")) == 1 << 20


@pytest.mark.parametrize("levels", [33, 900, 100_000])
def test_json_has_a_largest_depth(tmp_path: Path, levels: int) -> None:
    """Deep brackets ended the stack of the parser, or that of the code which went through the result."""
    for inner in ('{"a":', "["):
        close = "}" if inner == '{"a":' else "]"
        text = inner * levels + "1" + close * levels
        assert "has more than 32 lists and objects within each other" in refused(
            read_json, tmp_path / "deep.json", text
        )
    (tmp_path / "flat.json").write_text("[" * 31 + "1" + "]" * 31)
    assert read_json(tmp_path / "flat.json")


def test_whole_numbers_of_json_have_a_largest_length(tmp_path: Path) -> None:
    said = refused(read_json, tmp_path / "long.json", f'{{"a": 1{"0" * 400}}}')
    assert "is not valid JSON (10000000000000000000... has 401 digits, the most are 20)" in said


def test_an_error_is_short(tmp_path: Path) -> None:
    path = tmp_path / "hybrid_conf.json"
    path.write_text(json.dumps({"module_to_stage_map": ["x" * 100_000]}))
    with pytest.raises(InputError) as error:
        read_plan(path, sizes=(4,))
    assert str(error.value).startswith(f"{path}: field 'module_to_stage_map'")
    assert len(str(error.value)) < inputs.MOST_SHOWN + 10


def test_a_place_in_a_place() -> None:
    with pytest.raises(InputError, match=r"^a file: row 3: could not convert string to float: 'x'$"):
        with reading("a file"), reading("row 3"):
            float("x")
    with pytest.raises(InputError, match=r"^a file: KeyError: 'ranks'$"), reading("a file"):
        _ = dict[str, int]()["ranks"]
    with pytest.raises(InputError, match=r"^a file: wrong$"), reading("a file"):
        raise InputError("a file: wrong")


# -- plans, profiles and graphs ------------------------------------------------------------------------------


def changed(file: Any, **fields: Any) -> str:
    data = {**file.to_dict(), **fields}
    data.pop("hash", None)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("field", "value"), [("forward", 10**19), ("bytes", (1 << 53) + 2), ("backward", 1e300)]
)
def test_numbers_of_a_profile_have_a_largest_size(tmp_path: Path, field: str, value: Any) -> None:
    """10^400 was an OverflowError without a place."""
    data = Profile("small", (Layer("a", 1.0, 2.0, 8),)).to_dict()
    data["layers"][0][field] = value
    said = refused(Profile.load, tmp_path / "p.json", json.dumps(data))
    assert f": layers[0].{field}: must be at most 9,007,199,254,740,992, got {value!r}" in said


def test_a_plan_says_how_many_layers_a_model_has(tmp_path: Path) -> None:
    """With 10^30 the validator never ended; with what is allowed it shows some of the missing actions."""
    program = Program.from_dict(json.loads(fuzz.programs()[0]))
    for layers in (10**18, 100_001):
        said = refused(Program.load, tmp_path / "plan.json", changed(program, layers=layers))
        assert f": layers: must be at most 100,000, got {layers}" in said
    (tmp_path / "plan.json").write_text(changed(program, layers=100_000))
    with pytest.raises(InvalidProgram) as error:
        validate(Program.load(tmp_path / "plan.json"))
    assert len(error.value.violations) == 50


@pytest.mark.parametrize("action", ["F0+1000", "2F1@-1000", "RS9999999999"])
def test_numbers_of_actions_have_a_largest_size(tmp_path: Path, action: str) -> None:
    """A run is unrolled over as many periods as the largest shift says."""
    program = Program.from_dict(json.loads(fuzz.programs()[0]))
    said = refused(Program.load, tmp_path / "plan.json", changed(program, kernel=[{"compute": action}]))
    assert f"kernel[0]: cannot be read (InputError: not an action: '{action}'" in said
    assert "numbers of at most 9 digits, versions and shifts of at most 3" in said


def test_what_a_plan_is_for_is_an_object(tmp_path: Path) -> None:
    program = Program.from_dict(json.loads(fuzz.programs()[0]))
    said = refused(Program.load, tmp_path / "plan.json", changed(program, meta=[1]))
    assert ": meta: must be an object, got [1]" in said


def test_tiles_of_a_plan_fit_its_ranks(tmp_path: Path) -> None:
    """A grid of 10^9 x 10^9 tiles filled the memory."""
    plan = fuzz.stage_plans()[1]
    assert plan.tiles == (Tiles((1, 2)), None)
    for tiles in ([{"grid": [10**9, 10**9]}, None], [{"grid": [1, 2]}], [{"grid": [1, 2]}, None, None]):
        said = refused(PipelinePlan.load, tmp_path / "stages.json", changed(plan, tiles=tiles))
        assert "field 'tiles' must have, for each of the replicas [2, 1], a grid of as many tiles" in said
    said = refused(PipelinePlan.load, tmp_path / "stages.json", changed(plan, microbatches=10_001))
    assert ": microbatches: must be at most 10,000, got 10001" in said


NODE = (
    "node{} -- A -- forward_compute_time=0, backward_compute_time=0,"
    " activation_size={}, parameter_size={}{}\n"
)


@pytest.mark.parametrize("number", ["1001E+500000", "1E+16", "[1E+999999;9E+999999]", "sNaN"])
@pytest.mark.parametrize("field", ["activation_size", "parameter_size"])
def test_numbers_of_a_graph_have_a_largest_size(tmp_path: Path, number: str, field: str) -> None:
    """1001E+500000 was rounded to a whole number of half a million digits."""
    values = (number, 1) if field == "activation_size" else (1, number)
    said = refused(Graph.load, tmp_path / "graph.txt", NODE.format(1, *values, ""))
    assert said.startswith(f", line 1: field '{field}' must be ") and said.endswith(f"got {number!r}")


def test_stages_of_a_graph_are_counted_in_its_nodes(tmp_path: Path) -> None:
    """One stage_id of 99999999999 filled the memory with the numbers below it."""
    path = tmp_path / "gpus=2.txt"
    text = NODE.format(1, 1, 1, " -- stage_id=0") + NODE.format(2, 1, 1, " -- stage_id=99999999999")
    said = refused(lambda path: Graph.load(path).cuts(), path, text)
    assert ": no node has stage_id 1, but one has 99999999999" in said
    for wrong in ("²", "1" * 5000, "-1"):
        said = refused(Graph.load, path, NODE.format(1, 1, 1, f" -- stage_id={wrong}"))
        assert said.startswith(", line 1: field 'stage_id' must be a whole number, at most 9,007,")


# -- hybrid_conf.json ----------------------------------------------------------------------------------------

OURS = {
    "model": "m",
    "schedule": "1f1b",
    "microbatches": 1,
    "placement": "bubble",
    "devices": [0, 1],
    "period": 0.0,
    "bottleneck": 0.0,
    "memory": [0, 0],
}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("schedule", 5, ": schedule: must be a text, got 5"),
        ("schedule", "fast", ": there is no pipeline schedule 'fast'; the schedules are"),
        ("microbatches", "4", ": microbatches: must be a whole number, got '4'"),
        ("microbatches", 10**12, ": microbatches: must be at most 10,000, got 1000000000000"),
        ("microbatches", 0, ": a pipeline needs at least 1 stage and 1 micro-batch, got 2 and 0"),
        ("devices", 2, ": devices: must be a list, got 2"),
        ("memory", [0], ": field 'memory' must have 2 entries, got 1"),
        ("period", None, ": period: must be a number, got None"),
    ],
)
def test_types_of_our_fields(tmp_path: Path, field: str, value: Any, message: str) -> None:
    """They were attribute errors, or errors without the file."""
    conf = {"module_to_stage_map": [0, 1, 1], "stage_to_rank_map": {"0": [0], "1": [1]}}
    text = json.dumps({**conf, "commsched": {**OURS, field: value}})
    said = refused(lambda path: read_plan(path, sizes=(4, 4)), tmp_path / "hybrid_conf.json", text)
    assert said.startswith(message)
    good = tmp_path / "good.json"
    good.write_text(json.dumps({**conf, "commsched": OURS}))
    assert read_plan(good, sizes=(4, 4)).schedule == "1f1b"


# -- reports, tables and weights -----------------------------------------------------------------------------


def test_structure_of_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    report = json.loads(fuzz.reports()[0])
    for field, value, message in (
        ("baselines", [{"name": "ddp"}], "KeyError: 'trace'"),
        ("place", None, "AttributeError: "),
        ("baselines", 3, "TypeError: "),
    ):
        path.write_text(json.dumps({**report, field: value}))
        assert page.picture([str(path), "--out", str(tmp_path / "out.svg")]) == 2
        assert f"{path}: {message}" in capsys.readouterr().err
    report["baselines"][0]["trace"]["end"] = 1e300
    path.write_text(json.dumps(report))
    assert page.picture([str(path), "--out", str(tmp_path / "out.svg")]) == 2
    assert "ddp: a step takes 0 to 9,007,199,254,740,992 s, not 1e+300" in capsys.readouterr().err
    path.write_text(json.dumps({**report, "job": []}))
    assert page.main([str(path), "--html", str(tmp_path / "out.html")]) == 2
    assert f"{path}: TypeError: " in capsys.readouterr().err


def test_numbers_of_a_table_of_results(tmp_path: Path) -> None:
    about = "# title: t\n# command: c\n# unit: u\n# label: a\n# bars: b\n# axis: x\n"
    path = tmp_path / "steps.csv"
    path.write_text(about + "# a comment\na,b\nx,1\ny,\nz\n")
    assert len(results.read(path).rows) == 3
    said = refused(results.read, path, about + "a,b\nx,1\ny,fast\n")
    assert said == ": drawn row 2, column b: could not convert string to float: 'fast'"
    said = refused(results.read, path, about + "# from: low\na,b\nx,1\n")
    assert said == ": # from: could not convert string to float: 'low'"
    said = refused(results.read, path, about + f"a,b\nx,{'1' * 400}\n")
    assert said == ": drawn row 1, column b: must be at most 9,007,199,254,740,992, got inf"


def test_a_table_of_sentences(tmp_path: Path) -> None:
    read = lambda path: read_table(path, ())  # noqa: E731
    assert "can't decode byte 0xff" in refused(read, tmp_path / "a.tsv", b"text\tlabel\n\xff\t1\n")
    said = refused(read, tmp_path / "a.tsv", "text\tlabel\n" + "x" * (1 << 25))
    assert "field larger than field limit" in said
    with pytest.raises(InputError, match="none.tsv: FileNotFoundError"):
        read_table(tmp_path / "none.tsv", ())


@pytest.mark.parametrize("content", ["[]", '{"weight_map": [1]}', '{"weight_map": {"a": 1}}', "{}", "{"])
def test_an_index_of_weights(tmp_path: Path, content: str) -> None:
    path = tmp_path / "model.safetensors.index.json"
    refused(lambda path: Weights(path.parent), path, content)


# -- options -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [
        (lambda text: bytes_of("--memory", text), "9" * 400 + "g", "--memory: cannot read '9999"),
        (lambda text: bytes_of("--memory", text), "8193t", "--memory: cannot read '8193t'; .* at most 8192t"),
        (HostLink.parse, "9" * 400 + "gbit", "a link is a rate in bits"),
        (Link.parse, "9" * 400 + "gbit", "moves nothing, or more than 9,007,199,254,740,992 bits per second"),
        (parse_ranks, "9" * 5000, "--ranks must be a whole number, at most 1,000,000"),
        (parse_ranks, "5..2", "--ranks: expected 1 <= A <= B, got '5..2'"),
        (cuts_of, "3,²", "--cuts: a layer must be a whole number"),
        (hosts_of, "a:²", "hosts must look like .* not 'a:²': workers must be a whole number"),
        (profiles.find, "alexnet", "there is no profile 'alexnet'"),
    ],
)
def test_options(read: Callable[[str], object], text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(text)


def test_a_value_of_too_many_brackets_is_a_text() -> None:
    text = "-" * 100_000 + "1"
    assert _model_arguments(f"a={text}") == {"a": text}
