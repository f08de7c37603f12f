"""What one check found."""

from __future__ import annotations

from dataclasses import dataclass

OK, NOTE, PROBLEM = "ok", "note", "problem"


@dataclass(frozen=True)
class Finding:
    """One line of the report; `advice` says what to do, and is empty where nothing needs to be done."""

    check: str
    level: str
    found: str
    advice: str = ""
