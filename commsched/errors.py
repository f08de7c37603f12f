"""The exceptions commsched raises. This module does not import torch."""

from __future__ import annotations

# Scripts also catch these two by their home in Horovod. Where Horovod is installed they are its own, and a
# CommError is a HorovodInternalError of Horovod. Importing that module takes 3 ms and imports no torch.
try:
    from horovod.common.exceptions import HorovodInternalError as _Failure
    from horovod.common.exceptions import HostsUpdatedInterrupt
except Exception:  # not installed, or broken: that is reported where it is needed
    _Failure = RuntimeError

    class HostsUpdatedInterrupt(RuntimeError):  # type: ignore[no-redef]
        """The hosts of an elastic job have changed; with ``skip_sync`` no rank was added."""

        def __init__(self, skip_sync: bool) -> None:
            self.skip_sync = skip_sync


class CommError(_Failure):
    """Communication failed or cannot be set up; the message names the rank, what was expected and what to do.

    Arguments that one rank alone can recognise as wrong raise ``ValueError``. Errors that involve another
    process (mismatched shapes, a dead rank, a time-out, a broken launcher environment) are a ``CommError``.
    """


class CheckpointError(CommError):
    """A checkpoint cannot be saved or loaded, though no rank is lost; raised on all ranks alike.

    The cause is the folder, the disk or what the ranks save. Another try would fail in the same way:
    ``elastic.run`` raises the error where it goes on after any other ``CommError``.
    """


class SettingsError(CommError):
    """The ranks' optimizers have other settings, such as another learning rate; raised on all of them alike.

    ``elastic.run`` raises it, too: rank 0's last commit may have the wrong ones, and would give them to all.
    """


# Horovod's name for the same failures: its scripts write `except hvd.HorovodInternalError`.
HorovodInternalError = CommError


class NotInitializedError(ValueError):
    """A function was called before ``init()`` or after ``shutdown()`` (a ``ValueError``, as in Horovod)."""

    def __init__(self) -> None:
        super().__init__("commsched is not initialized; call commsched.init() first")
