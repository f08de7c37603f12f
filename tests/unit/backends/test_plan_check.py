"""``commsched plan --check``: the waits of a plan, that each is there, and what happens without it."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest

from commsched.backends.cuda import StreamSchedule
from commsched.backends.races import COMM, WatchedDevice
from commsched.cli import main
from commsched.cli.plan_check import Certificate, check
from scheduler import policies
from scheduler.ir.actions import Kind
from scheduler.ir.link import Link
from scheduler.ir.profile import Layer, Profile
from scheduler.ir.program import Program
from scheduler.pipelines import generate

LINK = Link(2e-4, 8e-10)


def profile(groups: int = 1) -> Profile:
    """Return layers of which one has no parameters, and a large one that policies cut."""
    sizes = [0, 400, 9_000_000, 80_000, 4_000, 2_000_000]
    return Profile(
        "small", tuple(Layer(f"l{i}", 1e-3, 2e-3, size, group=i % groups) for i, size in enumerate(sizes))
    )


def plan(policy: str, gather: str = "gradients", groups: int = 1) -> Program:
    return policies.plan(profile(groups), LINK, policy, gather=gather)


def checked(policy: str, gather: str = "gradients", groups: int = 1) -> Certificate:
    return check(plan(policy, gather, groups))


@pytest.mark.parametrize("gather", ["gradients", "parameters"])
@pytest.mark.parametrize("policy", policies.names())
def test_every_wait_of_a_plan_is_there(policy: str, gather: str) -> None:
    try:
        program = plan(policy, gather, groups=2)
    except ValueError as error:
        assert gather == "parameters" and "gather" in str(error)  # all-reduces have no place for an update
        return
    certificate = check(program)
    assert certificate.holds, certificate
    # A bucket is reduced after its last gradient. An earlier operation may have waited for a later one.
    waited_for = program.layers
    for action in program.link:
        if action.kind is not Kind.AG:
            last = min(program.buckets[action.index].layers)
            operation = f"{action.kind.value}{action.index}"
            [wait] = [each for each in certificate.waits if each.operation == operation]
            assert bool(wait.race) == (last < waited_for), certificate
            waited_for = min(waited_for, last)


Forgets = Callable[[pytest.MonkeyPatch], None]


def patched(owner: type, name: str, new: Callable[..., Any]) -> Forgets:
    """Return what replaces a method; the new one gets the old one first."""
    return lambda monkeypatch: monkeypatch.setattr(owner, name, partialmethod(new, getattr(owner, name)))


def no_wait_for_sums(self: Any, wait: Any, bucket: int, what: str) -> None:
    """Forwards and updates begin before sums have arrived."""


def no_wait_of_one_bucket(self: Any, wait: Any, bucket: int, what: str) -> None:
    if bucket != 0:
        wait(self, bucket, what)


def no_wait_for_gradients(self: Any, wait: Any, stream: int, event: int) -> None:
    if stream != COMM:
        wait(self, stream, event)


REMOVED: list[tuple[Forgets, str, str]] = [
    (patched(StreamSchedule, "wait", no_wait_for_sums), "dear", "gradients"),
    (patched(StreamSchedule, "wait", no_wait_of_one_bucket), "dear", "gradients"),
    (patched(StreamSchedule, "wait", no_wait_for_sums), "pipedap", "parameters"),
    (patched(WatchedDevice, "wait", no_wait_for_gradients), "wfbp", "gradients"),
]


@pytest.mark.parametrize(("forgets", "policy", "gather"), REMOVED)
def test_a_wait_that_is_removed_is_reported(
    forgets: Forgets,
    policy: str,
    gather: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "plan.json"
    plan(policy, gather).save(path)
    assert main(["show", str(path), "--check"]) == 0
    assert "0 missing" in capsys.readouterr().out
    forgets(monkeypatch)
    assert main(["show", str(path), "--check"]) == 1
    told = capsys.readouterr().out
    assert ": MISSING" in told and "RACE: " in told, told


def test_one_removed_wait_is_the_one_that_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = checked("dear")
    patched(StreamSchedule, "wait", no_wait_of_one_bucket)(monkeypatch)
    certificate = checked("dear")
    missing = [wait for wait in certificate.waits if not wait.is_there]
    assert [wait.after for wait in missing] == ["AG0"] and not certificate.holds
    assert certificate.races and all(
        "AG on stream 1" in race or "AG on comm" in race for race in certificate.races
    )
    [same] = [wait for wait in whole.waits if wait.after == "AG0"]
    assert same.is_there and (missing[0].operation, missing[0].stream) == (same.operation, same.stream)
    assert same.race, "the last all-gather of a step: nothing else waits for it"


def test_the_certificate_is_a_part_of_the_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile().save(tmp_path / "small.json")
    words = ["plan", "--profile", str(tmp_path / "small.json"), "--link", "10gbit", "--policy", "dear"]
    assert main([*words, "--check", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)["check"]
    assert report["holds"] and not report["races"]
    assert {wait["stream"] for wait in report["waits"]} == {"compute", "comm"}
    assert "forward of l5" in {wait["operation"] for wait in report["waits"]}  # by the profile's names


def test_what_has_no_streams_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    early = policies.plan(profile(), LINK, "dear", gather="parameters", early_step=True)
    with pytest.raises(ValueError, match="early_step"):
        check(early)
    with pytest.raises(ValueError, match="stages"):
        check(generate("1f1b", 2, 4))
    plan("dear").save(tmp_path / "plan.json")
    assert main(["show", str(tmp_path / "plan.json"), "--check", "--format", "json"]) == 2
    assert "--check prints text, got --format json" in capsys.readouterr().err
