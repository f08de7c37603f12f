"""What an optimizer tells its user.

    metrics(optimizer)         what communication costs: measured, predicted, and as DDP would have it
    log_metrics(...)           the same as scalars, for a tensorboard ``SummaryWriter``
    explain(optimizer)         the plan with its buckets
    operations(optimizer)      the last reduce-scatters and all-gathers
    COMMSCHED_LOG_EVERY        a line on rank 0 every so many steps (``StepReports``)
    COMMSCHED_METRICS_PORT     each process's figures over HTTP, for Prometheus (``Endpoint``)
    COMMSCHED_TIMELINE         what every rank computed and sent, as a Chrome trace (``Timeline``)

``python -m commsched.optimizer.reports FILE PART...`` merges the traces of ranks on hosts without a common
file system.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from socketserver import ThreadingMixIn
from statistics import median
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from comm_core import OPS, Traffic, link_gate
from commsched.backends.ranks import Ranks
from commsched.collectives.compression import block_code
from commsched.collectives.private_groups import hosts_of
from commsched.env import Settings
from commsched.optimizer.measuring import StepTimes, Watch
from commsched.optimizer.planner import SHARE, Plan, Trial
from commsched.process.launch import by_host
from scheduler.ir.profile import Profile
from scheduler.ir.program import Program


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.2f} ms"


def percent(part: float | None) -> str:
    return "-" if part is None else f"{part * 100:.0f} %"


def megabytes(size: float | None) -> str:
    return "-" if size is None else f"{size / 1e6:.2f} MB"


def few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# -- what communication costs --------------------------------------------------------------------------------


_MUCH = 0.1  # of a step: a rank that waits so much less than all others computes for longer


@dataclass(frozen=True)
class Metrics:
    """Times in seconds: medians over the last steps, None before there are any.

    ``exposed`` is the time in which the compute waited for communication. ``predicted_*`` comes from
    simulating the plan, ``ddp_*`` from simulating torch's DDP on the same profile and link. ``bytes``: sent
    by this rank in a step. ``link_busy``: the part of a step in which the link works; ``link_rate``: bytes
    per second that this rank sends then. ``waits``: every rank's ``exposed``, sent with each step's flags.
    """

    steps: int
    rank: int
    ranks: int
    policy: str
    step: float | None
    exposed: float | None
    bytes: float | None
    link_rate: float | None
    link_busy: float | None
    waits: tuple[float, ...]
    predicted_step: float | None
    predicted_exposed: float | None
    predicted_link_busy: float | None
    ddp_step: float | None
    ddp_exposed: float | None

    def to_dict(self) -> dict[str, Any]:
        """Return all figures by name, for JSON."""
        return {**asdict(self), "waits": list(self.waits)}

    def to_scalars(self) -> dict[str, float]:
        """Return the figures that are known, by name; ``waits`` as ``wait_of_rank_0`` and so on."""
        left_out = ("rank", "ranks", "policy", "waits")
        known = {k: float(v) for k, v in self.to_dict().items() if k not in left_out and v is not None}
        return known | {f"wait_of_rank_{rank}": wait for rank, wait in enumerate(self.waits)}

    @property
    def awaited(self) -> int | None:
        """The rank whose compute the others wait for; None unless each waits a tenth of a step longer."""
        if self.step is None or len(self.waits) < 2:
            return None
        least, others = sorted(self.waits)[:2]
        return self.waits.index(least) if others - least > _MUCH * self.step else None

    @property
    def line(self) -> str:
        """The figures in one line, for logs."""
        each = "/".join(f"{wait * 1e3:.1f}" for wait in self.waits)
        waits = f", waits of ranks {each} ms" if each else ""
        waits += "" if self.awaited is None else f" (for the compute of rank {self.awaited})"
        return (
            f"commsched: step {milliseconds(self.step)}, exposed communication {milliseconds(self.exposed)}"
            f" (predicted {milliseconds(self.predicted_exposed)}, DDP {milliseconds(self.ddp_exposed)}),"
            f" {megabytes(self.bytes)} per step at {megabytes(self.link_rate)}/s{waits}"
        )

    def __str__(self) -> str:
        rows = [
            ("", "measured", "predicted", "DDP, simulated"),
            ("step", *map(milliseconds, (self.step, self.predicted_step, self.ddp_step))),
            (
                "exposed communication",
                *map(milliseconds, (self.exposed, self.predicted_exposed, self.ddp_exposed)),
            ),
            ("link busy", percent(self.link_busy), percent(self.predicted_link_busy), ""),
            ("sent per step", megabytes(self.bytes), "", ""),
            ("link rate", f"{megabytes(self.link_rate)}/s", "", ""),
        ]
        for rank, wait in enumerate(self.waits):
            told = "the others wait for its compute" if rank == self.awaited else ""
            rows.append((f"wait of rank {rank}", milliseconds(wait), "", told))
        head = f"policy {self.policy}, rank {self.rank} of {self.ranks}, medians of {self.steps} steps"
        lines = (f"{what:24}{ours:>14}{plan:>14}{ddp:>16}".rstrip() for what, ours, plan, ddp in rows)
        return "\n".join([head, *lines])


def metrics(optimizer: Any) -> Metrics | None:
    """Return what communication costs a ``DistributedOptimizer``; any rank may call it alone.

    Returns None on one rank, and where gradients are reduced at step time without a plan. The first call
    after a new plan simulates the plan, which takes about a second.
    """
    session = getattr(optimizer, "_session", None)
    if session is None:
        return None
    return metrics_of(session.times, session.plan, session.backend.ranks)


def is_settled(optimizer: Any) -> bool:
    """Return whether a ``DistributedOptimizer`` has found its plan; before, steps are no typical ones.

    The first steps are measured, a plan is searched beside the next ones, then tried beside DDP's way.
    Between steps all ranks get the same answer. A step that becomes much slower or faster starts this anew.
    While a rank has joined, no plan is tried: ranks that have not settled do not before all have joined.
    """
    session = getattr(optimizer, "_session", None)
    return session is None or session.is_settled


def metrics_of(times: StepTimes, plan: Plan, ranks: Ranks, simulated: bool = True) -> Metrics:
    """Return the figures of a plan; the plan's predictions are None unless ``simulated``."""
    predicted = plan.prediction if simulated else None
    return Metrics(
        rank=ranks.rank,
        ranks=ranks.size,
        policy=plan.program.policy,
        predicted_step=predicted.period if predicted else None,
        predicted_exposed=predicted.exposed if predicted else None,
        predicted_link_busy=predicted.utilisation if predicted else None,
        ddp_step=predicted.ddp_period if predicted else None,
        ddp_exposed=predicted.ddp_exposed if predicted else None,
        **vars(times.measured()),
    )


