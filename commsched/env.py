"""The environment variables that commsched defines, as documented fields of one dataclass that is read once.

``process/launch.py`` reads the variables that launchers set (``HOROVOD_RANK``, ``RANK``,
``OMPI_COMM_WORLD_RANK``, ...).
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

LONGEST = 30 * 86400.0  # seconds: threads and stores do not take any number
LAST_PORT = 65535


def _setting(
    variable: str, default: Any, doc: str, choices: tuple[str, ...] = (), most: float = LONGEST
) -> Any:
    """Return a dataclass field that is read from `variable`; empty `choices` allow any value up to `most`."""
    metadata = {"variable": variable, "doc": doc, "choices": choices, "most": most}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Settings:
    """commsched's settings; ``python -c 'import commsched.env as e; print(e.describe())'`` prints them."""

    timeout: float = _setting(
        "COMMSCHED_TIMEOUT",
        1800.0,
        "seconds that a rank waits for another one that runs before it raises CommError; after a tenth of"
        " that, at most 30 s, it says for whom it waits and in what",
    )
    stall_check: float = _setting(
        "HOROVOD_STALL_CHECK_TIME_SECONDS",
        0.0,
        "seconds after which a rank says for whom it waits and in what; unset or 0: that rule",
    )
    stall_check_disable: str = _setting(
        "HOROVOD_STALL_CHECK_DISABLE", "", "1: no rank says for whom it waits", ("", "0", "1")
    )
    stall_shutdown: int = _setting(
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
        0,
        "COMMSCHED_TIMEOUT where that is not set; unset or 0: its default",
        most=int(LONGEST),
    )
    start_timeout: float = _setting(
        "COMMSCHED_START_TIMEOUT", 300.0, "seconds within which all ranks must start and find each other"
    )
    host_timeout: float = _setting(
        "COMMSCHED_HOST_TIMEOUT",
        25.0,
        "seconds without an answer from a host's kernel after which the host counts as lost, however long its"
        " ranks may compute",
    )
    runtime: str = _setting(
        "COMMSCHED_RUNTIME",
        "",
        "library that carries out the collectives; unset: horovod under horovodrun, else torch",
        ("", "horovod", "torch"),
    )
    launcher: str = _setting(
        "COMMSCHED_LAUNCHER",
        "",
        "launcher whose variables are read when those of several are set",
        ("", "horovodrun", "torchrun", "mpirun", "slurm", "none"),
    )
    master_addr: str = _setting(
        "COMMSCHED_MASTER_ADDR", "", "address of rank 0, for launchers that do not provide it (rarely needed)"
    )
    master_port: int = _setting(
        "COMMSCHED_MASTER_PORT",
        0,
        "free port on rank 0's host; needed together with COMMSCHED_MASTER_ADDR",
        most=LAST_PORT,
    )
    job_token: str = _setting(
        "COMMSCHED_JOB_TOKEN",
        "",
        "secret of the job, the same on all ranks: only who has it can connect to one (comm_core/tcp.py);"
        " unset: whoever reaches the job's store can",
    )
    transport: str = _setting(
        "COMMSCHED_TRANSPORT",
        "",
        "transport of the optimizer's buckets: direct, ring, tiers, horovod, stream or plain; unset or"
        " auto: chosen for the device and the hosts",
    )
    wait_for_plan: int = _setting(
        "COMMSCHED_WAIT_FOR_PLAN",
        0,
        "the step, counted from the one whose end begins a search, that takes its plan: always the same one,"
        " and it waits where the search is not over; 1: at once; unset or 0: once the plan is found",
        most=2**53,
    )
    timeline: str = _setting(
        "COMMSCHED_TIMELINE",
        "",
        "file to which the optimizer writes when each rank computed and communicated (chrome://tracing)",
    )
    log_every: int = _setting(
        "COMMSCHED_LOG_EVERY",
        0,
        "rank 0 prints what communication costs every so many steps; unset or 0: never",
        most=2**53,
    )
    metrics_port: int = _setting(
        "COMMSCHED_METRICS_PORT",
        0,
        "each rank serves its metrics to Prometheus on this port plus its local rank; unset or 0: none",
        most=LAST_PORT,
    )
    metrics_address: str = _setting(
        "COMMSCHED_METRICS_ADDRESS",
        "127.0.0.1",
        "address on which ranks serve metrics; 0.0.0.0: all of the host, for anybody who reaches it",
    )
    compare_every: int = _setting(
        "COMMSCHED_COMPARE_EVERY",
        100,
        "ranks compare their optimizers' settings and parameters in the first step, and then every so many"
        " steps; 0: never",
        most=2**53,
    )

    @property
    def given_warning(self) -> float:
        """Seconds after which a rank that waits says so, as Horovod's variables have it; 0: they do not."""
        return math.inf if self.stall_check_disable == "1" else self.stall_check

    @property
    def warning(self) -> float:
        """Seconds after which a rank that waits says so (the engine's channels have the same rule)."""
        return self.given_warning or min(30.0, self.timeout / 10)


def _parse(variable: str, text: str, default: Any, most: float) -> Any:
    """Convert `text` to the type of `default`."""
    if isinstance(default, str):
        return text
    try:
        value = float(text) if isinstance(default, float) else int(text)
    except ValueError:
        raise ValueError(f"{variable} must be a number, but is {text!r}") from None
    is_positive = isinstance(default, float) and default > 0
    if not 0 <= value <= most or (value == 0 and is_positive):
        least = "positive" if is_positive else "at least 0"
        raise ValueError(f"{variable} must be {least} and at most {most:.0f}, but is {text!r}")
    return value


def read_settings(environ: Mapping[str, str]) -> Settings:
    """Return the settings in `environ`; ``ValueError`` names a variable whose value is not allowed."""
    values: dict[str, Any] = {}
    for item in fields(Settings):
        variable, choices = item.metadata["variable"], item.metadata["choices"]
        text = environ.get(variable, "").strip()
        if not text:
            continue
        value = _parse(variable, text, item.default, item.metadata["most"])
        if choices and value not in choices:
            raise ValueError(f"{variable} must be one of {', '.join(filter(None, choices))}, but is {text!r}")
        values[item.name] = value
    if values.get("stall_shutdown"):
        values.setdefault("timeout", float(values["stall_shutdown"]))
    return Settings(**values)


@functools.cache
def settings() -> Settings:
    """Return this process's settings. The first call and every ``init()`` read ``os.environ``."""
    return read_settings(os.environ)


def fusion_threshold() -> int:
    """Return Horovod's setting: the bytes up to which all-reduces that are ready together run as one."""
    variable, default = "HOROVOD_FUSION_THRESHOLD", 2**24
    value: int = _parse(variable, os.environ.get(variable, "").strip() or str(default), default, 2**53)
    return value


def describe() -> str:
    """Return one line per variable: name, default and meaning."""
    return "\n".join(
        f"{f.metadata['variable']:<35} {f.default!r:<8} {f.metadata['doc']}" for f in fields(Settings)
    )
