"""The exceptions commsched raises. Nothing here imports torch."""

from __future__ import annotations


class CommError(RuntimeError):
    """Communication failed or can not be set up; the message names the rank, what was expected and what to
    do.

    Wrong arguments that can be told on one rank alone are ``ValueError``; whatever needs another rank to be
    wrong (mismatched shapes, a dead process, a time-out, a broken launcher environment) is a ``CommError``.
    """


# Horovod scripts write `except hvd.HorovodInternalError`: the same failures, under the name they know.
HorovodInternalError = CommError


class NotInitializedError(ValueError):
    """Something was asked that only exists between ``init()`` and ``shutdown()`` (a ``ValueError``, as in
    Horovod)."""

    def __init__(self) -> None:
        super().__init__("commsched is not initialized; call commsched.init() first")