def log_metrics(optimizer: Any, writer: Any, step: int) -> None:
    """Write the figures as scalars ``commsched/...`` with a tensorboard ``SummaryWriter``."""
    figures = metrics(optimizer)
    for name, value in (figures.to_scalars() if figures is not None else {}).items():
        writer.add_scalar(f"commsched/{name}", value, step)


# -- the plan and its operations -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Explanation:
    """The plan; its times, in seconds, are in ``metrics``. No schedule takes less time than ``bound``.

    ``searching``: a better one is being searched, and training uses this one meanwhile. ``tried``: seconds of
    a step under the searched plan and under DDP's ways, as measured in turn; ``trial``: the same as text, and
    which plan is used, or why there was none.
    """

    policy: str
    plan: str
    hash: str
    transport: str
    hosts: tuple[int, ...]  # by rank, numbered; empty where the launcher's facts contradict each other
    buckets: tuple[tuple[int, tuple[str, ...]], ...]
    by_rows: Mapping[str, int]  # parameters of which only touched rows travel, and their bytes in memory
    tied: tuple[str, ...]  # of these, those of which the head's part travels first, then rows that correct it
    link: str
    profile_source: str
    bound: float
    searching: bool
    tried: tuple[tuple[str, float], ...]
    trial: str
    quantised: tuple[str, ...]  # by bucket: to what its gradients are quantised, int8, fp8 or ""
    metrics: Metrics
    program: Program
    profile: Profile

    def __str__(self) -> str:
        shared = self.transport == "tiers" and len(set(self.hosts)) == 1
        memory = " (memory that the ranks of this host share)" if shared else ""
        lines = [
            f"plan {self.hash}, {len(self.buckets)} buckets over transport {self.transport}{memory}",
            *([f"ranks: {by_host([str(host) for host in self.hosts])}"] if self.hosts else []),
            f"link {self.link}; times: {self.profile_source}",
            f"order: {self.plan}",
            str(self.metrics),
            f"no schedule is below {milliseconds(self.bound)}",
            f"beside DDP's way: {self.trial}",
        ]
        if self.searching:
            lines[0] += ", while a better plan is searched"
        for number, (size, names) in enumerate(self.buckets):
            whole = sum(self.by_rows.get(name, 0) for name in names)
            corrects = bool(names) and names[0] in self.tied
            what = "rows that correct the head's" if corrects else "touched rows of"
            rows = f", {what} {whole / 2**20:.2f} MiB" if whole else ""
            code = self.quantised[number]
            wire = f", gradients as {code} {size * SHARE / 2**20:.2f} MiB" if code else ""
            lines.append(f"  bucket {number}: {size / 2**20:.2f} MiB{wire}: {few(names)}{rows}")
        return "\n".join(lines)


