"""From raw measurements to figures: medians, ratios, shares; and their table."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import psutil

from dnn_bench import models
from dnn_bench.baselines import LIMIT, OURS, PEER
from dnn_bench.command_line import console, table
from scheduler import policies
from scheduler.bounds import lower_bound, trivial_bound
from scheduler.ir.link import Level, Link, fit, network_link
from scheduler.ir.profile import Layer, Profile
from scheduler.simulate.simulator import simulate

OK, WRONG, FAILED, MISSING = "ok", "wrong", "failed", "missing"
Block = dict[str, Any]


@dataclass
class Row:
    """One baseline's raw results; `repetitions` holds, per repetition, each rank's block."""

    name: str
    kind: str
    status: str = OK
    reason: str = ""
    error: float | None = None  # of the first steps, relative to one process
    repetitions: list[list[Block]] = field(default_factory=list)
    stolen: list[float] = field(default_factory=list)  # share of the processors' time, per repetition
    predicted: float | None = None
    trace: dict[str, Any] | None = None
    changes: dict[str, Any] = field(default_factory=dict)  # to fields of the job
    searches: bool = False  # as of its baseline

    @property
    def times(self) -> list[float]:
        """Seconds per iteration, one figure per repetition.

        Ranks that exchange gradients keep step, and their mean is the steadiest figure. The ranks of a limit
        do not wait for each other: a job is as fast as the slowest of them.
        """
        whole = max if self.kind == LIMIT else statistics.mean
        return [whole(ranks) for ranks in self.by_rank]

    @property
    def by_rank(self) -> list[list[float]]:
        """Each rank's mean over its iterations, per repetition."""
        return [[statistics.mean(block["iterations"]) for block in blocks] for blocks in self.repetitions]

    def mean(self, name: str) -> float:
        """A figure's mean over ranks and repetitions."""
        return statistics.mean(block[name] for blocks in self.repetitions for block in blocks)

    @property
    def recorded(self) -> bool:
        """Whether its communication was recorded."""
        return self.trace is not None and bool(self.trace["operations"])

    @property
    def measured(self) -> bool:
        return self.status == OK and bool(self.repetitions)


def summarise(
    rows: Sequence[Row], *, samples: int, bounds: Sequence[float], rate: float | None
) -> list[dict[str, Any]]:
    """Figures per row; `samples` is the global batch, `bounds` the lower bound in each repetition, `rate` a
    link's bytes per second.
    """
    by_name = {row.name: row for row in rows if row.measured}
    local, floor = by_name.get("local"), by_name.get("floor")
    best = fastest(rows, "peer")
    kept = ("name", "kind", "status", "reason", "error", "predicted", "trace", "changes")
    found = [{name: getattr(row, name) for name in kept} for row in rows]
    for row, figures in zip(rows, found, strict=True):
        if not row.measured:
            continue
        time = statistics.median(row.times)
        figures |= {
            "time": time,
            "low": min(row.times),
            "high": max(row.times),
            "times": row.times,
            "by_rank": row.by_rank,
            "stolen": row.stolen,
            "throughput": None if row.name == "wire" else samples / time,
            "throughputs": [samples / value for value in row.times],
            **{name: row.mean(name) for name in ("forward", "backward", "step", "cpu", "sent")},
            "memory": max(block["memory"] for blocks in row.repetitions for block in blocks),
            "utilisation": row.mean("sent") / rate / time if rate else None,
            **split(row, local, floor),
            "to_floor": paired_ratio(row, floor),
            "to_limit": to_limit(row.times, floor.times if floor else [], bounds),
            "to_best_peer": paired_ratio(row, best),
            "best_peer": best.name if best else None,
        }
        if local is not None and row is not local:
            compute = 0.0 if row.name == "wire" else local.mean("cpu")
            figures["communication_cpu"] = figures["cpu"] - compute
    return found


def fastest(rows: Sequence[Row], kind: str) -> Row | None:
    """The row of this kind that is fastest within repetitions."""
    # One with a cheaper optimizer is no measure for the others.
    candidates = [row for row in rows if row.kind == kind and row.measured and not row.changes]
    # All are compared with one that has been timed in every repetition.
    longest = max(candidates, key=lambda row: len(row.repetitions), default=None)
    return min(candidates, key=lambda row: paired_ratio(row, longest) or 0.0, default=None)


def split(row: Row, local: Row | None, floor: Row | None) -> dict[str, float | None]:
    """The time as compute, overhead (what moving the bytes costs the compute) and exposed communication."""
    if local is None or row.name == "wire":
        return {"compute": None, "overhead": None, "exposed": None}
    time, compute = statistics.median(row.times), statistics.median(local.times)
    contention = 0.0 if floor is None or row is local else max(0.0, statistics.median(floor.times) - compute)
    compute = min(compute, time)
    overhead = min(contention, time - compute)
    return {"compute": compute, "overhead": overhead, "exposed": time - compute - overhead}


