"""Random programs: drawn, run on plain and on distributed ranks, compared after every action, shrunk."""

from __future__ import annotations

import random
import re
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tests.checker.actions import ACTIONS, AMONG_WEIGHTED, Action
from tests.checker.allowed import permitted
from tests.checker.threads import Hang
from tests.checker.world import PlainWorld, World
from tests.support.rounding import rounding

Step = tuple[str, int, bool, "dict[str, Any]"]
"""An action's name, its salt, whether it may begin with a listed error, and its arguments."""

ENDING: tuple[Step, ...] = (
    ("read_params", 1, False, {"how": "clone"}),
    ("read_grads", 1, False, {"how": "clone", "gathered": False}),
    ("optimizer_state", 1, False, {"load": False}),
    ("close_at_end", 1, False, {}),
)
_TERMS = 48  # of the longest sum: samples times width, words, ranks
_DEPTH = 40  # sums that follow each other in one action: several backwards through all layers, and steps


@dataclass(frozen=True)
class Program:
    """What all ranks do. ``seed`` is where it was drawn from, and of which its data is made."""

    seed: int
    options: dict[str, Any]
    steps: tuple[Step, ...]

    def __post_init__(self) -> None:
        for name, salt, _, args in self.steps:  # a call that fails would end both runs alike
            signature(ACTIONS[name].act).bind(None, salt, **args)

    def to_json(self) -> list[Any]:
        return [self.seed, self.options, self.steps]

    @classmethod
    def from_json(cls, value: list[Any]) -> Program:
        seed, options, steps = value
        return cls(seed, options, tuple((name, salt, defy, args) for name, salt, defy, args in steps))

    def __str__(self) -> str:
        unusual = {k: v for k, v in self.options.items() if PLAINEST.get(k) != v}
        lines = [f"Program of seed {self.seed}: {arguments(unusual)}"]
        for name, _, defy, args in self.steps:
            lines.append(f"    {name}({arguments(args)}){'  # in spite of a listed error' if defy else ''}")
        return "\n".join(lines)


def arguments(args: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in args.items())


@dataclass(frozen=True)
class Failure:
    """How a program differs from plain PyTorch. ``kind`` and ``sort`` tell classes of failures apart."""

    kind: str  # differs, raises, hangs
    sort: str  # of an error: its type and the beginning of its text; else what differs
    rank: int
    step: int  # index into the program's steps, those of the ending included
    action: str
    detail: str

    @property
    def name(self) -> str:
        """The class of failures, without numbers and names."""
        sort = re.sub(r"gradient of [\w.]+", "gradient of X", re.sub(r"\d+", "N", self.sort))
        return f"{self.kind}: {sort[:100]}"

    def __str__(self) -> str:
        return (
            f"{self.kind} at step {self.step} ({self.action}) on rank {self.rank}: {self.sort}\n{self.detail}"
        )


# -- drawing -------------------------------------------------------------------------------------------------

PLAINEST: dict[str, Any] = {
    "ranks": 2,
    "kind": "dense",
    "tied": False,
    "two": False,
    "optimizer": "sgd",
    "gather": "gradients",
    "schedule": "dear",
    "profile": True,
    "op": "average",
    "passes": 1,
    "bucket_mb": 0.001,
    "predivide": 1.0,
    "compression": "none",
    "row_sparse": "auto",
    "stream": False,
    "lateness": 0.8,
    "frozen": None,
    "early_step": False,
    "sparse_as_dense": False,
    "groups": 0,
    "processes": False,
    "transport": "direct",
    "hosts": 1,
}
"""The options that a failing program is reduced to, one by one."""