def explain(optimizer: Any, show: bool = True) -> Explanation | None:
    """Return the plan of a ``DistributedOptimizer``, predicted and measured, and print it with ``show``.

    Returns None on one rank, and where gradients are reduced at step time without a plan.
    """
    session = getattr(optimizer, "_session", None)
    if session is None:
        if show:
            print(
                "commsched: nothing is communicated (one rank), or the gradients are reduced at step time"
                " without a plan"
            )
        return None
    plan, model = session.plan, session.planner.model
    program, profile, link = plan.program, plan.profile, plan.link
    names, code = [layer.name for layer in profile.layers], block_code(optimizer._options.wire_dtype)
    explanation = Explanation(
        policy=program.policy,
        plan=program.plan,
        hash=program.hash,
        transport=session.backend.name,
        hosts=_hosts(session.backend.ranks),
        buckets=tuple(
            (b.bytes, tuple(dict.fromkeys(names[p.layer] for p in b.pieces))) for b in program.buckets
        ),
        by_rows={model.names[i]: model.bytes(i) for i in model.rows},
        tied=tuple(model.names[i] for i in model.heads if i in model.rows),
        link=str(link),
        profile_source=profile.source or profile.name,
        bound=plan.prediction.bound,
        searching=session.searches,
        tried=_tried(session.trial) if session.trial is not None else (),
        trial=_trial_text(session.trial, session.why_untried),
        quantised=tuple(code if model.quantises(b.group) else "" for b in program.buckets),
        metrics=metrics_of(session.times, plan, session.backend.ranks),
        program=program,
        profile=profile,
    )
    if show:
        print(explanation)
    return explanation


def _tried(trial: Trial) -> tuple[tuple[str, float], ...]:
    sizes = [[bucket.bytes for bucket in plan.program.buckets] for plan in trial.plans[1:]]
    names = [f"{len(each)} all-reduces of up to {max(each) / 2**20:.2f} MiB" for each in sizes]
    timed = zip(["the searched plan", *names], trial.seconds, strict=True)
    return tuple((name, median(seconds)) for name, seconds in timed if seconds)


def _trial_text(trial: Trial | None, why_untried: str) -> str:
    if trial is None:
        return f"not tried, because {why_untried}" if why_untried else "to be tried after some more steps"
    if len(trial.plans) == 1:
        return "the searched plan sends as DDP does"
    tried = _tried(trial)
    used = f"{tried[trial.now][0]} is used" if trial.over else "being tried"
    return f"{', '.join(f'{name} {milliseconds(seconds)}' for name, seconds in tried)}: {used}"


