"""Checks that several records share."""

from __future__ import annotations

import math
from typing import Any


def check_numbers(record: Any, where: str, *fields: str) -> None:
    """Raise ``ValueError`` unless these fields are finite and at least 0; ``where`` names the record."""
    for field in fields:
        value = getattr(record, field)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value < 0:
            raise ValueError(f"{where}: {field} must be a finite number of at least 0, got {value!r}")
