"""``checkpoints.py first|again FOLDER``: train and save, or load and go on, with both kinds of optimizer.

Prints a hash of model and optimizer for each ``gather``. Rank 0 alone has data, and gradients are summed, so
that every number of ranks has the same gradients to the bit; no shard ends within a vector register.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils._pytree import tree_leaves

import commsched
from commsched import checkpoint
from commsched.errors import CheckpointError, CommError
from tests.support.checkpoints import RecordedOs

GATHERS = ("gradients", "parameters")


def made(gather: str, seed: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(*sizes, bias=False) for sizes in ((64, 48), (48, 64), (64, 48))))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, commsched.DistributedOptimizer(
        optimizer, model.named_parameters(), op=commsched.Sum, gather=gather, schedule="dear", bucket_mb=0.013
    )


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for number in steps:
        inputs = torch.randn(4, 64, generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        (model(inputs).square().mean() * (commsched.rank() == 0)).backward()
        optimizer.step()


def hashed(model: nn.Module, optimizer: Any) -> str:
    state = optimizer.state_dict()
    steps = [float(each["step"]) for each in state["state"].values()]
    assert len(steps) == 3 and set(steps) == {8.0}, steps
    leaves = tree_leaves([dict(model.state_dict()), state["state"]])
    return hashlib.sha256(b"".join(each.numpy().tobytes() for each in leaves)).hexdigest()


class Own:
    """A state of each rank's own."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def checkpoint(self) -> Any:
        return self.value if not callable(self.value) else self.value()

    def resume(self, value: Any) -> None:
        self.value = value


class Tensors(nn.Module):
    """Two tensors of one value, of which each of two ranks writes one."""

    def __init__(self, value: int) -> None:
        super().__init__()
        self.x, self.y = (nn.Parameter(torch.full((9,), float(value))) for _ in range(2))

    def values(self) -> set[float]:
        return {float(each.mean()) for each in self.parameters()}


def values_are_those_of_rank_0(folder: Path) -> None:
    """Tensors came from whichever rank had the least to write, and other ranks' values had to be alike."""
    rank = commsched.rank()
    values = {"t": torch.full((2,), float(rank)), "u": torch.full((3 + rank,), float(rank)), "n": rank}
    commsched.save({**values, "best": None if rank else {"loss": 0.5, "at": [torch.ones(1)]}}, folder).wait()
    found = commsched.load({}, folder)
    assert found is not None and found["t"].tolist() == [0.0] * 2 and found["u"].tolist() == [0.0] * 3
    assert found["n"] == 0 and found["best"] == {"loss": 0.5, "at": [torch.ones(1)]}


def buffers_are_those_of_rank_0(folder: Path) -> None:
    """A mean of rank 0 came beside a variance of rank 1: they have one size, and went to ranks in turn."""
    rank = commsched.rank()
    model = nn.Sequential(nn.BatchNorm1d(64), nn.Linear(64, 3))
    for buffer in model.buffers():
        buffer.fill_(rank + 1)
    commsched.save({"model": model}, folder).wait()
    assert commsched.load({"model": model}, folder) == {}
    assert {float(value) for buffer in model.buffers() for value in buffer.flatten()} == {1.0}


def shards_are_refused(folder: Path) -> None:
    """Rank 0's shard came to all ranks as if it were the whole tensor."""
    commsched.save({"epoch": 1}, folder).wait()
    model = fully_shard(nn.Linear(4, 2), mesh=init_device_mesh("cpu", (commsched.size(),)))
    with pytest.raises(
        ValueError, match=r"^model.weight cannot be saved: .* full_tensor\(\), or save it with torch"
    ):
        commsched.save({"model": model}, folder)
    assert commsched.load({}, folder) == {"epoch": 1}
    flat = FullyShardedDataParallel(nn.Linear(4, 2), device_id=torch.device("cpu"))
    with pytest.raises(
        ValueError, match=r"^optimizer cannot be saved: .* save FullyShardedDataParallel.optim_s"
    ):
        commsched.save({"optimizer": torch.optim.Adam(flat.parameters())}, folder)


