"""Memory shared by the ranks of one host: each rank makes a board, and its neighbours open it.

A board is an anonymous file (memfd) that neighbours open as `/proc/PID/fd/NUMBER`. It has no name in
`/dev/shm` or elsewhere: the kernel frees it when the last process that has it mapped ends, however that ends.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

import torch
from torch import Tensor

from comm_core import _C
from comm_core.errors import EngineError

_TOKEN = 16  # bytes at the start of a board, by which neighbours know it
_TEXT = 320  # bytes that each rank tells the others about its obstacle
_SEGMENT = 4096
_LEAST, _MOST = 16 << 10, 128 << 10  # bytes of a segment, unless the caller names it
_BOARD = 16 << 20  # bytes of a board, unless segments get too short


class NotShared(EngineError):
    """The ranks of a host cannot share memory; the text says which and why, and is the same on every rank."""


@contextmanager
def open_boards(
    channel: _C.Channel,
    rank: int,
    hosts: Sequence[int],
    size: int,
    timeout_seconds: float = 300.0,
    name: str = "commsched board",
) -> Iterator[list[int]]:
    """Open the boards of `size` bytes of this host's ranks: their files in rank order, closed at the end.

    Every rank calls, with the same `hosts` (each rank's host). `channel` connects them and is idle. Raises
    `NotShared` on every rank where the ranks of any host cannot share memory.
    """
    exchange = _C.DirectTransport(channel, rank, len(hosts), _SEGMENT, 1)
    exchange.set_timeout(timeout_seconds)
    gather = partial(_gathered, exchange, rank, len(hosts))
    neighbours = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    files: dict[int, int] = {}
    try:
        token, obstacle = secrets.token_bytes(_TOKEN), ""
        try:
            files[rank] = _new_board(token, size, name)
        except OSError as error:
            obstacle = f"rank {rank} cannot make a file in memory (memfd_create): {error}"
        facts = gather(
            torch.tensor([os.getpid(), files.get(rank, -1), *token], dtype=torch.int64, device="cpu"), 0
        )
        for other in neighbours:
            if other != rank and not obstacle:
                pid, number, *expected = facts[other].tolist()
                obstacle = _open_neighbour(files, rank, other, pid, number, bytes(expected), name)
        texts = gather(_as_tensor(obstacle), 1)
        read = (bytes(text.tolist()).rstrip(b"\0").decode(errors="replace") for text in texts)
        obstacles = list(filter(None, read))
        if obstacles:
            raise NotShared(
                f"the ranks of a host cannot share memory: {obstacles[0]}", kind="usage", rank=rank
            )
        yield [files[other] for other in neighbours]
    finally:
        for file in files.values():
            os.close(file)


def two_tier_transport(
    channel: _C.Channel,
    rank: int,
    hosts: Sequence[int],
    segment_bytes: int | None = None,
    depth: int = 4,
    timeout_seconds: float = 300.0,
) -> _C.TwoTierTransport:
    """Return the exchange in two tiers over new boards. Collective; raises like `open_boards`.

    Segments have 128 KB by default, or what keeps a board of many ranks within 16 MB: whole KB, which hold
    whole blocks of int8 and fp8.
    """
    if segment_bytes is None:
        segment_bytes = max(_LEAST, min(_MOST, _BOARD // (2 * depth * len(hosts)))) // 1024 * 1024
    size = _C.TwoTierTransport.board_bytes(len(hosts), segment_bytes, depth)
    with ExitStack() as opened:
        boards = opened.enter_context(open_boards(channel, rank, hosts, size, timeout_seconds))
        memory: list[int] = []
        with suppress(NotShared):
            if len(set(hosts)) == 1 < len(hosts):
                pages = os.sysconf("SC_PHYS_PAGES") * 4 // max(4, len(hosts))  # taken only where written
                room = pages * os.sysconf("SC_PAGE_SIZE")
                shared = open_boards(channel, rank, hosts, room, timeout_seconds, "commsched gradients")
                memory = opened.enter_context(shared)
        transport = _C.TwoTierTransport(channel, rank, hosts, boards, segment_bytes, depth, memory)
    transport.set_timeout(timeout_seconds)
    return transport


def _new_board(token: bytes, size: int, name: str) -> int:
    file = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        os.ftruncate(file, size)
        os.pwrite(file, token, 0)
    except OSError:
        os.close(file)
        raise
    return file


def _open_neighbour(
    files: dict[int, int], rank: int, other: int, pid: int, number: int, token: bytes, name: str
) -> str:
    """Add the neighbour's board to `files`; return why that is not possible, "" if it is."""
    if number < 0:
        return ""  # the other rank itself says why it has none
    path = f"/proc/{pid}/fd/{number}"
    who = f"rank {rank} (user {os.getuid()}) cannot open the board of rank {other}, {path}"
    advice = "do both run in one container, as the same user? Else use transport='direct' or 'ring'"
    try:
        if f"memfd:{name}" not in os.readlink(path):
            return f"{who}: that is another file ({os.readlink(path)}); {advice}"
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        return f"{who}: {error.strerror}; {advice}"
    if os.pread(file, _TOKEN, 0) != token:
        os.close(file)
        return f"{who}: that is the board of another job; {advice}"
    files[other] = file
    return ""


def _gathered(exchange: _C.Transport, rank: int, size: int, own: Tensor, step: int) -> Tensor:
    """Return every rank's one-dimensional tensor as rows."""
    rows = torch.zeros(size, own.numel(), dtype=own.dtype, device="cpu")
    rows[rank] = own
    exchange.all_gather(rows.view(-1), step=step)
    return rows


def _as_tensor(text: str) -> Tensor:
    return torch.tensor(list(text.encode()[:_TEXT].ljust(_TEXT, b"\0")), dtype=torch.uint8, device="cpu")