def paired_ratio(row: Row, other: Row | None) -> float | None:
    """The median over repetitions of the ratio of the two, so that the machine's drift cancels."""
    if other is None:
        return None
    return statistics.median(a / b for a, b in zip(row.times, other.times, strict=False))


def disturbances(rows: Sequence[Row]) -> list[str]:
    """The share of processor time that other users of the physical machine took."""
    shares = [(share, row.name) for row in rows if row.name != "wire" for share in row.stolen]
    worst, name = max(shares, default=(0.0, ""))
    if worst <= DISTURBED:
        return []
    usual = statistics.mean(share for share, _ in shares)
    return [
        f"others on this physical machine took {worst:.0%} of the processors' time while {name} was timed,"
        f" in every try (steal; {usual:.1%} on average): take more repetitions, or another hour"
    ]


def to_limit(times: Sequence[float], floors: Sequence[float], bounds: Sequence[float]) -> float | None:
    """Ratio to the larger of the floor and the scheduler's lower bound of the same repetition (their median),
    so that the machine's drift cancels.
    """
    both = [max(pair) for pair in zip(floors, bounds, strict=False)]
    limits = both or floors or bounds
    pairs = zip(times, limits, strict=False)
    return statistics.median(time / limit for time, limit in pairs) if limits else None


# Column, figure of a row (seconds are shown in ms), and how it is written.
COLUMNS = (
    ("{unit}/s", "throughput", ".1f"),
    ("exposed", "exposed", "ms"),
    ("link", "utilisation", ".0%"),
    ("sent MB", "megabytes_sent", ".1f"),
    ("predicted", "predicted", "ms"),
    ("RAM MB", "megabytes", ".0f"),
    ("comm CPU", "communication_cpu", "ms"),
    ("/floor", "to_floor", ".2f"),
    ("/limit", "to_limit", ".2f"),
    ("/best peer", "to_best_peer", ".2f"),
)


def show(report: dict[str, Any]) -> None:
    output = console()
    unit = models.unit(report["job"]["model"])
    columns = ["baseline", "ms/iter", "range", *(name.format(unit=unit) for name, _, _ in COLUMNS)]
    found = table(title(report), columns, ["baseline"])
    for entry in report["baselines"]:
        found.add_row(entry["name"], *cells(entry), style="bold" if entry["kind"] == "commsched" else None)
    output.print(found)
    for line in [*notes(report), *throughput_lines(report)]:
        output.print(line, markup=False, highlight=False)


def exit_status(report: dict[str, Any]) -> int:
    """The status of a command that has made this report."""
    failed = any(entry["status"] in (WRONG, FAILED) for entry in report["baselines"])
    return 130 if report["interrupted"] else int(failed)


def title(report: dict[str, Any]) -> str:
    job, place = report["job"], report["place"]
    where = f"{place['ranks']} ranks on this machine"
    if place["kind"] == "emulated hosts":
        where = f"{place['hosts']} hosts at {', '.join(sorted(set(place['links'])))}"
        if place.get("per_host", 1) > 1:
            where += f", {place['per_host']} ranks on each"
    return f"{job['model']}, {job['batch']} per rank, {where}"


def cells(entry: dict[str, Any]) -> list[str]:
    if "time" not in entry:
        return [entry["status"]]
    figures = {**entry, "megabytes": entry["memory"] / 1e6, "megabytes_sent": entry["sent"] / 1e6}
    others = [shown(figures.get(name), form) for _, name, form in COLUMNS]
    return [ms(entry["time"]), f"{ms(entry['low'])}-{ms(entry['high'])}", *others]


def notes(report: dict[str, Any]) -> list[str]:
    """Notes below the table: limits, reasons for empty rows, whether it is complete."""
    lines = []
    if report["bound"]:
        line = f"lower bound for the measured profile and link: {ms(report['bound'])} ms"
        beside = report.get("bound_beside")
        if beside:
            line += f"; with the compute as it is beside the same traffic: {ms(beside)} ms"
        lines.append(line)
    lines += absent(report)
    for entry in report["baselines"]:
        if entry["status"] == OK and entry["reason"]:
            lines.append(f"{entry['name']}: {entry['reason']}")
        if entry.get("changes") and "time" in entry:
            changes = ", ".join(f"{name}={value}" for name, value in entry["changes"].items())
            lines.append(f"{entry['name']}: trained with {changes}")
    lines += report["doubts"]
    if not report["effort"]["interleaved"]:
        lines.append("memory is short: the baselines ran one after the other, not in turn")
    if report["interrupted"]:
        lines.append("interrupted: the figures are of what was measured until then")
    return lines