def draw(
    seed: int,
    ranks: int,
    only: Sequence[str] = (),
    fixed: dict[str, Any] | None = None,
    processes: bool = False,
) -> Program:
    """Return the program of this seed; ``processes``: with what only processes can do."""
    dice = random.Random(seed)
    options = _options_with(dice, ranks, fixed or {}) | {"processes": processes, "transport": "direct"}
    if processes:
        transports = ["auto", "direct", "ring", "tiers"] + ["stream"] * (not options["two"])
        options |= {"transport": random.Random(f"transport {seed}").choice(transports), "stream": False}
        if options["transport"] in ("ring", "stream") and options["row_sparse"] is True:
            options["row_sparse"] = "auto"
    options |= fixed or {}
    names = [name for name, action in ACTIONS.items() if action.weight and (not only or name in only)]
    if not processes:
        names = [name for name in names if name != "join"]
    # Each program uses about half of the actions, so that rare ones meet each other.
    chosen = [name for name in names if only or dice.random() < 0.45] or names
    chosen += [name for name in ("train", "backward", "step", "read_params") if name not in chosen]
    narrow = _narrow(dice, options)
    chosen = [name for name in chosen if not narrow or name in narrow]
    weights = [ACTIONS[name].weight * dice.choice([0.5, 1.0, 2.0]) for name in chosen]
    steps = []
    drawn: set[str] = set()
    for name in dice.choices(chosen, weights, k=dice.randint(6, 25)):
        needed = ACTIONS[name].needs
        if needed and needed not in drawn:
            name = needed
        drawn.add(name)
        args = ACTIONS[name].draw(dice, options)
        steps.append((name, dice.randrange(10**6), dice.random() < 0.05, args))
    return Program(seed, options, tuple(steps))


# With gradients rounded on the wire, results depend on what is sent: sums must not be sent again.
_ROUNDED = (
    "train closure_step idle_rank step synchronize read_params read_grads evaluate average_weights set_rate"
    " freeze unfreeze optimizer_state model_state copies_of keep_alias"
).split()
# With early_step=True every backward is a step.
_EARLY = (
    "train backward step clear_grads failing_backward freeze unfreeze read_params evaluate average_weights"
    " set_rate optimizer_state model_state copies_of"
).split()


def _narrow(dice: random.Random, options: dict[str, Any]) -> list[str]:
    """Draw options under which only some actions have one meaning; return these, or nothing for all."""
    odd = dice.random()
    sharded, stream = options["gather"] == "parameters", options["stream"]
    if odd < 0.05 and options["op"] == "average" and options["kind"] != "sparse" and not stream:
        one_host = options.get("hosts", 1) == 1 and options["transport"] in ("auto", "tiers")
        if options["transport"] == "direct" or one_host:
            options |= {"compression": dice.choice(["bf16", "fp16"])}
            return _ROUNDED
    elif odd < 0.12 and sharded and not stream and options["transport"] != "stream":
        options |= {"early_step": True, "passes": 1, "lateness": 0.0}  # a thread waits
        return _EARLY
    elif odd < 0.14 and not options["two"] and options["processes"]:  # searching a plan takes seconds
        options |= {"schedule": "auto", "profile": False}
    return []


def _options_with(dice: random.Random, ranks: int, fixed: dict[str, Any]) -> dict[str, Any]:
    """Draw until options have the fixed values, if they ever do: some values exclude others."""
    for _ in range(1000):
        options = _options(dice, ranks)
        if all(options.get(name, value) == value for name, value in fixed.items()):
            break
    return options


