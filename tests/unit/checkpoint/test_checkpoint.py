"""``commsched.save`` and ``load`` on one rank: what comes back, and that nothing damaged does. Several ranks:
tests/dist/test_checkpoints.py.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import threading
import warnings
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from commsched import checkpoint
from commsched.errors import CheckpointError, CommError
from tests import fuzz
from tests.support import checkpoints
from tests.support.checkpoints import RecordedOs, alone, loaded, numbered, same


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Path]:
    with alone():
        yield tmp_path / "kept"


def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(
        [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[3].parameters()}]
    )
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any, seed: int) -> None:
    dice = torch.Generator().manual_seed(seed)
    optimizer.zero_grad()
    model(torch.randn(6, 5, generator=dice)).square().mean().backward()
    optimizer.step()
    schedule.step()


def test_training_goes_on_to_the_same_bits(kept: Path) -> None:
    whole, stopped, again = made(1), made(1), made(2)
    for seed in range(6):
        step(*whole, seed)
    for seed in range(3):
        step(*stopped, seed)
    names = ("model", "optimizer", "schedule")
    values = {
        "epoch": 3,
        "pair": (1, [2.5, "x"]),
        "empty": {},
        "random": torch.get_rng_state(),
        "half": [{1: None}],
    }
    checkpoint.save({**dict(zip(names, stopped)), **values}, kept).wait()
    step(*stopped, 3)  # the saved state is a copy
    found = checkpoint.load(dict(zip(names, again)), kept)
    assert found is not None and torch.equal(found.pop("random"), values.pop("random")) and found == values
    for seed in range(3, 6):
        step(*again, seed)
    assert_equal(again[0].state_dict(), whole[0].state_dict())
    assert_equal(again[1].state_dict(), whole[1].state_dict())
    assert again[2].state_dict() == whole[2].state_dict()


def assert_equal(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0) if isinstance(one, torch.Tensor) else None
    if isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_equal(one[key], other[key])
    elif not isinstance(one, torch.Tensor):
        assert one == other


def test_torch_distributed_checkpoint_reads_a_generation(kept: Path) -> None:
    model, optimizer, schedule = made(1)
    step(model, optimizer, schedule, 0)
    checkpoint.save({"model": model, "optimizer": optimizer, "epoch": 4}, kept).wait()
    other, fresh, schedule = made(2)
    step(other, fresh, schedule, 1)
    state = {"model": other.state_dict(), "optimizer": fresh.state_dict(), "epoch": 0}
    dcp.load(state, checkpoint_id=max(kept.iterdir()), no_dist=True)
    assert state["epoch"] == 4
    assert_equal(dict(state["model"]), dict(model.state_dict()))
    wanted = optimizer.state_dict()
    assert_equal(state["optimizer"]["param_groups"], wanted["param_groups"])
    assert_equal(state["optimizer"]["state"][0], wanted["state"][0])


def test_two_generations_stay(kept: Path) -> None:
    for number in range(1, 5):
        checkpoint.save(numbered(number), kept).wait()
    generations = sorted(path.name for path in kept.iterdir())
    assert [name[:8] for name in generations] == ["00000003", "00000004"]
    files = sorted(path.name for path in (kept / generations[1]).iterdir())
    assert files == [".metadata", "__0_0.distcp", "manifest-0.json"]


def test_a_new_process_that_loads_nothing_removes_nothing_until_it_has_saved(kept: Path) -> None:
    checkpoint.save(numbered(1), kept).wait()
    checkpoint._folders.clear()
    checkpoint.save(numbered(2), kept).wait()
    assert len(list(kept.iterdir())) == 2
    assert loaded(kept)[0] == 2


def test_saves_run_beside_training(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second save waits for the first, and both write the values at their call."""
    goes, write = threading.Event(), checkpoint._write_file

    def slow(path: Path, fill: Any) -> str:
        assert goes.wait(60)
        return write(path, fill)

    monkeypatch.setattr(checkpoint, "_write_file", slow)
    state = numbered(1)
    first = checkpoint.save(state, kept)
    state["weights"]["first"].zero_()
    assert loaded(kept)[0] == 0
    threading.Timer(0.2, goes.set).start()
    second = checkpoint.save(numbered(2), kept)
    assert loaded(kept)[0] in (1, 2)  # and the values of 1 are those from before zero_()
    second.wait()
    first.wait()
    shutil.rmtree(max(kept.iterdir()))
    assert loaded(kept)[0] == 1


