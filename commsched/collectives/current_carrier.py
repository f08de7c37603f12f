"""The one carrier of this process between ``init()`` and ``shutdown()``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from commsched.errors import NotInitializedError

if TYPE_CHECKING:
    from commsched.collectives.carrier import Carrier

_carrier: Carrier | None = None
_epoch = 0


def carrier() -> Carrier:
    """Return the current carrier; ``NotInitializedError`` before ``init()`` and after ``shutdown()``."""
    if _carrier is None:
        raise NotInitializedError
    return _carrier


def carrier_or_none() -> Carrier | None:
    return _carrier


def epoch() -> int:
    """Return a number that changes with every ``init()`` and ``shutdown()``: a key for caches."""
    return _epoch


def set_carrier(new: Carrier | None) -> None:
    global _carrier, _epoch
    _carrier = new
    _epoch += 1
