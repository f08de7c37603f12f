"""Every environment variable that commsched itself defines, as documented fields of one dataclass read once.

What launchers set (``HOROVOD_RANK``, ``RANK``, ``OMPI_COMM_WORLD_RANK``, ...) is read in
``process/launch.py``.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields


def _setting(variable: str, default: object, doc: str, choices: tuple[str, ...] = ()) -> object:
    """One field: which variable it is read from, what it means and, where it is an enumeration, what is
    allowed."""
    return field(default=default, metadata={"variable": variable, "doc": doc, "choices": choices})


@dataclass(frozen=True)
class Settings:
    """commsched's settings; ``python -c 'import commsched.env as e; print(e.describe())'`` prints them."""

    timeout: float = _setting(  # type: ignore[assignment]
        "COMMSCHED_TIMEOUT",
        300.0,
        "seconds after which a rank that waits for another gives up with CommError",
    )
    host_timeout: float = _setting(  # type: ignore[assignment]
        "COMMSCHED_HOST_TIMEOUT",
        25.0,
        "seconds after which a host that does not answer counts as lost; its ranks may compute for longer",
    )
    runtime: str = _setting(  # type: ignore[assignment]
        "COMMSCHED_RUNTIME",
        "",
        "which engine carries the collectives; unset: horovod under horovodrun, else torch",
        ("", "horovod", "torch"),
    )
    launcher: str = _setting(  # type: ignore[assignment]
        "COMMSCHED_LAUNCHER",
        "",
        "whose variables to believe where several launchers' are set",
        ("", "horovodrun", "torchrun", "mpirun", "none"),
    )
    master_addr: str = _setting(  # type: ignore[assignment]
        "COMMSCHED_MASTER_ADDR", "", "address of rank 0, where the launcher can not tell it (rarely needed)"
    )
    master_port: int = _setting(  # type: ignore[assignment]
        "COMMSCHED_MASTER_PORT", 0, "free port on rank 0's host; needed together with COMMSCHED_MASTER_ADDR"
    )
    transport: str = _setting(  # type: ignore[assignment]
        "COMMSCHED_TRANSPORT", "", "how the optimizer moves bytes; unset: chosen for the device"
    )
    timeline: str = _setting(  # type: ignore[assignment]
        "COMMSCHED_TIMELINE",
        "",
        "file in which the optimizer records what every rank computed and sent (chrome://tracing)",
    )
    nccl_register: str = _setting(  # type: ignore[assignment]
        "COMMSCHED_NCCL_REGISTER",
        "",
        "1: the optimizer's buckets stand in memory registered with NCCL; the same on all ranks",
        ("", "0", "1"),
    )


def _parse(variable: str, text: str, default: object) -> object:
    if isinstance(default, str):
        return text
    try:
        value = float(text) if isinstance(default, float) else int(text)
    except ValueError:
        raise ValueError(f"{variable} must be a number, but is {text!r}") from None
    if value < 0 or (value == 0 and isinstance(default, float)):
        raise ValueError(f"{variable} must be positive, but is {text!r}")
    return value


def read_settings(environ: Mapping[str, str]) -> Settings:
    """The settings in `environ`; ``ValueError`` names a variable whose value is not allowed."""
    values: dict[str, object] = {}
    for item in fields(Settings):
        variable, choices = item.metadata["variable"], item.metadata["choices"]
        text = environ.get(variable, "").strip()
        if not text:
            continue
        value = _parse(variable, text, item.default)
        if choices and value not in choices:
            raise ValueError(f"{variable} must be one of {', '.join(filter(None, choices))}, but is {text!r}")
        values[item.name] = value
    return Settings(**values)  # type: ignore[arg-type]


@functools.cache
def settings() -> Settings:
    """The settings of this process, read from ``os.environ`` on the first call and again by every
    ``init()``."""
    return read_settings(os.environ)


def describe() -> str:
    """One line per variable: name, default and meaning."""
    return "\n".join(
        f"{f.metadata['variable']:<24} {f.default!r:<8} {f.metadata['doc']}" for f in fields(Settings)
    )