# -- which generation is known to be whole -------------------------------------------------------------------


@contextmanager
def a_disk_that_has_just_filled() -> Iterator[None]:
    with mock.patch.object(checkpoint, "_write_file", side_effect=OSError(28, "No space left on device")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield


def fails_to_save(number: int, folder: Path) -> None:
    with a_disk_that_has_just_filled(), pytest.raises(CommError, match="No space left"):
        checkpoint.save(numbered(number), folder).wait()


def test_one_folder_with_two_names(kept: Path, tmp_path: Path) -> None:
    """What was known under the first name was long gone, and everything that was whole was removed for it."""
    kept.mkdir()
    (tmp_path / "link").symlink_to(kept)
    for number, name in enumerate(("kept", "link", "x/../kept"), 1):
        checkpoint.save(numbered(number), tmp_path / name).wait()
    fails_to_save(4, kept)
    assert loaded(kept)[0] == 3


def test_what_another_process_has_saved_is_not_removed(kept: Path) -> None:
    checkpoint.save(numbered(1), kept).wait()
    for number in (2, 3):
        with alone():
            assert checkpoint.load({}, kept) is not None
            checkpoint.save(numbered(number), kept).wait()
    fails_to_save(4, kept)
    assert loaded(kept)[0] == 3
    for number in (5, 6):
        checkpoint.save(numbered(number), kept).wait()
    assert loaded(kept)[0] == 6 and len(list(kept.iterdir())) == 2


def test_a_save_of_an_earlier_job_is_not_known_to_be_whole(kept: Path) -> None:
    """A rank may have been lost before it had written: then the generation before must stay."""
    for number in (1, 2):
        saving = checkpoint.save(numbered(number), kept)
    with mock.patch.object(checkpoint, "epoch", lambda: saving._job + 1):  # after shutdown() and init()
        saving._thread.join()
        (kept / saving.name / "manifest-0.json").unlink()
        fails_to_save(3, kept)
        assert loaded(kept)[0] == 1
        for number in (4, 5):
            checkpoint.save(numbered(number), kept).wait()
        assert loaded(kept)[0] == 5 and len(list(kept.iterdir())) == 2


def test_saves_of_which_none_has_ended_are_none(kept: Path) -> None:
    for number in (1, 2):
        fails_to_save(number, kept)
    assert loaded(kept)[0] == 0 and not checkpoint.is_saved(kept)


def test_a_file_is_no_folder(kept: Path) -> None:
    kept.mkdir()
    (kept / "00000007-01234567").write_text("")  # nor a generation
    checkpoint.save(numbered(1), kept).wait()
    assert loaded(kept)[0] == 1
    shutil.rmtree(kept)
    kept.write_text("")
    for act in (lambda: checkpoint.load({}, kept), lambda: checkpoint.save(numbered(1), kept)):
        with pytest.raises(CommError, match=f"^rank 0: {kept} is a file and not a folder"):
            act()


# -- kinds of values -----------------------------------------------------------------------------------------


class Migrating(nn.Linear):
    """Its states before version 2 had other units."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, local: Any, *more: Any) -> None:
        if local.get("version", 1) < 2:
            state[prefix + "weight"] = 100 * state[prefix + "weight"]
        super()._load_from_state_dict(state, prefix, local, *more)


def test_modules_get_back_their_versions(kept: Path) -> None:
    model, again = nn.Sequential(Migrating(2, 2)), nn.Sequential(Migrating(2, 2))
    checkpoint.save({"model": model}, kept).wait()
    checkpoint.load({"model": again}, kept)
    assert_equal(dict(again.state_dict()), dict(model.state_dict()))


def test_dictionaries_get_back_their_kinds(kept: Path) -> None:
    values = {
        "counts": Counter("aab"),
        "ordered": OrderedDict(a=torch.ones(2), b=OrderedDict(c=1)),
        "x": {1: 2},
    }
    schedule = torch.optim.lr_scheduler.MultiStepLR(made(1)[1], [3, 5])
    checkpoint.save({**values, "schedule": schedule}, kept).wait()
    found = checkpoint.load({"schedule": schedule}, kept)
    assert found is not None and repr(found) == repr(values)
    assert schedule.milestones == Counter([3, 5]) and type(schedule.milestones) is Counter


# -- damage --------------------------------------------------------------------------------------------------


def test_flipped_bits_and_zeroed_pages_never_load(tmp_path: Path) -> None:
    outcomes = checkpoints.damage(tmp_path, 300, seed=5)
    assert outcomes["__0_0.distcp: state 1 loaded"] > 100 and outcomes["manifest-0.json: state 1 loaded"] > 30


def test_kills_leave_a_whole_generation(tmp_path: Path) -> None:
    checkpoints.kills(tmp_path / "kept", 25, seed=6)


def test_power_cuts_leave_a_whole_generation(tmp_path: Path) -> None:
    outcomes = checkpoints.cuts(tmp_path, 150, seed=7)
    assert min(outcomes.values()) > 5 and len(outcomes) == 2


def test_power_cuts_are_noticed_where_nothing_is_synced(tmp_path: Path) -> None:
    with pytest.raises((AssertionError, CommError)):
        checkpoints.cuts(tmp_path, 150, seed=7, syncs=False)


def two_generations(folder: Path) -> tuple[Path, Path]:
    for number in (1, 2):
        checkpoint.save(numbered(number), folder).wait()
    older, newer = sorted(folder.iterdir())
    return older, newer


def test_a_generation_that_is_not_whole_is_passed_over(kept: Path) -> None:
    older, newer = two_generations(kept)
    (newer / "manifest-0.json").unlink()
    reason = f"{newer} has no manifest-0.json: that rank's save did not end, or the file is lost"
    assert loaded(kept) == (1, [f"generation {older.name} is loaded: {reason}"])
    # The next save takes the number of the broken one, which goes.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoint.load({}, kept)
    checkpoint.save(numbered(3), kept).wait()
    assert [path.name[:8] for path in sorted(kept.iterdir())] == [
        "00000001",
        "00000002",
    ] and not newer.exists()
    assert loaded(kept)[0] == 3


def test_nothing_starts_anew_where_something_was_saved(kept: Path) -> None:
    older, newer = two_generations(kept)
    shutil.rmtree(older)
    (newer / "__0_0.distcp").unlink()
    with pytest.raises(
        CommError, match=r"no generation .* is whole: .*__0_0.distcp cannot be read: No such file"
    ):
        loaded(kept)
    (newer / "manifest-0.json").unlink()
    with pytest.raises(CommError, match=r"has no manifest-0.json: .* or choose another one"):
        loaded(kept)
    assert checkpoint.is_saved(kept)


def test_a_first_save_that_did_not_end_is_none(kept: Path) -> None:
    assert loaded(kept)[0] == 0 and not checkpoint.is_saved(kept)
    for _ in range(2):
        with alone():
            assert checkpoint.load({}, kept) is None
            saving = checkpoint.save(numbered(1), kept)
            saving.wait()
        for name in ("manifest-0.json", "whole"):
            (kept / saving.name / name).unlink()
    assert [path.name[:8] for path in kept.iterdir()] == ["00000001"] * 2
    assert loaded(kept)[0] == 0 and not checkpoint.is_saved(kept)


@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_first_save_of_which_files_are_lost_is_an_error(kept: Path, is_loaded: bool) -> None:
    """It looked like a first save that did not end, and training silently began at 0."""
    (kept / "00000001-ffffffff").mkdir(parents=True)  # did not end; sorts after the one that does
    saving = checkpoint.save(numbered(1), kept)
    saving._thread.join()
    if is_loaded:  # the process that saved was killed before it knew that all had written
        assert loaded(kept)[0] == 1
    else:
        saving.wait()
    (kept / saving.name / "manifest-0.json").unlink()
    lost = r"has no manifest-0.json: .* or the file is lost; a save into it had ended: .* delete the folder"
    with pytest.raises(CheckpointError, match=lost):
        loaded(kept)
    assert checkpoint.is_saved(kept)
    shutil.rmtree(kept)
    assert loaded(kept)[0] == 0


def test_a_manifest_of_another_generation_is_refused(kept: Path) -> None:
    older, newer = two_generations(kept)
    shutil.copy(older / "manifest-0.json", newer)
    number, (said,) = loaded(kept)
    assert number == 1 and "must be of" in said and older.name in said


class Command:
    def __reduce__(self) -> Any:
        return os.system, ("touch executed",)


def test_code_in_a_file_is_not_run(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever can write files can write their checksums."""
    checkpoint.save({"epoch": 1}, kept).wait()
    monkeypatch.chdir(kept.parent)
    (generation,) = kept.iterdir()
    part, manifest = generation / "__0_0.distcp", generation / "manifest-0.json"
    item = checkpoint.io.BytesIO()
    torch.save(Command(), item)
    told = checkpoint._manifest(manifest, 0)
    assert isinstance(told, dict)
    told["items"]["epoch"] = (part.stat().st_size, len(item.getvalue()))
    data = part.read_bytes() + item.getvalue()
    part.write_bytes(data)
    told["files"][part.name] = hashlib.sha256(data).hexdigest()
    checkpoints.sign(manifest, told)
    with pytest.raises(CheckpointError, match=f"rank 0 cannot load epoch of {part}: Unpickling(?s:.*)system"):
        loaded(kept)
    assert not Path("executed").exists()


@pytest.mark.parametrize(
    ("keys", "value", "rule"),
    [
        (["ranks"], 10**12, "has no manifest-1.json"),
        (["ranks"], 10**30, "JSON .*has 31 digits"),
        (["ranks"], True, "'ranks' must be a whole number above 0, got True"),
        (["ranks"], 0, "'ranks' must be a whole number above 0, got 0"),
        (["rank"], [[]], r"must be of .* and is of .*\[\[\]\]"),
        (["files"], [], r"'files' must give the SHA-256 of __0_0.distcp, got \[\]"),
        (["files", "__0_0.distcp"], 7, "'files' must give the SHA-256 of __0_0.distcp"),
        (["items"], {}, "'items' must be an object, on rank 0 with 'commsched.structure', got {}"),
        (["items", "number"], [0, float("nan")], r"'items' must give 'number' an offset .*, got \[0, nan\]"),
        (["items", "number"], [-1, 2], r"'items' must give 'number' an offset and a length in bytes, got"),
        (["items", "number"], [10**15, 2], "rank 0 cannot load number of .*__0_0.distcp: "),
        (["items", "other"], None, "'items' must give 'other' an offset"),
        (["more"], "deep", "more than 32 lists and objects within each other"),
    ],
)
def test_a_manifest_that_breaks_a_rule_is_refused(kept: Path, keys: list[str], value: Any, rule: str) -> None:
    """A number of ranks filled the memory, and wrong types were raw errors."""
    checkpoint.save(numbered(1), kept).wait()
    (path,) = kept.glob("*/manifest-0.json")
    told: Any = checkpoint._manifest(path, 0)
    inner = told
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    if value == "deep":
        for _ in range(40):
            inner["more"] = [inner["more"]]
    checkpoints.sign(path, told)
    with fuzz._guarded(), pytest.raises(CheckpointError, match=rule) as raised:
        loaded(kept)
    assert str(path.parent) in str(raised.value)


def test_a_manifest_that_is_no_object_or_lacks_an_item_is_refused(kept: Path) -> None:
    checkpoint.save(numbered(1), kept).wait()
    (path,) = kept.glob("*/manifest-0.json")
    told: Any = checkpoint._manifest(path, 0)
    del told["items"]["number"]
    checkpoints.sign(path, told)
    with pytest.raises(CheckpointError, match="no manifest tells where 'number' lies"):
        loaded(kept)
    checkpoints.sign(path, [told])
    with pytest.raises(CheckpointError, match=f"{path} must be a JSON object, got "):
        loaded(kept)


# -- what cannot be saved, and disks that cannot take it -----------------------------------------------------


class Unknown:
    pass


def test_a_value_that_could_not_be_loaded_is_refused(kept: Path) -> None:
    with pytest.raises(ValueError, match=r"stuff cannot be saved: .* refuses .*Unknown;"):
        checkpoint.save({"stuff": Unknown()}, kept)
    with pytest.raises(ValueError, match="a.b is twice"):
        checkpoint.save({"a": {"b": 1}, "a.b": 2}, kept)
    assert not kept.exists()
    with torch.serialization.safe_globals([Unknown]):
        checkpoint.save({"stuff": Unknown()}, kept).wait()
        found = checkpoint.load({}, kept)
    assert found is not None and isinstance(found["stuff"], Unknown)


def test_a_name_that_was_not_saved(kept: Path) -> None:
    checkpoint.save({"epoch": 1}, kept).wait()
    with pytest.raises(CheckpointError, match="rank 0 cannot load 'model' of .*: only 'epoch' is there"):
        checkpoint.load({"model": nn.Linear(1, 1)}, kept)


class Own:
    """Of which each rank has a state."""

    def checkpoint(self) -> int:
        return 1

    def resume(self, state: int) -> None:
        raise AssertionError("something was loaded")


@pytest.mark.parametrize(
    ("saved", "wanted", "reason"),
    [
        ({"stage": Own(), "epoch": 1}, {"model": nn.Linear(1, 1)}, "only 'epoch', 'stage' is there"),
        ({"stage": Own(), "epoch": 1}, {"pipeline": Own()}, "only 'epoch', 'stage' is there"),
        (
            {"stage": Own()},
            {"stage": nn.Linear(1, 1)},
            "it is a state of each rank there, and the object here needs one value of all ranks",
        ),
        (
            {"epoch": 1},
            {"epoch": Own()},
            "it is one value of all ranks there, and the object here needs a state of each rank",
        ),
        ({}, {"epoch": Own()}, "only nothing is there"),
    ],
)
def test_what_is_there_instead_of_a_state(
    kept: Path, saved: dict[str, Any], wanted: dict[str, Any], reason: str
) -> None:
    checkpoint.save(saved, kept).wait()
    (name,) = wanted
    with pytest.raises(CheckpointError, match=f"rank 0 cannot load '{name}' of .*: {reason}; nothing"):
        checkpoint.load(wanted, kept)


class Growing(nn.Linear):
    """Takes weights of fewer rows."""

    def _load_from_state_dict(self, state: Any, prefix: str, *more: Any) -> None:
        for name in ("weight", "bias"):
            tensor = state[prefix + name]
            state[prefix + name] = torch.cat([tensor, tensor])
        super()._load_from_state_dict(state, prefix, *more)


def test_a_state_that_does_not_fit_leaves_all_objects_as_they_were(kept: Path) -> None:
    """The model was loaded, and then its optimizer refused; or the first layers were, and not the last."""
    sizes = (5, 7, 3)
    saved = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    checkpoint.save({"model": saved, "optimizer": torch.optim.Adam(saved.parameters())}, kept).wait()

    def refuses(said: str, change: str, sizes: tuple[int, ...] = sizes) -> None:
        layers = [nn.Linear(*sizes[:2]), nn.BatchNorm1d(sizes[1]), nn.Linear(*sizes[1:])]
        model = nn.Sequential(*layers[: 1 if change == "fewer layers" else 3])
        parameters = list(model.parameters())[: -1 if change == "fewer parameters" else None]
        optimizer = torch.optim.Adam(parameters)
        before = checkpoint.io.BytesIO()
        torch.save(model.state_dict(), before)
        with pytest.raises(CheckpointError, match=f"^rank 0 cannot load '{said}; nothing is loaded"):
            checkpoint.load({"model": model, "optimizer": optimizer}, kept)
        before.seek(0)
        assert_equal(dict(model.state_dict()), dict(torch.load(before)))

    refuses(
        r"optimizer' of .*: its groups have \[5\] parameters here, \[6\] in the checkpoint",
        "fewer parameters",
    )
    refuses(
        r"model' of .*: 2.weight is of shape \(4, 7\) here, of shape \(3, 7\) in the checkpoint",
        "",
        (5, 7, 4),
    )
    refuses(r"model' of .*: 1.weight is nothing here, of shape \(7,\) in the checkpoint.*", "fewer layers")
    larger = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), Growing(7, 6))
    assert checkpoint.load({"model": larger}, kept) is not None
    assert torch.equal(larger[2].bias, torch.cat([saved[2].bias] * 2))


