"""The runtime under commsched: launch environment, rendezvous, engines, and Horovod's API over them.

For the other parts of commsched: ``data_group`` (private process groups), ``control`` (objects between
ranks), ``state.engine()`` (the running engine), ``launch.detect_launch`` (free of torch).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from commsched.runtime import control as control
    from commsched.runtime.data import data_group as data_group


def __getattr__(name: str) -> Any:
    # Late, so that the command line can read the launch environment without importing torch.
    if name == "data_group":
        return import_module("commsched.runtime.data").data_group
    if name == "control":
        return import_module("commsched.runtime.control")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
