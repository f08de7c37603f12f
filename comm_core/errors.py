"""The exception that the engine raises."""

from __future__ import annotations


class EngineError(RuntimeError):
    """A failure of the communication engine and its place; -1 and "" stand for "does not apply".

    `kind` is "timeout", "peer_lost", "aborted", "mismatch" (another rank runs a different operation) or
    "usage".
    """

    def __init__(
        self,
        message: str,
        *,
        kind: str,
        rank: int = -1,
        op: str = "",
        bucket: int = -1,
        name: str = "",
        step: int = -1,
        peer: int = -1,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.rank = rank
        self.op = op
        self.bucket = bucket
        self.name = name
        self.step = step
        self.peer = peer
