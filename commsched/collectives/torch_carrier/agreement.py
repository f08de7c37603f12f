"""Do the ranks' requests for one operation fit together? Pure: requests in, an error message out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from commsched.collectives.carrier import ReduceOp

Request = Mapping[str, Any]
_ZEROS_ARE_NEUTRAL = (ReduceOp.SUM, ReduceOp.AVERAGE, ReduceOp.ADASUM)

_REDUCTIONS = ("allreduce", "reducescatter")
_CONCATENATIONS = ("allgather", "alltoall")
_COLLECTIVES = (*_REDUCTIONS, *_CONCATENATIONS, "broadcast")
_PROCESS_SETS = ("add_process_set", "remove_process_set")
_KINDS = (*_COLLECTIVES, *_PROCESS_SETS, "barrier")
_FIRST_DIFFERS = "only the size of the first dimension may differ"

# Must be equal on all ranks: for these kinds, this property, read like this; and the rule for users.
_ASPECTS: list[tuple[Sequence[str], str, Callable[[Request], Any], str]] = [
    (_KINDS, "kind of operation", lambda r: r["kind"], "a name must mean the same operation everywhere"),
    (_PROCESS_SETS, "ranks", lambda r: r["ranks"], "every rank must name the same process set"),
    (_COLLECTIVES, "data type", lambda r: r["dtypes"], "cast the tensors to one type on every rank"),
    (_CONCATENATIONS, "number of dimensions", lambda r: [len(s) for s in r["shapes"]], _FIRST_DIFFERS),
    (
        _CONCATENATIONS,
        "shape behind the first dimension",
        lambda r: [shape[1:] for shape in r["shapes"]],
        _FIRST_DIFFERS,
    ),
    (
        (*_REDUCTIONS, "broadcast"),
        "shape",
        lambda r: r["shapes"],
        "this operation needs equal shapes on every rank",
    ),
    (_REDUCTIONS, "reduction", lambda r: ReduceOp(r["op"]).name.title(), "pass the same op= on every rank"),
    (
        _REDUCTIONS,
        "prescale and postscale factors",
        lambda r: (r["prescale"], r["postscale"]),
        "pass the same factors on every rank",
    ),
    (("broadcast",), "root rank", lambda r: r["root"], "name the same root_rank on every rank"),
    (
        _COLLECTIVES,
        "kind of device",
        lambda r: r["device"].split(":")[0],
        "keep the tensor on the CPU, or on GPUs, everywhere",
    ),
]


def disagreement(requests: Mapping[int, Request], joined: Sequence[int]) -> str | None:
    """Return why the operation can not run, None if it can. `joined` are ranks that take part with zeros."""
    rank, first = next(iter(sorted(requests.items())))
    for other_rank, other in sorted(requests.items()):
        for kinds, aspect, value, rule in _ASPECTS:
            if first["kind"] in kinds and value(first) != value(other):
                return (
                    f"{first['name']}: the ranks disagree about the {aspect}: rank {rank} has "
                    f"{value(first)}, rank {other_rank} has {value(other)}; {rule}"
                )
    return _impossible(first, joined)


def _impossible(request: Request, joined: Sequence[int]) -> str | None:
    kind = request["kind"]
    if kind in (*_CONCATENATIONS, "reducescatter") and any(not shape for shape in request["shapes"]):
        return f"{request['name']}: {kind} needs tensors with a first dimension, but got a scalar everywhere"
    if joined and not (kind == "barrier" or (kind == "allreduce" and request["op"] in _ZEROS_ARE_NEUTRAL)):
        shown = f"{kind} ({ReduceOp(request['op']).name.title()})" if kind == "allreduce" else kind
        return (
            f"{request['name']}: {shown} can not run while ranks {sorted(joined)} have joined: after join() "
            "a rank only takes part in sums and averages"
        )
    return None