def first(folder: Path) -> None:
    for gather in GATHERS:
        model, optimizer = made(gather, 1)
        train(model, optimizer, range(8))
        print(gather, hashed(model, optimizer))
        optimizer.close()
        model, optimizer = made(gather, 1)
        train(model, optimizer, range(4))
        state = {
            "model": model,
            "optimizer": optimizer,
            "steps": 4,
            "own": Own([commsched.rank(), torch.ones(2)]),
        }
        saving = commsched.save(state, folder / gather)
        train(model, optimizer, range(4, 8))  # while it is written
        saving.wait()
        optimizer.close()
    checks = (
        own_states,
        other_items,
        values_are_those_of_rank_0,
        buffers_are_those_of_rank_0,
        shards_are_refused,
    )
    hosts = (folders_of_their_own, a_lost_host)
    unreadable = (
        a_folder_that_rank_1_cannot_read,
        an_own_state_that_rank_1_cannot_read,
        a_name_that_rank_1_alone_asks_for,
    )
    for check in (*checks, a_rank_that_fails, a_damaged_part, *hosts, *unreadable):
        check(folder / check.__name__)
        print(check.__name__, "is right")


def again(folder: Path) -> None:
    for gather in GATHERS:
        model, optimizer = made(gather, 2)
        found = commsched.load({"model": model, "optimizer": optimizer}, folder / gather)
        assert found == {"steps": 4}, found
        train(model, optimizer, range(4, 8))
        print(gather, hashed(model, optimizer))
        optimizer.close()
        said = f"'own' of .*: each of 2 ranks has a state there, and this job has {commsched.size()};"
        with pytest.raises(CheckpointError, match=said):
            commsched.load({"own": Own(None)}, folder / gather)


def own_states(folder: Path) -> None:
    commsched.save({"own": Own({"rank": commsched.rank()})}, folder).wait()
    own = Own(None)
    assert commsched.load({"own": own}, folder) == {} and own.value == {"rank": commsched.rank()}


def other_items(folder: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"rank 0 has x.weight .*\(2, 1\) where rank 1 has x.weight .*\(3, 1\)"
    ):
        commsched.save({"x": nn.Linear(1, 2 + commsched.rank())}, folder)
    with pytest.raises(ValueError, match=r"rank 0 has \['x0'\], rank 1 \['x1'\]"):
        commsched.save({f"x{commsched.rank()}": 0}, folder)
    assert commsched.load({}, folder) is None


def a_rank_that_fails(folder: Path) -> None:
    def fail() -> None:
        raise RuntimeError("no state")

    def lose() -> None:
        raise CommError("rank 7 is lost")

    for act, of, kind, said in (
        (fail, RuntimeError, CheckpointError, "no state"),
        (lose, CommError, CommError, "rank 7 is lost"),
    ):
        with pytest.raises(of if commsched.rank() == 1 else kind, match=said) as raised:
            commsched.save({"own": Own(act if commsched.rank() == 1 else 0)}, folder)
        assert commsched.rank() == 1 or (type(raised.value) is kind and "rank 1" in str(raised.value))
    commsched.save({"epoch": 1}, folder).wait()
    written = checkpoint._write_file
    if commsched.rank() == 1:
        checkpoint._write_file = lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))  # type: ignore[assignment]
    saving = commsched.save({"epoch": 2}, folder)
    with pytest.raises(
        CheckpointError, match=r"is not saved: .*: rank 1 cannot write .*__1_0.distcp: No space left on de"
    ):
        saving.wait()
    checkpoint._write_file = written  # type: ignore[assignment]
    assert quietly(lambda: commsched.load({}, folder)) == {"epoch": 1}


