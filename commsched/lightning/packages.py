"""Finds Lightning: the package ``lightning``, or ``pytorch_lightning`` with ``lightning_fabric``."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def _names() -> tuple[str, str]:
    """Return the names of the packages with Trainer and Fabric; of two installed ones, the imported one."""
    one, two = ("lightning.pytorch", "lightning.fabric"), ("pytorch_lightning", "lightning_fabric")
    imported = [names for names in (one, two) if names[0] in sys.modules]
    installed = [names for names in (one, two) if all(find_spec(name.split(".")[0]) for name in names)]
    for names in (*imported, *installed):
        return names
    raise ModuleNotFoundError(
        "commsched.lightning needs Lightning, which is not installed: pip install 'commsched[lightning]'"
    )


_trainer, _fabric = _names()


def trainer(module: str) -> Any:
    """Import a module of the package that holds ``Trainer``."""
    return import_module(f"{_trainer}.{module}")


def fabric(module: str) -> Any:
    """Import a module of the package that holds ``Fabric``."""
    return import_module(f"{_fabric}.{module}")