def absent(report: dict[str, Any]) -> list[str]:
    """Which baselines have no figures, and why."""
    return [
        f"{entry['name']}: {entry['status']}: {entry['reason'].strip().partition(chr(10))[0]}"
        for entry in report["baselines"]
        if entry["status"] != OK
    ]


def throughput_lines(report: dict[str, Any]) -> list[str]:
    """One line per baseline, worded as Horovod's benchmark words it."""
    unit, ranks = models.unit(report["job"]["model"]), report["place"]["ranks"]
    kind = "GPU" if report["job"]["device"].startswith("cuda") else "CPU"
    lines = []
    for entry in report["baselines"]:
        if entry.get("throughput"):
            rates = entry["throughputs"]
            mean, margin = statistics.mean(rates), 1.96 * statistics.pstdev(rates)
            lines.append(f"{entry['name']}: Total {unit}/sec on {ranks} {kind}(s): {mean:.1f} +-{margin:.1f}")
    return lines


def shown(value: float | None, form: str) -> str:
    if value is None:
        return ""
    return f"{value * 1e3:.0f}" if form == "ms" else format(value, form)


ms = partial(shown, form="ms")


# -- the scheduler's predictions for a measured profile: the lower bound, and the time of each policy --------

Rounds = Sequence[Sequence[dict[str, Any]]]  # profiles, of every repetition every rank's
# By limit: the command that ranks also run in every repetition, since the machine's speed changes.
MEASURED: dict[str, tuple[Any, ...]] = {"local": ("profile", 2), "floor": ("profile", 2), "wire": ("link",)}
Measured = dict[str, list[Any]]  # per limit and repetition, every rank's
SCALES = (2, 4, 8, 16, 32)
ROUGH_FIT = 0.15  # error of the link's fit beyond which it is said
FEWER = 0.8  # of the bytes
ROUGH_BOUND = 0.05  # how much a baseline may be below its lower bound, which was measured too


def predictions(measured: Measured, rows: Sequence[Row], ranks: int, per_host: int = 1) -> dict[str, Any]:
    """What the scheduler makes of profiles and link, as JSON-ready data.

    More ranks are predicted where each has a link of its own. With several ranks a host, the link measured is
    the one between hosts alone: a bound for every exchange, but no exchange's own time.
    """
    found: dict[str, Any] = {"profile": None, "link": None, "bound": None, "bound_beside": None}
    found |= {"bounds": [], "bounds_beside": [], "scaling": {}, "doubts": []}
    alone, beside = measured["local"], measured["floor"]
    if not alone or not measured["wire"]:
        return found
    try:
        link, profile = fit_link(measured["wire"]), merge_profiles(alone, per_host)
        found |= {"profile": profile.to_dict(), "link": link.to_dict()}
        found |= {"bound": lower_bound(profile, link), "bounds": bounds_of(alone, alone, link, per_host)}
        if beside:
            profile = with_times_of(profile, merge_profiles(beside, per_host))
            found["bound_beside"] = lower_bound(profile, link)
            found["bounds_beside"] = bounds_of(alone, beside, link, per_host)
    except ValueError as error:
        found["doubts"].append(f"no lower bound and no predictions: {error}")
        return found
    for row in (row for row in rows if row.kind == OURS):
        try:
            if per_host == 1 and (curve := scaling(row.name, profile, link, ranks)):
                found["scaling"][row.name] = curve
        except ValueError as error:
            found["doubts"].append(f"no prediction for {row.name}: {error}")
    # Split backwards may be faster than the bound for autograd's order.
    bounds = {PEER: found["bound"], OURS: trivial_bound(profile, link)}
    found["doubts"] += doubts(link, bounds, rows)
    return found


def merge_profiles(rounds: Rounds, per_host: int = 1) -> Profile:
    """One profile from every rank's in every repetition: of each repetition the slowest host's, for which the
    others wait; per layer the median over the repetitions.

    A host's is the mean of its ranks'. They share its processors, which one rank may have more of while they
    are timed: then the others take longer than all of them do in a step, and a bound would be too high.
    """
    slowest = []
    for ranks in rounds:
        hosts = (map(Profile.from_dict, ranks[at : at + per_host]) for at in range(0, len(ranks), per_host))
        means = (_combined(list(host), statistics.mean) for host in hosts)
        slowest.append(max(means, key=lambda profile: profile.compute))
    return _combined(slowest, median)


def _combined(profiles: Sequence[Profile], middle: Callable[[Iterable[float]], float]) -> Profile:
    layers = tuple(
        Layer(
            same[0].name, middle(la.forward for la in same), middle(la.backward for la in same), same[0].bytes
        )
        for same in zip(*(profile.layers for profile in profiles), strict=True)
    )
    update = middle(profile.update_per_byte for profile in profiles)
    return Profile(profiles[0].name, layers, update, profiles[0].source)