def a_damaged_part(folder: Path) -> None:
    """Of two ranks' parts, the second one's: both ranks go back, and say why on rank 0."""
    for number in (1, 2):
        commsched.save({"tensors": Tensors(number)}, folder).wait()
    part = max(folder.iterdir()) / "__1_0.distcp"
    if commsched.rank() == 0:
        part.write_bytes(part.read_bytes()[:-1])
    commsched.barrier()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = Tensors(0)
        commsched.load({"tensors": found}, folder)
    assert found.values() == {1.0}
    said = [str(each.message) for each in warned]
    assert len(said) == (commsched.rank() == 0) and all(f"{part} is damaged" in each for each in said), said


def folders_of_their_own(folder: Path) -> None:
    """Of machines that share none: parts are sent, and an empty folder on rank 0 stops all ranks."""
    mine = folder / str(commsched.rank())
    for number in (1, 2):
        commsched.save({"tensors": Tensors(number)}, mine).wait()
    assert {path.name for path in max(mine.iterdir()).glob("__*")} == {f"__{commsched.rank()}_0.distcp"}
    found = Tensors(0)
    commsched.load({"tensors": found}, mine)
    assert found.values() == {2.0}
    before = sorted(mine.rglob("*"))
    if commsched.rank() == 0:
        shutil.rmtree(mine)
    with pytest.raises(CheckpointError, match=r"no generation .* is whole: .* has no manifest-0.json"):
        commsched.load({}, mine)
    assert commsched.rank() == 0 or sorted(mine.rglob("*")) == before


def a_lost_host(folder: Path) -> None:
    """A first save whose rank 0 has lost its disk: rank 1's manifest looked like a save that did not end."""
    mine = folder / str(commsched.rank())
    commsched.save({"epoch": 1}, mine).wait()
    if commsched.rank() == 0:
        shutil.rmtree(mine)
    with pytest.raises(CheckpointError, match=r"has no manifest-0.json: .*; a save into it had ended"):
        commsched.load({}, mine)


def a_folder_that_rank_1_cannot_read(folder: Path) -> None:
    """Rank 1 raised alone, and rank 0 waited for it."""
    commsched.save({"epoch": 1}, folder).wait()
    if commsched.rank() == 1:
        checkpoint.os = recorded = RecordedOs()  # type: ignore[attr-defined]
        recorded.refused = {str(folder.resolve()): errno.EACCES}
    for act in (lambda: commsched.load({}, folder), lambda: commsched.save({"epoch": 2}, folder)):
        with pytest.raises(
            CheckpointError, match=f"^rank 1 cannot read {folder.resolve()}: Permission denied"
        ):
            act()
    checkpoint.os = os  # type: ignore[attr-defined]
    assert commsched.load({}, folder) == {"epoch": 1}


def an_own_state_that_rank_1_cannot_read(folder: Path) -> None:
    """Only rank 1 reads it: rank 1 raised alone."""
    with torch.serialization.safe_globals([Unknown] if commsched.rank() == 1 else []):
        commsched.save({"own": Own(Unknown() if commsched.rank() == 1 else 0)}, folder).wait()
    with pytest.raises(
        CheckpointError, match=r"^rank 1 cannot load rank-1.own of .*__1_0.distcp: Unpickling"
    ):
        commsched.load({"own": Own(None)}, folder)


def a_name_that_rank_1_alone_asks_for(folder: Path) -> None:
    """Rank 1 raised alone, and rank 0 had loaded, and trained on without it."""
    commsched.save({"saved": Tensors(1)}, folder).wait()
    found = Tensors(0)
    state = {"saved": found} if commsched.rank() == 0 else {"saved": found, "other": Tensors(0)}
    said = "^rank 1 cannot load 'other' of .*: only 'saved' is there; nothing is loaded"
    with pytest.raises(CheckpointError, match=said):
        commsched.load(state, folder)
    assert found.values() == {0.0}


class Unknown:
    pass


def quietly(act: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return act()


if __name__ == "__main__":
    torch.set_num_threads(1)
    commsched.init()
    {"first": first, "again": again}[sys.argv[1]](Path(sys.argv[2]))
    commsched.shutdown()
