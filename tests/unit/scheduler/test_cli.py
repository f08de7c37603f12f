"""The command line: tables, JSON from which anyone can recompute the figures, errors in one line."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from commsched.cli import main
from commsched.cli.simulate import parse_ranks
from scheduler import policies
from scheduler.ir.link import Level, Link, network_link
from scheduler.ir.profile import Layer, Profile
from scheduler.ir.program import Program

LINK = "alpha=2e-4,beta=8e-10"


@pytest.fixture
def small(tmp_path: Path) -> str:
    path = tmp_path / "small.json"
    layers = tuple(Layer(f"l{i}", 1e-3 * (i + 1), 2e-3 * (i + 1), 4_000_000 // (i + 1)) for i in range(6))
    Profile("small", layers).save(path)
    return str(path)


def output(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 0
    return capsys.readouterr().out


def error(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def recompute(report: dict[str, Any], row: dict[str, Any]) -> float:
    """The period, from nothing but what the JSON says."""
    layers, alpha, beta = report["layers"], report["link"]["alpha"], report["link"]["beta"]
    backward_end, now = {}, 0.0
    for index in reversed(range(len(layers))):
        now += layers[index]["backward"]
        backward_end[index] = now
    link, gathered = 0.0, {}
    for action in row["plan"].split():
        kind, number = action[:2], int(action[2:])
        bucket = row["buckets"][number]
        seconds = (alpha + beta * bucket["bytes"]) * (2 if kind == "AR" else 1)
        start = link if kind == "AG" else max(link, backward_end[min(bucket["layers"])])
        link = start + seconds
        if kind != "RS":
            gathered[number] = link
    for index, layer in enumerate(layers):
        waits = [end for number, end in gathered.items() if index in row["buckets"][number]["layers"]]
        now = max([now, *waits]) + layer["forward"]
    return now


@pytest.mark.parametrize("profile", ["small", "vgg16"])
def test_figures_can_be_recomputed(capsys: pytest.CaptureFixture[str], small: str, profile: str) -> None:
    text = output(
        capsys, "simulate", "--profile", small if profile == "small" else profile, "--link", LINK, "--json"
    )
    report = json.loads(text)
    assert set(report["policies"]) == set(policies.names())
    compute = sum(layer["forward"] + layer["backward"] for layer in report["layers"])
    for row in report["policies"].values():
        assert row["period"] == pytest.approx(recompute(report, row))
        assert row["ratio_to_bound"] == pytest.approx(row["period"] / report["bound"])
        assert row["exposed"] == pytest.approx(row["period"] - compute, abs=1e-12)
        sizes = [layer["bytes"] for layer in report["layers"]]
        assert sum(bucket["bytes"] for bucket in row["buckets"]) == sum(sizes)
        for bucket in row["buckets"]:
            parts = bucket.get("parts", [])
            split = sum(last + 1 - first for _, first, last in parts)
            whole = sum(
                sizes[layer] for layer in bucket["layers"] if layer not in {part[0] for part in parts}
            )
            assert bucket["bytes"] == split + whole


def test_table_lists_every_policy(capsys: pytest.CaptureFixture[str], small: str) -> None:
    text = output(capsys, "simulate", "--profile", small, "--link", "10gbit")
    for name in policies.names():
        assert f" {name} " in text
    assert "period/bound" in text


def test_chosen_policies_and_options(capsys: pytest.CaptureFixture[str], small: str) -> None:
    words = ("simulate", "--profile", small, "--link", LINK, "--policies", "dear,sequential", "--json")
    plain = json.loads(output(capsys, *words))
    assert list(plain["policies"]) == ["dear", "sequential"]
    slowed = json.loads(output(capsys, *words, "--slowdown", "0.5"))
    assert slowed["policies"]["dear"]["period"] > plain["policies"]["dear"]["period"]
    sharded = json.loads(output(capsys, *words, "--gather", "parameters", "--early-step"))
    assert (sharded["gather"], sharded["early_step"]) == ("parameters", True)
    # One rank's wire becomes the link of a ring of 8: 7 start-ups, 7/8 of the bytes.
    ring = json.loads(output(capsys, *words, "--ranks", "8"))
    assert ring["link"]["alpha"] == pytest.approx(7 * 2e-4)
    assert ring["link"]["beta"] == pytest.approx(7 / 8 * 8e-10)


def test_link_from_a_file(capsys: pytest.CaptureFixture[str], small: str, tmp_path: Path) -> None:
    Link(3e-4, 5e-10, "measured").save(tmp_path / "link.json")
    words = ("simulate", "--profile", small, "--policies", "dear", "--json", "--link")
    link = json.loads(output(capsys, *words, str(tmp_path / "link.json")))["link"]
    assert (link["alpha"], link["beta"]) == (3e-4, 5e-10)


def test_two_tiers_are_no_wire(capsys: pytest.CaptureFixture[str], small: str, tmp_path: Path) -> None:
    """It has the cost of whole collectives, which counted as that of one message of a ring."""
    file = str(tmp_path / "tiers.json")
    network_link([Level(2, 1e-5, 1e-10), Level(2, 1e-4, 8e-10)], "tiers").save(file)
    words = ("simulate", "--profile", small, "--policies", "dear", "--json", "--link", file)
    assert "between" in json.loads(output(capsys, *words))["link"]
    assert "no link of one of the ranks" in error(capsys, *words, "--ranks", "8")
    words = ("partition", "--profile", small, "--devices", "4", "--link", file)
    assert "no link of one of the devices" in error(capsys, *words)


def test_hosts_of_several_ranks(capsys: pytest.CaptureFixture[str], small: str) -> None:
    """2 hosts of 4: three start-ups inside, one between; 3/4 of the bytes inside, half of them between."""
    words = ("simulate", "--profile", small, "--link", "alpha=1e-3,beta=1e-8", "--policies", "dear", "--json")
    hosts = (
        "--ranks",
        "8",
        "--per-host",
        "4",
        "--inside",
        "alpha=1e-5,beta=1e-10",
        "--algorithm",
        "hierarchical",
    )
    link = json.loads(output(capsys, *words, *hosts))["link"]
    assert link["alpha"] == pytest.approx(3e-5 + 1e-3)
    assert link["beta"] == pytest.approx(0.75e-10 + 0.5e-8)
    assert "need all of --ranks, --per-host and --inside" in error(capsys, *words, "--per-host", "4")
    assert "6 ranks do not fill hosts of 4" in error(capsys, *words, "--ranks", "6", *hosts[2:])
    assert "--algorithm needs --ranks" in error(capsys, *words, "--algorithm", "direct")


def test_sharded_comparison_leaves_out_all_reduces(capsys: pytest.CaptureFixture[str], small: str) -> None:
    report = json.loads(
        output(capsys, "simulate", "--profile", small, "--link", LINK, "--gather", "parameters", "--json")
    )
    assert set(report["policies"]) == set(policies.names()) - {"wfbp", "mgwfbp", "bytescheduler"}


def test_scaling_table(capsys: pytest.CaptureFixture[str], small: str) -> None:
    words = ("simulate", "--profile", small, "--link", LINK, "--ranks", "2..64", "--policies", "wfbp,dear")
    report = json.loads(output(capsys, *words, "--json"))
    assert [row["ranks"] for row in report["scaling"]] == [2, 4, 8, 16, 32, 64]
    periods = [row["policies"]["wfbp"]["period"] for row in report["scaling"]]
    assert periods == sorted(periods)
    assert " 64 " in output(capsys, *words)


@pytest.mark.bench
def test_scaling_table_takes_under_a_second(capsys: pytest.CaptureFixture[str]) -> None:
    """Every policy, 2 to 16,384 ranks; the kernels are loaded by a first, small table."""
    words = ("simulate", "--profile", "resnet50", "--link", "10gbit", "--json", "--ranks")
    output(capsys, *words, "2..4")
    begin = time.process_time()
    report = json.loads(output(capsys, *words, "2..16384"))
    assert time.process_time() - begin < 1.0
    assert [row["ranks"] for row in report["scaling"]] == [2**power for power in range(1, 15)]


def test_ranks_double() -> None:
    assert parse_ranks("8") == [8]
    assert parse_ranks("2..16384")[-2:] == [8192, 16384]
    assert parse_ranks("3..10") == [3, 6, 10]


def test_plan_is_written_and_shown(capsys: pytest.CaptureFixture[str], small: str, tmp_path: Path) -> None:
    file = str(tmp_path / "plan.json")
    text = output(capsys, "plan", "--profile", small, "--link", LINK, "--policy", "dear", "--output", file)
    program = Program.load(file)
    assert program.plan in text
    assert program.hash in text
    assert program.meta["period"] > 0
    assert program.plan in output(capsys, "show", file)
    assert output(capsys, "show", file, "-o", str(tmp_path / "plan.txt")) == ""
    assert (tmp_path / "plan.txt").read_text() == program.plan + "\n"
    shown = output(capsys, "show", file, "--profile", small, "--link", LINK)
    assert "link    |" in shown and "peak memory" in shown
    data = json.loads(output(capsys, "show", file, "--profile", small, "--link", LINK, "--json"))
    assert (data["plan"], data["hash"]) == (program.plan, program.hash)
    assert data["simulated"]["period"] == pytest.approx(program.meta["period"])
    text = output(capsys, "plan", "--profile", small, "--link", LINK, "--policy", "dear", "--json")
    assert Program.from_dict(json.loads(text))


@pytest.mark.parametrize(
    ("form", "begin"), [("svg", "<svg"), ("chrome", '{"traceEvents"'), ("text", "compute |")]
)
def test_show_writes_pictures(
    capsys: pytest.CaptureFixture[str], small: str, tmp_path: Path, form: str, begin: str
) -> None:
    plan, picture = str(tmp_path / "plan.json"), tmp_path / "picture"
    output(capsys, "plan", "--profile", small, "--link", LINK, "--policy", "wfbp", "-o", plan)
    output(capsys, "show", plan, "--profile", small, "--link", LINK, "--format", form, "-o", str(picture))
    assert picture.read_text().startswith(begin)


def test_errors_say_what_is_wrong(capsys: pytest.CaptureFixture[str], small: str, tmp_path: Path) -> None:
    plan = str(tmp_path / "plan.json")
    main(["plan", "--profile", small, "--link", LINK, "--policy", "dear", "-o", plan])
    capsys.readouterr()
    base = ("simulate", "--profile", small, "--link", LINK)
    assert "no profile 'alexnet'; the shipped profiles are" in error(
        capsys, *base[:1], "--profile", "alexnet", *base[3:]
    )
    assert "needs both alpha" in error(capsys, *base[:3], "--link", "alpha=1")
    assert "there is no policy 'best'; the policies are" in error(capsys, *base, "--policies", "best")
    assert "--ranks: expected a number or A..B, got '2-4'" in error(capsys, *base, "--ranks", "2-4")
    assert "--jitter" in error(capsys, *base, "--ranks", "2..4", "--jitter", "0.1")
    assert "model of 6 layers, profile 'vgg16' has 16" in error(capsys, "show", plan, "--profile", "vgg16")
    assert "needs --profile and --link" in error(capsys, "show", plan, "--format", "svg")
    assert "timeline, which needs --profile" in error(capsys, "show", plan, "--link", LINK)
    (tmp_path / "damaged.json").write_text("{")
    assert "damaged.json: is not valid JSON" in error(capsys, "show", str(tmp_path / "damaged.json"))


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "simulate" in text and "plan" in text and "show" in text
    with pytest.raises(SystemExit) as stop:
        main(["dance"])
    assert stop.value.code == 2


def test_command_does_not_import_torch() -> None:
    code = (
        "import sys; from commsched.cli import main;"
        "main(['simulate', '--profile', 'vgg16', '--link', '10gbit', '--policies', 'dear']);"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=400, stdout=subprocess.DEVNULL)