class History(nn.Linear):
    """Remembers as much as it has seen, and nothing at first."""

    seen: torch.Tensor | None = None

    def get_extra_state(self) -> torch.Tensor | None:
        return self.seen

    def set_extra_state(self, state: torch.Tensor | None) -> None:
        self.seen = state


def test_a_state_that_torch_takes_is_taken_though_sizes_differ(kept: Path) -> None:
    saved, history = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7)), History(2, 2)
    history.seen = torch.arange(3)
    old = {name: value for name, value in saved.state_dict().items() if value.is_floating_point()}
    checkpoint.save({"history": history, "part": saved[0], "old": old}, kept).wait()
    found, whole, model = History(2, 2), nn.Linear(5, 7), nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7))
    whole.extra = nn.Linear(1, 1)
    whole.load_state_dict = partial(whole.load_state_dict, strict=False)
    checkpoint.load({"history": found, "part": whole, "old": model}, kept)
    assert found.seen is not None and torch.equal(found.seen, history.seen)
    assert torch.equal(whole.weight, saved[0].weight) and torch.equal(model[0].weight, saved[0].weight)


class FullDisk(RecordedOs):
    """Takes a number of bytes."""

    left = 20_000

    def write(self, opened: int, data: memoryview) -> int:
        if not self.left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = super().write(opened, data[: self.left])
        self.left -= count
        return count


