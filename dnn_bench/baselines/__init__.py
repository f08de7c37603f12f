"""The baselines of a comparison: real peers as their documentation uses them, limits, and our schedules.

>>> from dnn_bench import baselines
>>> baselines.names()
>>> trainer = baselines.start("ddp_4mb", job)  # in every rank, under the launcher the baseline asks for
>>> trainer.iteration(*trainer.job.local_batch(trainer.rank))

Importing this package does not import torch, so that listing the names is quick.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scheduler import policies
from scheduler.ir.inputs import LARGEST, InputError

if TYPE_CHECKING:
    from dnn_bench.baselines.trainer import Job, Trainer

HERE = "dnn_bench.baselines."
LIMIT, PEER, OURS = "limit", "peer", "commsched"
ROUNDED = "rounded"  # sends gradients in fewer bits, which exact baselines are not compared with
WHOLE = 4000  # MB: one bucket for all
# nn.Embedding(sparse=True), trained by SGD without momentum: torch's momentum of a sparse gradient is a
# sparse tensor to which every step adds all rows of its gradient, so that steps take ever longer.
SPARSE = {"momentum": 0.0, "sparse_embeddings": True}
AS_THEY_COME = ("horovod", "ddp", "fsdp2")  # peers with their default settings


class MissingPeer(ValueError):
    """A baseline that cannot run here; the message says why."""


@dataclass(frozen=True)
class Baseline:
    """One thing to compare: every rank makes the class that `trainer` names, with `options`."""

    name: str
    kind: str
    trainer: str
    options: dict[str, Any] = field(default_factory=dict)
    needs: str = "torch"  # the package without which it cannot run
    launcher: str = "torch"  # "torch": RANK and MASTER_ADDR in the environment; "horovod": horovodrun
    environment: dict[str, str] = field(default_factory=dict)
    searches: bool = False  # its plan, which may send parts of gradients early
    exact: bool = True  # its parameters can be compared with one process's
    changes: dict[str, Any] = field(default_factory=dict)  # to fields of the job
    sums_rows: bool = False  # rounds a row of a sparse gradient once, not once for each of its uses
    per_host: int = 1  # the fewest ranks on each host with which it differs from another baseline

    def adapt(self, job: Job) -> Job:
        """Return the job as this baseline trains it."""
        return replace(job, **self.changes)

    def for_ranks(self) -> dict[str, Any]:
        """Return what a rank makes its trainer of; an older checkout may lack the other fields."""
        fields = ("name", "kind", "trainer", "options", "needs", "changes")
        return {name: getattr(self, name) for name in fields}

    def compared(self, job: Job) -> Job:
        """Return the job as the process trains it that this baseline is compared with."""
        return replace(self.adapt(job), sparse_embeddings=False) if self.sums_rows else self.adapt(job)


def _entries() -> list[Baseline]:
    return [
        Baseline("local", LIMIT, HERE + "peers.Local", exact=False),
        Baseline("floor", LIMIT, HERE + "peers.Floor", exact=False),
        Baseline("wire", LIMIT, HERE + "peers.Wire", exact=False),
        _ddp("ddp", None),
        *(_ddp(f"ddp_{size}mb", size) for size in (1, 4, 8)),
        _horovod("horovod", None),
        _horovod("horovod_4mb", 4),
        replace(_horovod("horovod_sparse", None), changes=SPARSE),
        _fsdp("fsdp2"),
        _fsdp("fsdp2_keep"),
        _fsdp("hsdp"),
        _fsdp("hsdp_keep"),
        Baseline("zero1", PEER, HERE + "peers.Zero1"),
        *(
            Baseline(schedule, OURS, HERE + "peers.Commsched", {"schedule": schedule})
            for schedule in policies.names()
        ),
        _auto("auto"),
        _auto("auto_dense", row_sparse=False),
        replace(_auto("auto_kept"), trainer=HERE + "peers.Kept"),
        replace(_auto("auto_sparse"), changes=SPARSE, sums_rows=True),
        _rounded("ddp_bf16", "DDP", "bf16"),
        # With several buckets its callbacks start collectives in an order that differs by rank.
        _rounded("ddp_powersgd", "DDP", "powersgd", bucket_cap_mb=WHOLE),
        replace(_horovod("horovod_fp16", None), kind=ROUNDED, options={"compression": "fp16"}, exact=False),
        *(_rounded(f"auto_{name}", "Commsched", name) for name in ("bf16", "int8", "fp8")),
    ]


def _ddp(name: str, size: float | None) -> Baseline:
    return Baseline(name, PEER, HERE + "peers.DDP", {"bucket_cap_mb": size})


def _fsdp(name: str) -> Baseline:
    by_host = name.startswith("hsdp")
    options = {"reshard_after_forward": not name.endswith("keep"), "by_host": by_host}
    return Baseline(name, PEER, HERE + "peers.FSDP2", options, per_host=2 if by_host else 1)


def _auto(name: str, **options: Any) -> Baseline:
    return Baseline(name, OURS, HERE + "peers.Commsched", options, searches=True)


def _rounded(name: str, trainer: str, compression: str, **options: Any) -> Baseline:
    options["compression"] = compression
    return Baseline(name, ROUNDED, f"{HERE}peers.{trainer}", options, exact=False)


def _horovod(name: str, size: float | None) -> Baseline:
    # A rank that waits its turn is stopped, which Horovod's own clock must not take for a dead peer.
    environment = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "3600", "HOROVOD_STALL_CHECK_DISABLE": "1"}
    if size is not None:
        environment["HOROVOD_FUSION_THRESHOLD"] = str(round(size * 2**20))
    return Baseline(name, PEER, HERE + "peers.Horovod", {}, "horovod", "horovod", environment)


def _of_checkout(entry: Baseline, checkout: Path) -> Baseline:
    if not any(checkout.glob("comm_core/_C*.so")):
        raise InputError(
            f"{entry.name}@{checkout} needs a checkout with a built extension there: "
            "run `python setup.py build_ext --inplace` in it"
        )
    if sys.version_info < (3, 11):
        raise InputError(f"{entry.name}@{checkout} needs Python 3.11 or newer, not {sys.version.split()[0]}")
    # `python -m` looks into the current folder first, which may be a checkout, too.
    environment = entry.environment | {"PYTHONPATH": str(checkout), "PYTHONSAFEPATH": "1"}
    return replace(entry, name=f"{entry.name}@{checkout.name}", environment=environment)


SIZED = {"ddp": _ddp, "horovod": _horovod}


def names() -> list[str]:
    """Every baseline's name; besides these, `ddp_<N>mb` and `horovod_<N>mb` exist for any size.

    `auto@../before` is `auto` by the code of another checkout, whose extension is built.
    """
    return [entry.name for entry in _entries()]


def get(name: str) -> Baseline:
    """The baseline of this name, in any case."""
    if "@" in name:
        name, _, checkout = name.partition("@")
        return _of_checkout(get(name), Path(checkout).absolute())
    wanted = name.lower().replace("-", "_")
    for entry in _entries():
        if entry.name.replace("_", "") == wanted.replace("_", ""):
            return entry
    sized = re.fullmatch(r"(ddp|horovod)_(\d+(?:\.\d+)?)mb", wanted)
    if sized and 0 < float(sized[2]) <= LARGEST:
        return SIZED[sized[1]](wanted, float(sized[2]))
    raise InputError(
        f"unknown baseline {name!r}; choose of: {', '.join(names())} (ddp_<N>mb and horovod_<N>mb for any N, "
        "and each as NAME@CHECKOUT, by the code of another checkout)"
    )


def require(baseline: Baseline, job: Job | None = None, per_host: int | None = None) -> None:
    """Raise `MissingPeer` if the baseline's package is not installed or its changes do not suit the model, or
    if it needs more than `per_host` ranks on each of several hosts.
    """
    if importlib.util.find_spec(baseline.needs) is None:
        how = "; COMMSCHED_WITH_HOROVOD=1 docker/install.sh builds it" if baseline.needs == "horovod" else ""
        raise MissingPeer(f"{baseline.name} needs the package {baseline.needs}, which is not installed{how}")
    if per_host is not None and per_host < baseline.per_host:
        raise MissingPeer(
            f"{baseline.name} needs at least {baseline.per_host} ranks on each of several hosts, and there is"
            f" {per_host}; use --hosts and --per-host"
        )
    if job is not None and baseline.changes:
        try:
            baseline.adapt(job).outline()
        except ValueError as error:
            raise MissingPeer(str(error)) from None


def start(baseline: str | Baseline, job: Job) -> Trainer:
    """This rank's trainer; every rank of the job calls it."""
    baseline = get(baseline) if isinstance(baseline, str) else baseline
    require(baseline)
    module, _, kind = baseline.trainer.rpartition(".")
    make = getattr(importlib.import_module(module), kind)
    return make(baseline.adapt(job), **baseline.options)