def _hosts(ranks: Ranks) -> tuple[int, ...]:
    try:
        return tuple(hosts_of(ranks.process_set))
    except ValueError:
        return ()


@dataclass(frozen=True)
class Operation:
    """One collective on a bucket. Times are ``time.monotonic()``'s; its input was complete at ``ready``."""

    step: int
    kind: str  # "RS", "AG" or "AR"
    bucket: int
    ready: float
    start: float
    end: float
    bytes: int  # sent by this rank

    @property
    def label(self) -> str:
        return f"{self.kind}{self.bucket}"


def operations(optimizer: Any) -> list[Operation]:
    """Return the last operations on a ``DistributedOptimizer``'s buckets, oldest first.

    Bucket numbers after those of ``explain(optimizer)`` are flags. Empty where ``explain`` gives None.
    """
    session = getattr(optimizer, "_session", None)
    events = session.backend.events(clear=False) if session is not None else ()
    return [
        Operation(step, OPS[kind], bucket, ready, start, end, size)
        for step, kind, bucket, ready, start, end, size in (event.tolist() for event in events)
    ]


# -- while training: lines, and figures for Prometheus -------------------------------------------------------

_REFRESH = 1.0  # seconds between two sets of figures for Prometheus
_UNITS = {"steps": "", "link_busy": "_ratio", "predicted_link_busy": "_ratio"}
_UNITS |= {"bytes": "_per_step", "link_rate": "_bytes_per_second"}  # all other figures are seconds
_open: dict[int, Endpoint] = {}  # by port: the optimizers of a process share one
# Reentrant: while a thread holds it, the collector may free an optimizer there, which removes its figures.
_lock = threading.RLock()


class _Scrape(WSGIRequestHandler):
    timeout = 10.0  # seconds without a byte of a client's request

    def log_message(self, *_: Any) -> None:
        pass


class _Server(ThreadingMixIn, WSGIServer):
    """Serves a few clients at a time and refuses others, so that silent ones cost the job no descriptors."""

    daemon_threads = True
    request_queue_size = 128  # where it is full, a client tries again only after a second

    def __init__(self, *arguments: Any) -> None:
        self._room = threading.BoundedSemaphore(16)
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, *_: Any) -> None:
        pass  # a client that is silent or gone


class Endpoint:
    """An HTTP server that shows the latest figures of each optimizer. Its threads compute nothing."""

    def __init__(self, port: int, rank: int, address: str) -> None:
        try:
            from prometheus_client import CollectorRegistry, make_wsgi_app
        except ImportError:
            raise ValueError(
                "COMMSCHED_METRICS_PORT is set, but prometheus_client is not installed;"
                " run pip install commsched[metrics], or unset the variable"
            ) from None
        self._port, self._rank, self._made = port, str(rank), 0
        self._shown: dict[int, dict[str, float]] = {}
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server = make_server(address, port, make_wsgi_app(registry), _Server, _Scrape)
        except OSError as error:
            raise ValueError(
                f"rank {rank} cannot serve its metrics on {address}, port {port} (COMMSCHED_METRICS_ADDRESS,"
                f" COMMSCHED_METRICS_PORT plus its local rank): {error}; choose others"
            ) from None
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def add(self) -> int:
        """Return the number under which a new optimizer shows its figures."""
        number, self._made = self._made, self._made + 1
        self._shown[number] = {}
        return number

    def show(self, optimizer: int, scalars: dict[str, float]) -> None:
        self._shown[optimizer] = scalars

    def remove(self, optimizer: int) -> None:
        """Take an optimizer's figures away; the last one closes the server."""
        with _lock:
            self._shown.pop(optimizer, None)
            if not self._shown and _open.pop(self._port, None) is self:
                self._server.shutdown()
                self._server.server_close()
                self._thread.join()

    def collect(self) -> Iterator[Any]:
        """Return all figures; called by prometheus_client for each request."""
        from prometheus_client.core import GaugeMetricFamily

        families: dict[str, Any] = {}
        for optimizer in sorted(list(self._shown)):  # a copy: other threads may add and remove some meanwhile
            for name, value in self._shown.get(optimizer, {}).items():
                name = f"commsched_{name}{_UNITS.get(name, '_seconds')}"
                if name not in families:
                    text = "one of the figures of commsched.metrics()"
                    families[name] = GaugeMetricFamily(name, text, labels=["rank", "optimizer"])
                families[name].add_metric([self._rank, str(optimizer)], value)
        yield from families.values()