def _options(dice: random.Random, ranks: int) -> dict[str, Any]:
    kind = dice.choice(["dense", "dense", "table", "table", "sparse", "image"])
    sharded = kind != "sparse" and dice.random() < 0.4
    optimizer = dice.choice(["sgd", "momentum", "decay", "decay", "adam", "adamw", "adagrad", "rmsprop"])
    if kind == "sparse":
        optimizer = dice.choice(["sgd", "adagrad"])
    elif not sharded and dice.random() < 0.04:
        optimizer = "lbfgs"
    two = optimizer != "lbfgs" and dice.random() < 0.12
    stream = not two and dice.random() < 0.25
    rows = kind == "table" and not sharded and not stream
    row_sparse = dice.choice([True, "auto", False] if rows else ["auto", "auto", False])
    sums = not sharded and dice.random() < 0.2 or sharded and dice.random() < 0.1
    return {
        "ranks": ranks,
        "kind": kind,
        "tied": kind == "table" and dice.random() < 0.5,
        "two": two,
        "optimizer": optimizer,
        "gather": "parameters" if sharded else "gradients",
        "schedule": dice.choice(["dear", "wfbp", "pipedap", "sequential", "mgwfbp", "bytescheduler"]),
        "profile": dice.random() < 0.8,
        "op": "sum" if sums else "average",
        "passes": dice.choice([1, 1, 1, 1, 2, 3]),
        "bucket_mb": dice.choice([0.0003, 0.001, 0.001, 0.01]),
        "predivide": dice.choice([1.0, 1.0, 1.0, 2.0]) if not sums else 1.0,
        "compression": "none",
        "row_sparse": row_sparse,
        # The stream of a CPU blocks, and two streams would block each other.
        "stream": stream,
        "lateness": dice.choice([0.0, 0.8, 0.8]),
        "frozen": dice.choice([None] * 11 + [dice.randrange(3)]),
        "early_step": False,
        "sparse_as_dense": kind == "sparse" and dice.random() < 0.4,
        "groups": dice.choice([0, 0, 0, 0, 0, 0, 2]),
    }


# -- running on one rank -------------------------------------------------------------------------------------


@dataclass
class Record:
    """What one rank of plain PyTorch did in one step: skipped it, stopped there, or saw ``value``."""

    done: str
    value: Any = None
    allowed: set[str] = field(default_factory=set)


def run_plain(world: PlainWorld, program: Program) -> list[Record]:
    """Run a program on one rank of plain PyTorch."""
    records = []
    for name, salt, defy, args in (*program.steps, *ENDING):
        action = ACTIONS[name]
        world.begin_action()
        if not _is_legal(action, world, defy, args):
            records.append(Record("skipped"))
            continue
        try:
            if name in READS_PARAMETERS:
                world.events(("values",))
            value = action.act(world, salt, **args)
        except Hang:
            raise
        except Exception:
            records.append(Record("stopped", traceback.format_exc()))
            break
        world.look()
        # Parameters that change make a kept graph invalid.
        if name in CHANGES_PARAMETERS:
            world.kept.pop("graph", None)
        records.append(Record("done", value, world.allowed))
    return records


CHANGES_PARAMETERS = frozenset(
    (
        "train step closure_step idle_rank weighted failing_update clip"
        " load_assign wrap_again optimizer_state"
    ).split()
)


READS_PARAMETERS = frozenset("read_params evaluate average_weights model_state copies_of".split())


def _is_legal(action: Action, world: PlainWorld, defy: bool, args: dict[str, Any]) -> bool:
    books = world.books
    if any(book.uneven for book in books) and not action.settles:
        return False
    if not books and not action.local:
        return False
    if any(book.samples for book in books) and action.name not in AMONG_WEIGHTED:
        return False
    if action.name not in ("close_at_end",) and not action.legal(world):
        return False
    events = action.events(args) if callable(action.events) else action.events
    if "backward" in events and any(book.backwards for book in books):
        events = (*events, "backward again")
    if action.name in READS_PARAMETERS:
        events = (*events, "values")
    if "backward" in events and world.hooks and any(book.vague for book in books):
        return False  # a hook would see sums that are averaged or not
    if defy:
        return True
    return not world.troubled_by(events)


class Stop(Exception):
    """This rank's program is over before its end: it has failed, or (None) a listed error has ended it."""

    def __init__(self, failure: Failure | None = None) -> None:
        self.failure = failure


