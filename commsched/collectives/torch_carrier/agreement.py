"""Do the ranks' requests for one operation fit together? Pure: requests in, one sentence of complaint out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from commsched.collectives.carrier import ReduceOp

Request = Mapping[str, Any]
_ZEROS_ARE_NEUTRAL = (ReduceOp.SUM, ReduceOp.AVERAGE, ReduceOp.ADASUM)


def disagreement(requests: Mapping[int, Request], joined: Sequence[int]) -> str | None:
    """Why the operation can not run, None if it can. `joined` are ranks that take part with zeros."""
    rank, first = next(iter(sorted(requests.items())))
    for other_rank, other in sorted(requests.items()):
        for what, value, rule in _aspects(first["kind"]):
            if value(first) != value(other):
                return (
                    f"{first['name']}: the ranks disagree about the {what}: rank {rank} has {value(first)}, "
                    f"rank {other_rank} has {value(other)}; {rule}"
                )
    return _impossible(first, joined)


def _shapes(request: Request) -> Any:
    return request["shapes"]


def _trailing(request: Request) -> Any:
    return [shape[1:] for shape in request["shapes"]]


def _ndims(request: Request) -> Any:
    return [len(shape) for shape in request["shapes"]]


def _aspects(kind: str) -> list[tuple[str, Callable[[Request], Any], str]]:
    """(what it is, how to read it, the rule) for everything that must be equal on all ranks."""

    def entry(name: str) -> Callable[[Request], Any]:
        return lambda request: request[name]

    aspects: list[tuple[str, Callable[[Request], Any], str]] = [
        ("kind of operation", entry("kind"), "a name must mean the same operation everywhere")
    ]
    if kind == "barrier":
        return aspects
    if kind in ("add_process_set", "remove_process_set"):
        return [*aspects, ("ranks", entry("ranks"), "every rank must name the same process set")]
    aspects.append(("data type", entry("dtypes"), "cast the tensors to one type on every rank"))
    if kind in ("allgather", "alltoall"):
        aspects.append(("number of dimensions", _ndims, "only the size of the first dimension may differ"))
        aspects.append(
            ("shape behind the first dimension", _trailing, "only the size of the first dimension may differ")
        )
    else:
        aspects.append(("shape", _shapes, f"{kind} needs equal shapes on every rank"))
    if kind in ("allreduce", "reducescatter"):
        aspects.append(
            ("reduction", lambda r: ReduceOp(r["op"]).name.title(), "pass the same op= on every rank")
        )
        aspects.append(
            (
                "prescale and postscale factors",
                lambda r: (r["prescale"], r["postscale"]),
                "pass the same factors on every rank",
            )
        )
    if kind == "broadcast":
        aspects.append(("root rank", entry("root"), "name the same root_rank on every rank"))
    aspects.append(
        (
            "kind of device",
            lambda r: r["device"].split(":")[0],
            "keep the tensor on the CPU, or on GPUs, everywhere",
        )
    )
    return aspects


def _impossible(request: Request, joined: Sequence[int]) -> str | None:
    kind = request["kind"]
    if kind in ("allgather", "alltoall", "reducescatter") and any(not shape for shape in request["shapes"]):
        return f"{request['name']}: {kind} needs tensors with a first dimension, but got a scalar everywhere"
    if joined and not (kind == "barrier" or (kind == "allreduce" and request["op"] in _ZEROS_ARE_NEUTRAL)):
        what = f"{kind} ({ReduceOp(request['op']).name.title()})" if kind == "allreduce" else kind
        return (
            f"{request['name']}: {what} can not run while ranks {sorted(joined)} have joined: after join() a "
            "rank only takes part in sums and averages"
        )
    return None
