"""``save`` and ``load``: checkpoints of a whole job, written beside training, two generations in a folder.

    FOLDER/00000007-1f3a5c7e/    a generation: its number, and a mark that tells attempts to write it apart
        __0_0.distcp             rank 0's part: ``torch.save`` of one tensor or value after another
        __1_0.distcp             rank 1's part
        .metadata                for torch.distributed.checkpoint; written by rank 0, not read here: a pickle
        manifest-0.json          the SHA-256 of rank 0's files, and where in its part each item lies
        manifest-1.json          rank 1's; the first line is the SHA-256 of the rest
        whole                    an empty file, in a first generation alone: all ranks have written

[Note: when a generation is whole] Ranks communicate only in the thread that calls ``save``: they take the
state, share out its items and tell each other where each will lie. Then a thread of each rank writes, alone:

    part, .metadata -> fsync of each -> fsync of the folder -> manifest under another name, fsync -> rename

A generation is whole when all its ranks' manifests are there and every part is as its manifest says. A
manifest gets its name after its files are on the disk, so neither a crash nor a power cut leaves a manifest
without them. Parameters that ``step()`` has left pending come later
(``optimizer.snapshots``): their places in the part are known, and the thread begins when they are there.
At the next call here the ranks tell each other that all have written. Only then does that
generation count as the newest whole one, and the next save removes all others before it writes. Nothing is
removed where that is not known: in a new process that has not loaded, where ranks were lost since (those of
an earlier job may not have written), where that generation is gone, or where another process has written
after it.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import re
import secrets
import shutil
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from commsched.collectives.carrier import epoch
from commsched.collectives.job import rank, size
from commsched.collectives.operations import allgather_object, broadcast_object
from commsched.env import settings
from commsched.errors import CheckpointError, CommError
from commsched.optimizer.snapshots import Arrivals, Late, state_so_far
from scheduler.ir.inputs import LARGEST, InputError, parse_json

Items = dict[str, tuple[int, int]]
"""Offset and length of each item in the part of the rank that writes it."""
_FORMAT = 1
_STRUCTURE = "commsched.structure"
_NESTING = (dict, OrderedDict)  # other kinds of dictionaries, such as Counter, are items
_GENERATION = re.compile(r"\d{8}-[0-9a-f]{8}")
_MANIFEST = re.compile(r"manifest-(\d{1,9})\.json")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_CHUNK, _SMALL = 16 << 20, 64 << 10  # bytes: at most in one write; of pieces that are written together
_NICENESS = 10  # of the thread that writes: where it shares the processor with training, it takes idle time
_MARK = "whole"  # in a first generation: all ranks had written it
_SHOWN = 80  # characters of a wrong value in an error


def save(state: Mapping[str, Any], folder: str | os.PathLike[str]) -> Saving:
    """Copy the job's state, and write it into ``folder`` beside training. Every rank must call.

    ``state`` gives names to objects with ``state_dict()`` (models, optimizers, schedulers: where ranks may
    differ, as in buffers, rank 0's state is kept), to objects with ``checkpoint()`` and ``resume()``
    (pipelines: each rank has a state of its own), and to tensors and other values: rank 0's are kept, nobody
    looks at the others'. The call waits for the save before and raises its error. The ranks may share the
    folder, or each machine has its own. The two newest generations stay in it.
    """
    here, told = _settled(folder, (list(state), secrets.token_hex(4)))
    for other, (names, _) in enumerate(told):
        if names != told[0][0]:
            raise ValueError(
                f"save() needs the same names on every rank: rank 0 has {told[0][0]}, rank {other} {names}"
            )
    name, me, taken, failure = f"{here.number:08}-{told[0][1]}", rank(), _Taken(), None
    try:
        taken.take(state, me, size())
    except Exception as error:  # told to the other ranks, which would wait for this one
        failure = error
    said = "" if failure is None else f"{type(failure).__name__}: {failure}"
    is_lost = isinstance(failure, CommError) and not isinstance(failure, CheckpointError)
    told = allgather_object((said, is_lost, taken.digest, taken.items), "commsched.save.items")
    if failure is not None:
        raise failure
    failures = [f"rank {r} could not take its state: {each[0]}" for r, each in enumerate(told) if each[0]]
    if failures:
        # Another kind where a rank is lost: elastic jobs go on after that one alone.
        kind = CommError if any(each[1] for each in told) else CheckpointError
        raise kind(f"nothing is saved: {'; '.join(failures)}")
    for other, (*_, digest, _) in enumerate(told):
        if digest != told[0][2]:
            _raise_difference(taken.signature, other)
    others = {".metadata": _bytes(taken.metadata([items for *_, items in told]))} if me == 0 else {}
    manifest = {"format": _FORMAT, "generation": name, "rank": me, "ranks": size(), "items": taken.items}
    taken.forget()
    whole = here.whole
    here.known.add(name)

    def write() -> None:
        _write(here.path, whole, manifest, {_part(me): taken.write_to, **others})

    here.saving = Saving(here, name, write, taken.arrivals)
    return here.saving


def load(state: Mapping[str, Any], folder: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Load the newest whole generation in ``folder`` into the objects of ``state``. Every rank must call.

    Return the values that were saved beside these objects, or None where no save has ever ended. The number
    of ranks may differ from that of the save, except for objects of which each rank has a state of its own. A
    generation that is not whole is passed over with a warning that names file and reason. All is read with
    ``weights_only=True``.
    """
    here, _ = _settled(folder)
    seen, has_ended = _seen(here.path)
    reasons: list[str] = []
    for name in sorted(seen, reverse=True):
        values: dict[str, Any] = {}
        if not (reason := _fault(here.path / name, seen[name])):
            reason, values = _read(here.path / name, seen[name], state)
        if not reason:
            here.whole, here.known = name, set(seen)
            _mark(here.path / name)
            others = _put(values, state, here.path / name, seen[name])
            if reasons and rank() == 0:  # last: a warning may be an error, and the other ranks go on
                warnings.warn(f"generation {name} is loaded: {'; '.join(reasons)}", stacklevel=2)
            return others
        reasons.append(reason)
    if has_ended:
        raise CheckpointError(
            f"rank {rank()}: no generation in {here.path} is whole: {'; '.join(reasons)}; a save into it had"
            " ended: bring the files back; to start anew, delete the folder or choose another one"
        )
    here.whole = ""
    return None


def is_saved(folder: str | os.PathLike[str]) -> bool:
    """Return whether a save into ``folder`` has ever ended, as all ranks see it. Every rank must call."""
    return _seen(_settled(folder)[0].path)[1]


class Saving:
    """A save that a thread carries out, as ``save`` returns it, once all values have arrived."""

    def __init__(self, here: _Folder, name: str, write: Callable[[], None], arrivals: Arrivals) -> None:
        self.name, self._here, self._failure, self._job = name, here, "", epoch()
        self._thread = threading.Thread(target=self._run, args=(write,), name="commsched-checkpoint")
        self._arrivals = arrivals
        arrivals.when_whole(self._begin)

    def _begin(self) -> None:
        if threading.main_thread().is_alive():
            self._thread.start()
        else:  # the process ends, and waits for no thread any more
            self._thread.run()

    def _run(self, write: Callable[[], None]) -> None:
        if threading.current_thread() is self._thread:
            with suppress(OSError):
                present = os.getpriority(os.PRIO_PROCESS, 0)
                os.setpriority(os.PRIO_PROCESS, 0, min(19, present + _NICENESS))  # of this thread
        try:
            write()
        except BaseException as error:
            reason = str(error) if isinstance(error, CheckpointError) else repr(error)
            self._failure = f"{self.name}: {reason}"
            warnings.warn(f"a checkpoint is not saved: {self._failure}", stacklevel=1)

    def wait(self) -> None:
        """Return when every rank has written; ``CheckpointError`` if one could not. Every rank must call."""
        if self._here.saving is self:  # else a later call has waited
            _settled(self._here.path)

    def of_present_job(self) -> bool:
        """Return whether the ranks that write this are those of the job as it is now."""
        return self._job == epoch()

    def _join(self) -> str:
        """Wait for the thread; return why it has not written, or "". ``CommError`` where a rank is lost."""
        try:
            self._arrivals.complete()
        except CommError:
            raise
        except Exception as error:
            return f"{self.name}: rank {rank()}: {type(error).__name__}: {error}"
        if not self._arrivals.is_whole:
            why = f"{self.name}: rank {rank()} lacks parameters: their optimizer has ended before they came"
            return why if self.of_present_job() else ""  # else a rank was lost, and nothing is wrong here
        limit = settings().timeout
        if self._thread.ident is not None:  # else the process ends, and it has been written: see ``_begin``
            self._thread.join(limit)
        if self._thread.is_alive():
            return f"{self.name}: rank {rank()} has not written within {limit:g} s (COMMSCHED_TIMEOUT)"
        return self._failure


@dataclass
class _Folder:
    """``whole``: the newest generation that the ranks know to be whole, "" for none, None if unknown.
    ``number``: of the next generation. ``known``: those that this process has written or read.
    """

    path: Path
    number: int = 1
    whole: str | None = None
    known: set[str] = field(default_factory=set)
    saving: Saving | None = None

    def told_whole(self, name: str | None) -> str | None:
        """Return the generation if it is there, and nobody else has written after it; else None: unknown."""
        there = _generations(self.path)
        gone = bool(name) and name not in there
        return None if name is None or gone or any(each > name for each in set(there) - self.known) else name


_folders: dict[Path, _Folder] = {}


def _settled(folder: str | os.PathLike[str], said: Any = None) -> tuple[_Folder, list[Any]]:
    """End a save into the folder, if one is running; return what is known of it and what each rank said.

    Collective. A rank of a new process knows of no whole generation; then no rank does.
    """
    failures, newest, path = list[str](), 0, Path(folder)
    with _noted(failures, path):
        path = path.resolve()  # one folder may have several names
    here = _folders.setdefault(path, _Folder(path))
    saving, here.saving, whole = here.saving, None, here.whole
    if saving is not None:
        if reason := saving._join():
            failures.append(f"the checkpoint before is not saved: {reason}")
        whole = saving.name if saving.of_present_job() else None
    with _noted(failures, path):
        if path.exists() and not path.is_dir():
            failures.append(f"rank {rank()}: {path} is a file and not a folder")
        newest = max((int(name[:8]) for name in _generations(path)), default=0)
        whole = here.told_whole(whole)
    known = f"; the newest generation known to be whole: {here.whole or 'none'}"
    told = _agreed(failures, (whole, newest, said), "commsched.checkpoint", known)
    here.whole = told[0][0] if all(each[0] == told[0][0] for each in told) else None
    newest = max(each[1] for each in told)
    if here.whole is None and newest and not _seen(path)[1]:
        here.whole = ""
    if saving is not None and saving.of_present_job():
        _mark(path / saving.name)  # also where the folder has others' generations, and here.whole is unknown
    here.number = 1 + (newest if here.whole is None else int(here.whole[:8] or 0))
    return here, [each[2] for each in told]


@contextmanager
def _noted(failures: list[str], path: object) -> Iterator[None]:
    """Add what the block raises to ``failures``, for ``_agreed``: the other ranks wait there for this one."""
    try:
        yield
    except OSError as error:
        failures.append(f"rank {rank()} cannot read {error.filename or path}: {error.strerror or error}")
    except Exception as error:
        reason = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        failures.append(f"rank {rank()} cannot load {path}: {reason}")


def _agreed(failures: Sequence[str], value: Any, name: str, end: str = "") -> list[Any]:
    """Return every rank's value; if any rank has failures, all ranks raise all of them."""
    told = allgather_object(("; ".join(failures), value), name)
    if reasons := [each for each, _ in told if each]:
        raise CheckpointError("; ".join(reasons) + end)
    return [each for _, each in told]


def _generations(folder: Path) -> list[str]:
    names = os.listdir(folder) if folder.is_dir() else ()
    return [each for each in names if _GENERATION.fullmatch(each) and (folder / each).is_dir()]


def _part(writer: int) -> str:
    return f"__{writer}_0.distcp"


# -- taking the state: the copy of this rank's share is the content of its part ------------------------------


class _Taken:
    """A state as items under keys. Its structure is the state with keys in the place of the items."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}  # of rank 0 alone
        self.shared: dict[str, Any] = {}  # which all ranks have
        self.equal: set[str] = set()  # of these, the keys whose values are equal on all ranks
        self.paths: dict[str, tuple[str | int, ...]] = {}
        self.items, self.digest, self.end = Items(), "", 0  # of this rank's part
        self.copies: dict[str, Tensor | bytes] = {}  # of what it writes, in any order
        self.arrivals = Arrivals()  # of late values, by their keys, with what reads them there
        self.late: dict[str, tuple[Late, Callable[[Any], Tensor]]] = {}

    def take(self, state: Mapping[str, Any], me: int, ranks: int) -> None:
        structure, own = {}, {}
        classes: list[Any] = []
        for name, value in state.items():
            if _is_own(value):
                own[f"rank-{me}.{name}"] = value.checkpoint()
                classes += getattr(value, "checkpoint_classes", ())
            else:
                is_state = hasattr(value, "state_dict")
                if is_state or me == 0:
                    items = self.shared if is_state else self.values
                    nested = self._state_so_far(name, value) if is_state else value
                    structure[name] = self._flattened(nested, (name,), items)
                if isinstance(value, nn.Module):
                    names = (each for each, _ in value.named_parameters(remove_duplicate=False))
                    self.equal.update(f"{name}.{each}" for each in names)
                elif isinstance(value, torch.optim.Optimizer):
                    _refuse_shards(name, value)
                    self.equal.update(key for key in self.shared if self.paths[key][0] == name)
        if me == 0:
            self._add((_STRUCTURE,), structure, self.values)
        self.digest = hashlib.sha256("\n".join(self.signature).encode()).hexdigest()
        with torch.serialization.safe_globals(classes):
            for key, value in {**self._share(me, ranks), **self.values, **own}.items():
                self.items[key] = self.end, (length := self._place(key, value))
                self.end += length

    @property
    def signature(self) -> list[str]:
        """One line for each item that all ranks must have."""
        return [
            f"{key} {value.dtype} {tuple(value.shape)}"
            if _is_plain(value)
            else f"{key} {type(value).__name__}"
            for key, value in self.shared.items()
        ]

    def _state_so_far(self, name: str, value: Any) -> Any:
        """Return the value's state dict, with stand-ins for late tensors whose sizes are known."""
        state, every = state_so_far(value)
        for late in every:
            is_param = late.place is state
            for key in late.keys:
                path = f"{name}.{key}" if is_param else f"{name}.state.{key}"
                if is_param:
                    late.place[key] = _stand_in(late.before)
                    self.late[path] = late, lambda found: found
                elif _keeps_its_keys(value, late.before):
                    late.place[key] = {each: _stand_in(tensor) for each, tensor in late.before.items()}
                    self.late |= {f"{path}.{each}": (late, itemgetter(each)) for each in late.before}
                elif (found := late.wait()) is None:
                    del late.place[key]
                else:
                    late.place[key] = found
        return state

    def _flattened(self, value: Any, path: tuple[str | int, ...], items: dict[str, Any]) -> Any:
        """Add the items of nested dictionaries and lists; return the same nesting of keys.

        torch.distributed.checkpoint gives the same keys.
        """
        if type(value) in _NESTING:
            return _like(value, {k: self._flattened(v, (*path, str(k)), items) for k, v in value.items()})
        if _is_branch(value):
            return [self._flattened(each, (*path, place), items) for place, each in enumerate(value)]
        if any(isinstance(leaf, DTensor) for leaf in tree_leaves(value)):
            raise ValueError(
                f"{'.'.join(map(str, path))} cannot be saved: save() needs whole tensors, and this is a"
                " DTensor, of which each rank may hold another shard; save its full_tensor(), or save it"
                " with torch.distributed.checkpoint"
            )
        return self._add(path, value.detach() if isinstance(value, Tensor) else value, items)

    def _add(self, path: tuple[str | int, ...], value: Any, items: dict[str, Any]) -> str:
        key = ".".join(map(str, path))
        if key in self.paths or key.startswith("rank-"):
            raise ValueError(f"{key} is twice in the state, or begins with 'rank-'; give it another name")
        items[key], self.paths[key] = value, path
        return key

    def _share(self, me: int, ranks: int) -> dict[str, Any]:
        """Return what this rank writes. Each tensor of equal values goes to the rank with the fewest bytes.

        Rank 0 writes everything else. Buffers may differ between ranks, like running statistics in data
        parallelism: a mean of one rank beside a variance of another is a state that no rank had.
        """
        loads, mine = [0] * ranks, {}
        for key, value in self.shared.items():
            is_spread = key in self.equal and _is_plain(value)
            writer = min(range(ranks), key=loads.__getitem__) if is_spread else 0
            loads[writer] += value.nbytes if _is_plain(value) else 0
            if writer == me:
                mine[key] = value
        return mine

    def _place(self, key: str, value: Any) -> int:
        """Copy an item, now or when it arrives; return how many bytes it takes in this rank's part."""
        if _is_plain(value):
            if key in self.late:
                late, part = self.late[key]
                self.arrivals.take(late, lambda found: self._put(key, value, part(found)))
            else:
                self._put(key, value, value)
            return _length(value.dtype, tuple(value.shape), torch.empty_like(value, device="meta").stride())
        item = io.BytesIO()
        torch.save(value, item)
        item.seek(0)
        if refused := torch.serialization.get_unsafe_globals_in_checkpoint(item):
            raise ValueError(
                f"{key} cannot be saved: load() reads with weights_only=True, which refuses"
                f" {', '.join(refused)}; save numbers, strings, lists, dictionaries and tensors, or give"
                " these classes to torch.serialization.add_safe_globals() before save() and load()"
            )
        data = self.copies[key] = item.getvalue()
        return len(data)

    def _put(self, key: str, like: Tensor, value: Tensor) -> None:
        expected, actual = ((each.dtype, each.shape) for each in (like, value))
        if expected != actual:
            raise ValueError(f"{key} must still be {expected} after the update, and is {actual}")
        copy = torch.empty_like(like.detach(), device="cpu").copy_(value.detach())
        self.copies[key] = copy.requires_grad_(value.requires_grad)

    def forget(self) -> None:
        """Let the state go, whose tensors would count as memory in which user code reads parameters."""
        for each in (self.values, self.shared, self.late):
            each.clear()

    def write_to(self, sink: _Sink) -> None:
        """Write this rank's part, once everything has arrived; give the copies back."""
        for key, (start, length) in self.items.items():
            sink.take(self.copies.pop(key))
            assert sink.length == start + length, (
                f"{key} ends at {sink.length}, its place at {start + length}"
            )

    def metadata(self, told: Sequence[Items]) -> bytes:
        """Return the content of torch.distributed.checkpoint's ``.metadata``."""
        kinds: dict[str, Any] = {}
        places, paths, known = {}, dict(self.paths), self.shared | self.values
        for writer, items in enumerate(told):
            for key, (offset, length) in items.items():
                value, start = known.get(key), None
                kinds[key] = BytesStorageMetadata()
                if isinstance(value, Tensor) and _is_plain(value):
                    start = torch.Size([0] * value.dim())
                    chunks = [ChunkStorageMetadata(start, value.size())]
                    properties = TensorProperties.create_from_tensor(value)
                    kinds[key] = TensorStorageMetadata(properties, value.size(), chunks)
                paths.setdefault(key, tuple(key.split(".", 1)))
                places[MetadataIndex(key, start)] = _StorageInfo(_part(writer), offset, length)
        return pickle.dumps(Metadata(kinds, paths, places, StorageMeta(), CURRENT_DCP_VERSION))


def _like(nested: Any, content: Mapping[Any, Any]) -> Any:
    """Return this content as a dictionary of that kind; a model's has the versions of its modules."""
    made = type(nested)(content)
    if hasattr(nested, "_metadata"):
        made._metadata = nested._metadata
    return made


def _is_own(value: Any) -> bool:
    return hasattr(value, "checkpoint") and hasattr(value, "resume")


def _refuse_shards(name: str, optimizer: torch.optim.Optimizer) -> None:
    parameters = (each for group in optimizer.param_groups for each in group["params"])
    if any(getattr(each, "_fsdp_flattened", False) for each in parameters):
        raise ValueError(
            f"{name} cannot be saved: save() needs whole tensors, and its parameters are those of"
            " FullyShardedDataParallel, of which each rank holds another shard; save"
            " FullyShardedDataParallel.optim_state_dict(model, optimizer) with torch.distributed.checkpoint"
        )


def _is_plain(value: Any) -> bool:
    """Return whether torch.distributed.checkpoint stores a value as a tensor."""
    return type(value) is Tensor and value.layout is torch.strided and not value.is_quantized


def _stand_in(tensor: Tensor) -> Tensor:
    """Return a tensor without values of the size, type and strides that a copy would have. Does not wait."""
    strided = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return torch.empty_like(strided)


@cache
def _length(dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return how many bytes ``torch.save`` writes for a tensor: they do not depend on its values."""
    sink = _Sink(lambda data: None)
    sink.take(torch.empty_strided(shape, strides, dtype=dtype, device="cpu"))
    return sink.length


def _keeps_its_keys(optimizer: Any, state: Any) -> bool:
    """Return whether the coming update of a parameter changes values in its state only.

    torch's own optimizers make all of a parameter's state in its first update.
    """
    is_torchs = optimizer._base.__module__.startswith("torch.optim.")
    return is_torchs and bool(state) and all(map(_is_plain, state.values()))


def _is_branch(value: Any) -> bool:
    """Return whether torch.distributed.checkpoint stores the entries of a value, and not the whole of it."""
    return type(value) in _NESTING or (
        isinstance(value, list) and any(isinstance(each, Tensor) or _is_branch(each) for each in value)
    )


def _raise_difference(mine: list[str], other: int) -> None:
    told = allgather_object(mine, "commsched.save.signature")
    pairs = zip([*told[0], "nothing"], [*told[other], "nothing"])
    expected, actual = next(pair for pair in pairs if pair[0] != pair[1])
    raise CheckpointError(
        f"nothing is saved: rank 0 has {expected} where rank {other} has {actual}; make the same objects on"
        " every rank"
    )


# -- writing -------------------------------------------------------------------------------------------------


def _write(
    folder: Path,
    whole: str | None,
    manifest: Mapping[str, Any],
    files: Mapping[str, Callable[[_Sink], None]],
) -> None:
    """Remove all generations but ``whole``, if it is known; write this rank's files, the manifest last."""
    path = target = folder / manifest["generation"]
    last = target / f"manifest-{manifest['rank']}.json"
    try:
        for old in set(_generations(folder)) - {whole, target.name} if whole else ():
            _remove(folder / old)
        _make(target)
        sums = {}
        for name, fill in files.items():
            path = target / name
            sums[name] = _write_file(path, fill)
        _sync(target)
        body = json.dumps({**manifest, "files": sums}).encode()
        path = last.with_suffix(".unfinished")
        _write_file(path, _bytes(hashlib.sha256(body).hexdigest().encode() + b"\n" + body))
        os.replace(path, last)
        _sync(target)
    except OSError as error:
        full = _disk(folder)
        for name in (*files, path.name, last.name):
            with suppress(OSError):
                os.unlink(target / name)
        raise CheckpointError(
            f"rank {manifest['rank']} cannot write {error.filename or path}: {error.strerror}; {full}"
        ) from error


class _Sink:
    """Passes on what ``torch.save`` writes, without a copy, and counts it.

    An error waits until ``torch.save`` returns: torch calls ``write`` from C code, through which none may go.
    """

    def __init__(self, put: Callable[[memoryview], None]) -> None:
        self.length, self._put, self._error = 0, put, cast(BaseException | None, None)

    def take(self, item: bytes | Tensor) -> None:
        if isinstance(item, Tensor):
            torch.save(item, cast(IO[bytes], self))
        else:
            self.write(item)
        if self._error is not None:
            raise self._error

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        self.length += len(view)
        try:
            if self._error is None:
                self._put(view)
        except BaseException as error:
            self._error = error
        return len(view)

    def flush(self) -> None:
        pass


def _bytes(data: bytes) -> Callable[[_Sink], None]:
    return lambda sink: sink.take(data)


def _write_file(path: Path, fill: Callable[[_Sink], None]) -> str:
    """Write a file onto the disk; return the checksum of what was to be written."""
    digest, small = hashlib.sha256(), bytearray()
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)

    def put(data: memoryview) -> None:
        digest.update(data)
        if len(data) < _SMALL:
            small.extend(data)
        if max(len(small), len(data)) >= _SMALL:
            write(bytes(small))
            small.clear()
        if len(data) >= _SMALL:
            write(data)

    def write(data: bytes | memoryview) -> None:
        left = memoryview(data)
        while left:
            left = left[os.write(number, left[:_CHUNK]) :]

    try:
        fill(_Sink(put))
        write(bytes(small))
        os.fsync(number)
    finally:
        os.close(number)
    return digest.hexdigest()


def _sync(folder: Path) -> None:
    """Put the names in a folder on the disk."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _mark(generation: Path) -> None:
    """Note on the disk that every rank has written a first generation. A later number shows it by itself.

    Without the mark, a generation of which another rank's files are lost looks like a save that never ended.
    Errors are ignored: the next save meets them again, and a folder that is only read needs no mark.
    """
    with suppress(OSError):
        if int(generation.name[:8]) == 1 and generation.is_dir() and not (generation / _MARK).exists():
            _write_file(generation / _MARK, _bytes(b""))
            _sync(generation)


def _make(folder: Path) -> None:
    if not folder.is_dir():
        _make(folder.parent)
        with suppress(FileExistsError):  # another rank was faster
            os.mkdir(folder)
        _sync(folder.parent)


def _remove(generation: Path) -> None:
    """Remove a generation; other ranks may do so at the same time."""
    with suppress(FileNotFoundError):
        for name in os.listdir(generation):
            with suppress(FileNotFoundError):
                os.unlink(generation / name)
        with suppress(OSError):  # NFS keeps names of files that are still open; the next save comes back
            os.rmdir(generation)


def _disk(folder: Path) -> str:
    while not os.path.ismount(folder):
        folder = folder.parent
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        return f"the free bytes of the disk mounted at {folder} cannot be read: {error.strerror}"
    return f"the disk mounted at {folder} has {usage.free:,} of {usage.total:,} bytes free"


# -- reading -------------------------------------------------------------------------------------------------


def _seen(folder: Path) -> tuple[dict[str, dict[int, Any]], bool]:
    """Return each generation's manifests by rank, as all ranks together see them; whether a save ended.

    A text stands in the place of a damaged manifest.
    """
    failures, mine, is_marked = list[str](), dict[str, dict[int, Any]](), False
    with _noted(failures, folder):
        mine.update((name, {}) for name in _generations(folder))
        for path in (folder / name / each for name in mine for each in os.listdir(folder / name)):
            if match := _MANIFEST.fullmatch(path.name):
                mine[path.parent.name][int(match[1])] = _manifest(path, int(match[1]))
            is_marked |= path.name == _MARK
    seen: dict[str, dict[int, Any]] = {}
    told = _agreed(failures, (mine, is_marked), "commsched.load.manifests")
    for view, _ in told:
        for name, manifests in view.items():
            known = seen.setdefault(name, {})
            known |= {w: each for w, each in manifests.items() if not isinstance(known.get(w), dict)}
    return seen, _has_ended(seen) or any(each for _, each in told)


def _manifest(path: Path, writer: int) -> dict[str, Any] | str:
    """Return a manifest as ``save`` writes it, or which rule it breaks."""
    try:
        digest, _, body = path.read_bytes().partition(b"\n")
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    if hashlib.sha256(body).hexdigest().encode() != digest:
        return f"{path} is damaged: its first line is not the SHA-256 of the rest"
    try:
        manifest = parse_json(body, path)
    except InputError as error:
        return str(error)
    if not isinstance(manifest, dict):
        return f"{path} must be a JSON object, got {_shown(manifest)}"
    expected = {"format": _FORMAT, "generation": path.parent.name, "rank": writer}
    actual = {key: manifest.get(key) for key in expected}
    if actual != expected:
        return f"{path} must be of {expected} and is of {_shown(actual)}"
    if broken := _broken_rule(manifest, writer):
        return f"{path}: {broken}"
    return manifest


def _broken_rule(manifest: Mapping[str, Any], writer: int) -> str:
    """Return the first key of a manifest that is missing, of a wrong type or out of bounds, with the rule."""
    ranks, files, items = (manifest.get(key) for key in ("ranks", "files", "items"))
    if not _is_count(ranks, writer + 1):
        return f"'ranks' must be a whole number above {writer}, got {_shown(ranks)}"
    digest = files.get(_part(writer)) if isinstance(files, dict) else None
    if not (isinstance(digest, str) and _SHA256.fullmatch(digest)):
        return f"'files' must give the SHA-256 of {_part(writer)}, got {_shown(files)}"
    if not isinstance(items, dict) or (writer == 0 and _STRUCTURE not in items):
        return f"'items' must be an object, on rank 0 with {_STRUCTURE!r}, got {_shown(items)}"
    for key, place in items.items():
        if not (isinstance(place, list) and len(place) == 2 and all(map(_is_count, place))):
            return f"'items' must give {_shown(key)} an offset and a length in bytes, got {_shown(place)}"
    return ""


def _is_count(value: Any, least: int = 0) -> bool:
    return type(value) is int and least <= value <= LARGEST  # type(): a bool is an int, too


def _shown(value: Any) -> str:
    return f"{value!r:.{_SHOWN}}"


def _fault(generation: Path, manifests: Mapping[int, Any]) -> str:
    """Return why a generation is not whole as far as its manifests say, or ""."""
    for each in manifests.values():
        if isinstance(each, str):
            return each
    ranks = max((each["ranks"] for each in manifests.values()), default=1)
    missing = next((writer for writer in range(ranks) if writer not in manifests), None)
    if missing is None:
        return ""
    return f"{generation} has no manifest-{missing}.json: that rank's save did not end, or the file is lost"


def _has_ended(seen: Mapping[str, Mapping[int, Any]]) -> bool:
    """Return whether the manifests show that a save into the folder once ended.

    A later number tells that there was a whole generation, and a damaged manifest that its rank had written.
    """
    return any(
        int(name[:8]) > 1
        or not _fault(Path(name), manifests)
        or any(isinstance(each, str) for each in manifests.values())
        for name, manifests in seen.items()
    )


def _read(
    generation: Path, manifests: Mapping[int, Any], state: Mapping[str, Any]
) -> tuple[str, dict[str, Any]]:
    """Return why a part cannot be read or "", and the items: the shared ones, and this rank's of ``state``.

    A rank that cannot read a part gets it from the first rank that can.
    """
    own = {f"rank-{rank()}.{name}" for name, target in state.items() if _is_own(target)}
    classes = [each for target in state.values() for each in getattr(target, "checkpoint_classes", ())]
    failures, values = list[str](), dict[str, Any]()
    for writer in range(len(manifests)):
        data, fault = _checked(generation / _part(writer), manifests[writer]["files"][_part(writer)])
        faults = allgather_object(fault, "commsched.load.part")
        if all(faults):
            return faults[0], {}
        if any(faults):
            data = broadcast_object(data, faults.index(""), "commsched.load.data")
        for key, (offset, length) in manifests[writer]["items"].items():
            if key in own or not key.startswith("rank-"):
                where = f"{key[:_SHOWN]} of {generation / _part(writer)}"
                with _noted(failures, where), torch.serialization.safe_globals(classes):
                    item = io.BytesIO(memoryview(data)[offset : offset + length])
                    values[key] = torch.load(item, map_location="cpu", weights_only=True)
    _agreed(failures[:1], None, "commsched.load.items")  # of a model whose items all fail, one is enough
    return "", values


def _checked(path: Path, digest: str) -> tuple[bytes, str]:
    """Return a part's content, and why it is not as the manifest says or ""."""
    try:
        data = path.read_bytes()
    except OSError as error:
        return b"", f"{path} cannot be read: {error.strerror}"
    if (actual := hashlib.sha256(data).hexdigest()) != digest:
        what = f"the SHA-256 of its {len(data)} bytes must be {digest} and is {actual}"
        return b"", f"{path} is damaged: {what}"
    return data, ""


def _put(values: dict[str, Any], state: Mapping[str, Any], path: Path, manifests: Any) -> dict[str, Any]:
    """Give the objects their states; return the other values."""
    structure, own, ranks = values[_STRUCTURE], f"rank-{rank()}", len(manifests)
    writer = min(rank(), ranks - 1)
    start = f"rank-{writer}."
    owned = [key.removeprefix(start) for key in manifests[writer]["items"] if key.startswith(start)]
    kinds = "one value of all ranks", "a state of each rank"
    failures, rebuilt = list[str](), dict[str, Any]()
    with _noted(failures, path):
        rebuilt = {name: _rebuilt(nested, values) for name, nested in structure.items()}
        for name, target in state.items():
            is_own = _is_own(target)
            fits = name in (owned if is_own else structure)
            if fits and is_own and ranks != size():
                refusal = (
                    f"each of {ranks} ranks has a state there, and this job has {size()}; start {ranks} ranks"
                )
            elif fits:
                refusal = "" if is_own else _refusal(target, rebuilt[name])
            elif name in (*owned, *structure):
                refusal = f"it is {kinds[not is_own]} there, and the object here needs {kinds[is_own]}"
            else:
                refusal = f"only {', '.join(map(repr, (*structure, *owned))) or 'nothing'} is there"
            if refusal:
                failures.append(f"rank {rank()} cannot load {name!r} of {path}: {refusal}")
    _agreed(failures, None, "commsched.load.structure", "; nothing is loaded")
    for name, target in state.items():
        if _is_own(target):
            target.resume(values[f"{own}.{name}"])
        elif hasattr(target, "load_state_dict"):
            target.load_state_dict(rebuilt.pop(name))
    return rebuilt


def _refusal(target: Any, saved: Any) -> str:
    """Return why ``target.load_state_dict(saved)`` would fail, as far as sizes tell, or "".

    A module copies tensor by tensor and fails at the end: a model would be loaded in part, or without its
    optimizer. Objects with loaders or hooks of their own may take states of other sizes: they decide alone.
    """
    if "load_state_dict" in getattr(target, "__dict__", ()):
        return ""
    if isinstance(target, torch.optim.Optimizer):
        base = getattr(target, "_base", type(target))  # the class that a DistributedOptimizer wraps
        is_plain = base.load_state_dict is torch.optim.Optimizer.load_state_dict
        if not is_plain or target._optimizer_load_state_dict_pre_hooks:
            return ""
        groups = target.param_groups, saved["param_groups"]
        here, there = ([len(group["params"]) for group in each] for each in groups)
        return "" if here == there else f"its groups have {here} parameters here, {there} in the checkpoint"
    if not isinstance(target, nn.Module) or type(target).load_state_dict is not nn.Module.load_state_dict:
        return ""
    for module in target.modules():
        is_plain = type(module)._load_from_state_dict.__module__.startswith("torch.nn.modules.")
        is_plain &= type(module).set_extra_state is nn.Module.set_extra_state
        if not is_plain or module._load_state_dict_pre_hooks or module._load_state_dict_post_hooks:
            return ""
    present = target.state_dict()
    for key in dict.fromkeys((*present, *saved)):
        if key not in saved and key.endswith("num_batches_tracked"):
            continue  # torch adds it to states of old versions
        sizes = [_size(each[key]) if key in each else "nothing" for each in (present, saved)]
        if sizes[0] != sizes[1]:
            return f"{key} is {sizes[0]} here, {sizes[1]} in the checkpoint"
    return ""


def _size(value: Any) -> str:
    return f"of shape {tuple(getattr(value, 'shape', ())) or (1,)}"  # torch loads shape (1,) into a number


def _rebuilt(nested: Any, values: Mapping[str, Any]) -> Any:
    """Return nested dictionaries and lists with the items in the place of their keys."""
    if isinstance(nested, dict):
        return _like(nested, {key: _rebuilt(each, values) for key, each in nested.items()})
    if isinstance(nested, list):
        return [_rebuilt(each, values) for each in nested]
    if nested not in values:
        raise CheckpointError(f"no manifest tells where {_shown(nested)} lies, which is in {_STRUCTURE}")
    return values[nested]