def run_distributed(world: World, program: Program, records: Sequence[Record], met: list[str]) -> None:
    """Run it on one distributed rank; note the listed errors that it has ``met``. Raises ``Stop``."""
    precision = world.dtype
    for place, ((name, salt, _, args), record) in enumerate(zip((*program.steps, *ENDING), records)):
        if record.done == "skipped":
            continue
        if record.done == "stopped":
            break
        action = ACTIONS[name]
        try:
            value = action.act(world, salt, **args)
        except Exception as error:
            row = permitted(error, record.allowed)
            if row is None:
                raise Stop(_raised(error, world.rank, place, name)) from error
            met.append(row.name)
            if row.goes_on and name == "read_grads":
                continue
            raise Stop from error
        if name in CHANGES_PARAMETERS:
            world.kept.pop("graph", None)
        # A model that has been rounded to float32 stays so, whatever it is converted to later.
        precision = max(precision, world.dtype, key=lambda dtype: torch.finfo(dtype).eps)
        with _disable_current_modes():  # a race detector would take it for the script's
            difference = compare(value, record.value, (place + 1) * _DEPTH, precision)
        if difference:
            raise Stop(Failure("differs", f"{name}", world.rank, place, name, difference))


def _raised(error: Exception, rank: int, place: int, name: str) -> Failure:
    text = str(error).strip().splitlines() or [""]
    sort = f"{type(error).__name__}: {text[0]}"
    kind = (
        "hangs" if "in vain" in sort or "within" in sort and "s" in sort and "CommError" in sort else "raises"
    )
    trace = "".join(traceback.format_exception(error)[-6:])
    return Failure(kind, sort, rank, place, name, trace)


# -- comparing -----------------------------------------------------------------------------------------------


def compare(mine: Any, plain: Any, depth: int, precision: torch.dtype = torch.float64) -> str:
    """Return how two observations differ beyond rounding to ``precision``, or to their own; "" if not."""
    left, right = list(_leaves(mine, "")), list(_leaves(plain, ""))
    if [path for path, _ in left] != [path for path, _ in right]:
        return f"it is {_short(mine)}, plain has {_short(plain)}"
    pairs = [(path, a, b) for (path, a), (_, b) in zip(left, right)]
    for path, a, b in pairs:
        if type(a) is not type(b):
            return f"{path or 'it'} is {_short(a)}, plain has {_short(b)}"
    numbers = [(path, _number(a), _number(b)) for path, a, b in pairs if isinstance(b, (float, torch.Tensor))]
    scale = 0.0
    for path, a, b in pairs:
        if isinstance(b, (float, torch.Tensor)):
            continue
        if a != b:
            return f"{path or 'it'} is {_short(a)}, plain has {_short(b)}"
    for path, a, b in numbers:
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{path} is {a.dtype} {tuple(a.shape)}, plain has {b.dtype} {tuple(b.shape)}"
        if not a.numel() or torch.equal(a, b):
            continue
        scale = scale or max(1e-2, *(float(each.abs().max()) for _, _, each in numbers if each.numel()))
        exact = not (a.is_floating_point() or a.is_complex())
        terms = max(rounding(dtype, _TERMS, depth) for dtype in (a.dtype, precision)) if not exact else 0.0
        bound = terms * scale
        # An exact match includes infinities and NaN in the same places.
        off = torch.where(
            (a == b) | (a.isnan() & b.isnan()),
            torch.zeros_like(a, dtype=torch.float64),
            (a - b).abs().double(),
        )
        worst = float(off.max())
        if not worst <= bound:
            return (
                f"{path or 'it'} is off by {worst:.3g} (rounding may make it {bound:.1g}):"
                f" {_short(a)}, plain has {_short(b)}"
            )
    return ""


def _number(value: Any) -> torch.Tensor:
    tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64)
    return tensor.detach().to_dense()


