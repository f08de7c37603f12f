"""The one engine of this process, between ``init()`` and ``shutdown()``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from commsched.errors import NotInitializedError

if TYPE_CHECKING:
    from commsched.collectives.carrier import Engine

_engine: Engine | None = None
_epoch = 0


def engine() -> Engine:
    """The running engine; ``NotInitializedError`` outside of init() ... shutdown()."""
    if _engine is None:
        raise NotInitializedError
    return _engine


def current() -> Engine | None:
    """The running engine, None where there is none."""
    return _engine


def epoch() -> int:
    """Counts init() and shutdown() calls: what was cached under another number belongs to an engine that is
    gone."""
    return _epoch


def install(new: Engine | None) -> None:
    global _engine, _epoch
    _engine = new
    _epoch += 1