def endpoint(port: int, rank: int, address: str = Settings.metrics_address) -> tuple[Endpoint, int]:
    """Return this process's endpoint on ``port``, and the number of a new optimizer there."""
    with _lock:
        while True:
            if port not in _open:
                _open[port] = Endpoint(port, rank, address)
            shared = _open[port]
            number = shared.add()
            if _open.get(port) is shared:  # not closed by the last optimizer, freed by the collector just now
                return shared, number


class StepReports:
    """Reports of one optimizer. A report measures nothing and asks no other rank."""

    def __init__(self, settings: Settings, ranks: Ranks, local_rank: int, times: StepTimes) -> None:
        self._ranks, self._times = ranks, times
        self._every = settings.log_every if ranks.rank == 0 else 0
        self._steps, self._shown = 0, 0.0
        self._endpoint: Endpoint | None = None
        if settings.metrics_port:
            self._endpoint, self._number = endpoint(
                settings.metrics_port + local_rank, ranks.rank, settings.metrics_address
            )
        self._predicting: threading.Thread | None = None
        self._owner = os.getpid()

    def step(self, plan: Plan) -> None:
        """Report the step that has just ended, if a report is due."""
        self._steps += 1
        now = time.monotonic()
        line = self._every > 0 and self._steps % self._every == 0
        show = self._endpoint is not None and now - self._shown > _REFRESH
        if not (line or show):
            return
        if self._ranks.rank == 0 and not plan.is_predicted and self._predicting is None:
            self._predicting = threading.Thread(target=self._predict, args=(plan,), daemon=True)
            self._predicting.start()
        figures = metrics_of(self._times, plan, self._ranks, simulated=plan.is_predicted)
        if line and figures.steps:
            print(figures.line, flush=True)
        if show and self._endpoint is not None:
            self._shown = now
            self._endpoint.show(self._number, figures.to_scalars())

    def _predict(self, plan: Plan) -> None:
        """Let a child process simulate the plan while training goes on; rank 0's figures serve all."""
        _ = plan.prediction  # the access simulates
        self._predicting = None

    def close(self) -> None:
        if self._endpoint is not None and os.getpid() == self._owner:
            self._endpoint.remove(self._number)


# -- a trace of every rank -----------------------------------------------------------------------------------

_PATIENCE = 10.0  # seconds that rank 0 waits at its exit for the other ranks' parts
_WORTH_SHOWING = 1e-5  # seconds
_LANES = {"compute": 0, "link": 1, "wait": 2, "halo": 3, "activation": 4, "chunks": 5}
_TRAFFIC = {
    Traffic.halo.value: ("halo", "halo"),
    Traffic.activation.value: ("activation", "activation"),
    Traffic.gradient.value: ("chunks", "gradient chunk"),
}


