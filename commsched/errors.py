"""The exceptions commsched raises. This module does not import torch."""

from __future__ import annotations


class CommError(RuntimeError):
    """Communication failed or cannot be set up; the message names the rank, what was expected and what to do.

    Arguments that one rank alone can recognise as wrong raise ``ValueError``. Errors that involve another
    process (mismatched shapes, a dead rank, a time-out, a broken launcher environment) are a ``CommError``.
    """


# Horovod's name for the same failures: its scripts write `except hvd.HorovodInternalError`.
HorovodInternalError = CommError


class NotInitializedError(ValueError):
    """A function was called before ``init()`` or after ``shutdown()`` (a ``ValueError``, as in Horovod)."""

    def __init__(self) -> None:
        super().__init__("commsched is not initialized; call commsched.init() first")