def test_a_full_disk_is_named_at_the_next_call(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(numbered(1), kept).wait()
    monkeypatch.setattr(checkpoint, "os", FullDisk())
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        saving = checkpoint.save(numbered(2), kept)
        part = kept / saving.name / "__0_0.distcp"
        with pytest.raises(CommError) as raised:
            checkpoint.save(numbered(3), kept)
    assert f"rank 0 cannot write {part}: No space left on device; the disk mounted at /" in str(raised.value)
    assert "known to be whole: 00000001-" in str(raised.value) and not list(part.parent.iterdir())
    monkeypatch.undo()
    assert loaded(kept)[0] == 1
    checkpoint.save(numbered(3), kept).wait()
    assert loaded(kept)[0] == 3 and not part.parent.exists()


def test_a_folder_that_cannot_be_read_is_named(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank raised this before it had met the others, which waited for it; see tests/dist, too."""
    checkpoint.save(numbered(1), kept).wait()
    recorded, told = RecordedOs(), list[Any]()
    monkeypatch.setattr(checkpoint, "os", recorded)
    monkeypatch.setattr(checkpoint, "allgather_object", lambda value, name: told.append(value) or [value])
    for number, refused in ((errno.EACCES, kept), (errno.EIO, max(kept.iterdir()))):
        recorded.refused = {str(refused): number}
        for act in (lambda: checkpoint.load({}, kept), lambda: checkpoint.is_saved(kept)):
            told.clear()
            with pytest.raises(CheckpointError) as raised:
                act()
            assert str(raised.value).startswith(f"rank 0 cannot read {refused}: {os.strerror(number)}")
            assert told[-1][0], "the other ranks are not told"


def test_a_disk_that_cannot_be_asked_for_its_bytes(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fails = mock.Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO)))
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", fails)
    with a_disk_that_has_just_filled(), pytest.raises(CheckpointError) as raised:
        checkpoint.save(numbered(1), kept).wait()
    assert "rank 0 cannot write" in str(raised.value) and "cannot be read: Input/output" in str(raised.value)


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40k", "none", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        with alone(), warnings.catch_warnings(record=True), pytest.raises(CommError) as raised:
            checkpoint.save({"tensor": torch.rand(1000)}, disk / "kept").wait()
            checkpoint.save(numbered(2), disk / "kept").wait()
        assert f"No space left on device; the disk mounted at {disk} has " in str(raised.value)
        assert " of 40,960 bytes free" in str(raised.value)
        with alone(), warnings.catch_warnings(record=True):
            assert list(checkpoint.load({}, disk / "kept") or ()) == ["tensor"]
    finally:
        subprocess.run(["umount", disk], check=True)


def test_states_differ_by_their_number() -> None:
    assert same(numbered(3), 3) and not same({**numbered(3), "weights": numbered(4)["weights"]}, 3)