class Timeline:
    """One rank's recording.

    Each rank records into ``FILE.rankR`` and, at its exit, rank 0 merges those it finds into ``FILE``.
    """

    def __init__(self, file: str, rank: int, size: int) -> None:
        self._file, self._rank, self._size = Path(file), rank, size
        # Engine and watch use this host's monotonic clock; hosts can only be compared by the time of day.
        self._offset = time.time() - time.monotonic()
        self._events: list[dict[str, Any]] = []
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._part().unlink(missing_ok=True)
        link_gate().record(True)

    def _part(self, rank: int | None = None) -> Path:
        return self._file.with_name(f"{self._file.name}.rank{self._rank if rank is None else rank}")

    def _add(self, lane: str, name: str, start: float, end: float, **details: Any) -> None:
        self._events.append(
            {
                "name": name,
                "ph": "X",
                "pid": self._rank,
                "tid": _LANES[lane],
                "ts": round((start + self._offset) * 1e6, 3),
                "dur": round(max(0.0, end - start) * 1e6, 3),
                "args": details,
            }
        )

    def add_phases(self, watch: Watch, step: int) -> None:
        """Add one iteration: forward, backward and the step itself."""
        seen = watch.moments()
        marks = seen.marks
        first = seen.forwards[0][1] if seen.forwards else None
        turn = seen.grads[0][1] if seen.grads else marks.get("enter")
        if first is not None and turn is not None:
            self._add("compute", "forward", first, turn, step=step)
        if seen.grads and "backward_end" in marks:
            self._add("compute", "backward", seen.grads[0][1], marks["backward_end"], step=step)
        if {"enter", "end"} <= set(marks):
            self._add("compute", "step()", marks["enter"], marks["end"], step=step)
        for start, end in seen.waits:
            if end - start > _WORTH_SHOWING:
                self._add("wait", "wait", start, end, step=step)

    def add_operations(self, events: Iterable[Any], names: list[str]) -> None:
        """Add the engine's log: each operation with its bucket, its bytes and its wait for the link."""
        for event in events:
            bucket = int(event["bucket"])
            self._add(
                "link",
                f"{OPS[int(event['op'])]}{bucket}",
                float(event["start"]),
                float(event["end"]),
                step=int(event["step"]),
                bucket=names[bucket] if bucket < len(names) else "flags",
                bytes=int(event["bytes"]),
                waited_ms=round((float(event["start"]) - float(event["ready"])) * 1e3, 3),
            )

    def add_messages(self, passages: Iterable[Any]) -> None:
        """Add the messages that passed the link's gate; ``ahead``: more urgent messages in flight then.

        Halos and activations are drawn from start to arrival, chunks of gradients at their start.
        """
        for passage in passages:
            lane, name = _TRAFFIC[int(passage["traffic"])]
            self._add(
                lane,
                name,
                float(passage["start"]),
                float(passage["end"]),
                bytes=int(passage["bytes"]),
                ahead=int(passage["waiting"]),
                waited_ms=round((float(passage["start"]) - float(passage["asked"])) * 1e3, 3),
            )

    def close(self) -> None:
        """Write this rank's part; on rank 0 also the merged file."""
        self.add_messages(link_gate().passages())
        part = self._part()
        unfinished = part.with_suffix(part.suffix + ".tmp")
        unfinished.write_text(json.dumps(self._events))
        unfinished.rename(part)  # rank 0 sees all of it or nothing
        if self._rank == 0:
            wanted = [self._part(rank) for rank in range(self._size)]
            end = time.monotonic() + _PATIENCE
            while time.monotonic() < end and not all(path.exists() for path in wanted):
                time.sleep(0.05)
            there = [path for path in wanted if path.exists()]
            merge(self._file, there)
            if len(there) < len(wanted):
                print(
                    f"commsched: {self._file} holds {len(there)} of {self._size} ranks; merge the others'"
                    f" parts with python -m commsched.optimizer.reports {self._file} {self._file}.rank*",
                    file=sys.stderr,
                )
            for path in there:
                path.unlink()


def merge(file: Path, parts: Iterable[Path]) -> None:
    """Write one trace of several ranks' parts into ``file``; its times start at the first event."""
    events = [event for part in parts for event in json.loads(part.read_text())]
    start = min((event["ts"] for event in events), default=0.0)
    for event in events:
        event["ts"] = round(event["ts"] - start, 3)
    for rank in sorted({event["pid"] for event in events}):
        events.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}})
        for lane, number in _LANES.items():
            events.append(
                {"name": "thread_name", "ph": "M", "pid": rank, "tid": number, "args": {"name": lane}}
            )
    file.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def main(arguments: list[str]) -> int:
    if len(arguments) < 2:
        print("usage: python -m commsched.optimizer.reports FILE PART [PART ...]", file=sys.stderr)
        return 2
    merge(Path(arguments[0]), [Path(part) for part in arguments[1:]])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