def _leaves(value: Any, path: str) -> Any:
    if isinstance(value, dict):
        for key, item in sorted(value.items(), key=lambda pair: str(pair[0])):
            yield from _leaves(item, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        yield path + " length", len(value)
        for place, item in enumerate(value):
            yield from _leaves(item, f"{path}[{place}]")
    else:
        yield path, value


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "[" + ", ".join(f"{x:.6g}" for x in value.detach().flatten()[:4].tolist()) + ", ...]"
    text = repr(value)
    return text if len(text) < 200 else text[:200] + "..."


# -- shrinking -----------------------------------------------------------------------------------------------


Run = Callable[[Program], "Failure | None"]


def same_class(one: Failure, other: Failure | None) -> bool:
    if other is None or other.kind != one.kind:
        return False
    return one.kind != "raises" or one.sort.split(":")[0] == other.sort.split(":")[0]


def shrink(program: Program, failure: Failure, run: Run, seconds: float = 60.0) -> tuple[Program, Failure]:
    """Return a program with as few actions as can be that fails in the same way, and how it fails."""
    end = time.monotonic() + seconds

    def still(candidate: Program) -> bool:
        nonlocal program, failure
        if time.monotonic() > end:
            return False
        now = run(candidate)
        if same_class(failure, now):
            assert now is not None
            program, failure = candidate, now
            return True
        return False

    # A rank that is ahead may have made another one fail, so this is tried as well.
    still(replace(program, steps=program.steps[: failure.step + 1]))
    before = None
    while before != program:
        before = program
        size = max(1, len(program.steps) // 2)
        while True:
            place = len(program.steps) - size
            while place > -size:
                start = max(place, 0)
                still(replace(program, steps=program.steps[:start] + program.steps[start + size :]))
                place -= size
            if size == 1:
                break
            size //= 2
        for key, plainest in PLAINEST.items():
            if program.options.get(key) != plainest and key not in ("ranks", "processes"):
                still(replace(program, options={**program.options, key: plainest}))
        for place in range(len(program.steps)):
            for simpler in _simpler(program.steps[place]):
                still(replace(program, steps=(*program.steps[:place], simpler, *program.steps[place + 1 :])))
    return program, failure


def _simpler(step: Step) -> list[Step]:
    name, salt, defy, args = step
    found = []
    if args.get("loss"):
        found.append((name, salt, defy, {**args, "loss": {}}))
        found += [
            (name, salt, defy, {**args, "loss": {k: v for k, v in args["loss"].items() if k != key}})
            for key in args["loss"]
        ]
    if args.get("steps", 1) > 1:
        found.append((name, salt, defy, {**args, "steps": 1}))
    if len(args.get("places", ())) > 1 and name not in ("tie_data",):
        found += [(name, salt, defy, {**args, "places": [place]}) for place in args["places"]]
    if name == "train":
        found.append(("train", salt, defy, {**args, "clear": "optimizer", "first": True}))
    return [step_ for step_ in found if step_ != step]


# -- ranks as threads ----------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What the programs of a run did: actions that ran, that had no meaning there, and early ends."""

    ran: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    stopped: Counter[str] = field(default_factory=Counter)  # plain PyTorch raised an error
    listed: Counter[str] = field(default_factory=Counter)  # programs that have met a listed error
    closing: int = 0  # errors of close(wait=False)

    def note(self, program: Program, records: Sequence[Record]) -> None:
        for (name, _, _, _), record in zip(program.steps, records):
            which = {"done": self.ran, "skipped": self.skipped, "stopped": self.stopped}[record.done]
            which[name] += 1


def run_on_threads(
    program: Program,
    patience: float = 60.0,
    tally: Tally | None = None,
    new_job: Callable[..., ThreadJob] | None = None,
) -> Failure | None:
    """Run a program with ranks that are threads; return how it failed, if it did."""
    from tests.checker.threads import Meeting, run_threads

    size = program.options["ranks"]
    records = plain_records(program)
    if tally is not None:
        tally.note(program, records[0])
    broken = _plain_ranks_differ(program, records)
    if broken:
        raise AssertionError(f"the checker is wrong: {broken}\n{program}")
    job = (new_job or ThreadJob)(program, Meeting(size, patience), patience)
    try:
        run_threads(size, lambda rank: job.run(rank, records[rank]), 6 * patience)
    except Hang as error:
        job.abort()
        where = max(job.places.items(), key=lambda item: item[1], default=(0, 0))
        return Failure("hangs", str(error), where[0], where[1], "?", str(error))
    if tally is not None:
        tally.listed.update([] if job.failures else set(job.met))
        tally.closing += job.close_failures
    return job.verdict()


def plain_records(program: Program) -> list[list[Record]]:
    from tests.checker.threads import Meeting, run_threads

    size = program.options["ranks"]
    meeting = Meeting(size, 60.0)

    def work(rank: int) -> Any:
        try:
            world = PlainWorld(
                program.seed, program.options, rank, size, lambda value: meeting.exchange(rank, value)
            )
            return run_plain(world, program)
        except BaseException:
            meeting.abort()
            return traceback.format_exc()

    results = run_threads(size, work, 120.0)
    for result in results:
        if isinstance(result, str):
            raise AssertionError(f"the checker itself fails: {result}\n{program}")
    return results


def _plain_ranks_differ(program: Program, records: Sequence[Sequence[Record]]) -> str:
    for place, row in enumerate(zip(*records)):
        if len({record.done for record in row}) > 1:
            texts = [record.value for record in row if record.done == "stopped"]
            return f"plain ranks differ at step {place}: {[record.done for record in row]} {texts}"
    if len({len(each) for each in records}) > 1:
        return f"plain ranks end at different steps: {[len(each) for each in records]}"
    return ""


class ThreadJob:
    """The ranks of one program, as threads."""

    def __init__(self, program: Program, meeting: Any, patience: float) -> None:
        self.program, self.meeting, self.patience = program, meeting, patience
        self.failures: list[Failure] = []
        self.close_failures = 0
        self.met: list[str] = []  # listed errors
        self.ended = False  # by a listed error, at least one rank
        self.places: dict[int, int] = {}
        self.aborted = False
        self._lock = threading.Lock()
        self._backends: list[Any] = []
        self._at_the_end = 0  # ranks
        self._changed = threading.Condition(self._lock)

    def made(self, backend: Any) -> None:
        with self._lock:
            self._backends.append(backend)
        if self.aborted:
            backend.abort("the program has failed")

    def abort(self) -> None:
        with self._lock:
            self.aborted = True
            self._changed.notify_all()
            backends = list(self._backends)
        self.meeting.abort()
        for backend in backends:
            backend.abort("the program has failed")

    def watched(self, rank: int) -> Any:
        """Return the device on which a rank is watched, if it is."""
        return None

    def new_world(self, rank: int) -> Any:
        from tests.checker.distributed import ThreadWorld

        return ThreadWorld(self, rank)

    def run(self, rank: int, records: Sequence[Record]) -> None:
        world = None
        try:
            with warnings.catch_warnings():
                world = self.new_world(rank)
                run_distributed(world, self.program, records, self.met)
        except Stop as stop:
            self._stopped(stop)
        except Exception as error:
            self._stopped(Stop(_raised(error, rank, -1, "wrap")))
        self._wait_for_the_others()
        if world is not None:
            raised = world.end()
            with self._lock:
                self.close_failures += raised

    def _wait_for_the_others(self) -> None:
        """Wait until all ranks have come to the end: those that still run may need this one.

        A rank that a listed error has ended leaves the others waiting. They are aborted a second later.
        """

        def over() -> bool:
            return self.aborted or self._at_the_end == self.meeting.size

        with self._lock:
            self._at_the_end += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: over() or self.ended, 6 * self.patience)
            if self._changed.wait_for(over, 1.0):
                return
        self.abort()

    def _stopped(self, stop: Stop) -> None:
        with self._lock:
            if stop.failure is None:
                self.ended = True
            elif not self.aborted:
                self.failures.append(stop.failure)
        if stop.failure is not None:
            self.abort()

    def verdict(self) -> Failure | None:
        return self.failures[0] if self.failures else None