def with_times_of(profile: Profile, other: Profile) -> Profile:
    """The same model with the layers' times of another run. Updates stay: a floor's end is its exchange's."""
    return replace(other, update_per_byte=profile.update_per_byte, source="measured beside the same traffic")


def fit_link(rounds: Sequence[Sequence[Sequence[tuple[int, float]]]]) -> Link:
    """The link from every rank's timings in every repetition: a collective has ended when its last rank has,
    and one repetition in which the machine did something else must not make the link slower than it is.
    """
    times: dict[int, list[float]] = {}
    for ranks in rounds:
        for same in zip(*ranks, strict=True):
            times.setdefault(same[0][0], []).append(max(seconds for _, seconds in same))
    return fit(list(times), [median(several) for several in times.values()], "measured")


def doubts(link: Link, bounds: Mapping[str, float], rows: Sequence[Row]) -> list[str]:
    """Signs that link or compute were slower while they were timed alone than beside the baselines."""
    found = []
    if link.error > ROUGH_FIT:
        found.append(
            f"the link's times scatter by {link.error:.0%} about a start-up and a rate, and bounds and"
            " predictions with them; take more repetitions, on a machine that does nothing else"
        )
    whole = sum(row.mean("sent") for row in rows if row.name == "wire" and row.measured)
    for row in rows:
        if row.changes:
            continue  # the profile is of another training
        if row.searches:
            continue  # it may send parts of gradients early
        bound = bounds.get(row.kind, 0.0)
        if row.measured and row.mean("sent") < FEWER * whole:
            continue  # by rows, which the bound does not know
        if row.measured and median(row.times) < (1 - ROUGH_BOUND) * bound:
            less = 1 - median(row.times) / bound
            found.append(
                f"{row.name} is {less:.0%} faster than the lower bound, which cannot be: link or compute were"
                " slower when they were timed; take more repetitions"
            )
    return found


def bounds_of(alone: Rounds, compute: Rounds, link: Link, per_host: int = 1) -> list[float]:
    """The lower bound of every repetition, for the layers' times in `compute`."""
    rounds = ([merge_profiles([one], per_host) for one in several] for several in (alone, compute))
    return [lower_bound(with_times_of(*pair), link) for pair in zip(*rounds, strict=False)]


def scaling(policy: str, profile: Profile, link: Link, measured_at: int) -> list[tuple[int, float]]:
    """(ranks, predicted seconds) for more ranks on links like the measured one, by the engine's exchange."""
    from commsched.backends.cpu import flat

    if measured_at < 2:
        return []
    # Measured was an exchange among `measured_at` ranks, in which a share of every message stays at home.
    beta = link.beta * measured_at / (measured_at - 1)
    name, curve = "optimal" if policy.startswith("auto") else policy, []
    for ranks in SCALES:
        wider = network_link([Level(ranks, link.alpha, beta)], flat(ranks))
        program = policies.plan(profile, wider, name, ranks=ranks)
        curve.append((ranks, simulate(program, profile, wider).period))
    return curve


# -- the machine and the versions a report was made with -----------------------------------------------------

PACKAGES = ("torch", "horovod", "numpy", "numba", "commsched")
DISTURBED = 0.05  # of the processors' time taken by others, beyond which a measurement is taken again
T = TypeVar("T")


def describe_machine() -> dict[str, Any]:
    cpus = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": " ".join(["python -m dnn_bench", *sys.argv[1:]]),
        "processor": cpus[0].partition(":")[2].strip() if cpus else platform.machine(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": versions,
    }


def stolen_share(before: Any, after: Any) -> float:
    """The share of the processors' time that a hypervisor gave to others between two readings of
    `psutil.cpu_times`; 0 where the system does not tell.
    """
    # `user` has the time of this machine's guests already.
    kinds = [kind for kind in after._fields if not kind.startswith("guest")]
    spent = {kind: getattr(after, kind) - getattr(before, kind) for kind in kinds}
    total = sum(spent.values())
    return spent.get("steal", 0.0) / total if total > 0 else 0.0


def least_disturbed(
    measure: Callable[[], T], tries: int, again: Callable[[float], None] = lambda share: None
) -> tuple[T, float]:
    """What `measure` returns, and the share that was stolen meanwhile: of the first try that others left
    alone, or of the least disturbed one. Which one counts depends on what was stolen, never on what was
    measured. `again` is told the share before each further try.
    """
    found: list[tuple[T, float]] = []
    while len(found) < tries and (not found or found[-1][1] > DISTURBED):
        if found:
            again(found[-1][1])
        before = psutil.cpu_times()
        result = measure()
        found.append((result, stolen_share(before, psutil.cpu_times())))
    return min(found, key=lambda one: one[1])
