"""Plans of one optimizer: the link is timed, rank 0 makes a program from measured times, every rank takes it.

A policy needs a profile: ``Model`` makes one of the parameters and of the times that ``measuring`` took. Two
sections decide which embeddings travel by rows (``first_rows``) and, with ``gather="parameters"``, which rank
updates which whole parameter (``owners_of``). From these and from the times of the link (``TimedLink``) the
policy makes a program, on which all ranks agree (``Planner``): a ``Plan``.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.optim import Optimizer

import scheduler
from comm_core.cuda.tables import BLOCK, BLOCK_BYTES
from commsched.backends import wanted_transport
from commsched.backends.cpu import flat
from commsched.backends.interface import Backend, Scaling
from commsched.collectives.carrier import carrier_or_none
from commsched.collectives.compression import block_code
from commsched.collectives.private_groups import hosts_of
from commsched.env import settings
from commsched.errors import CommError
from commsched.optimizer.buckets import Layout, build_layout
from commsched.optimizer.measuring import Sample
from commsched.optimizer.whole_step import ELEMENTWISE, register_separable
from scheduler import policies
from scheduler.ir.actions import COLLECTIVE, Kind
from scheduler.ir.buckets import Bucket, Piece, fuse_by_bytes, in_backward_order
from scheduler.ir.link import Link, TwoTierLink, fit
from scheduler.ir.profile import Layer, Profile
from scheduler.ir.program import Program
from scheduler.policies.prediction import Prediction, predict
from scheduler.validate import validate

_log = logging.getLogger("commsched")


# -- what the user asked for ---------------------------------------------------------------------------------


@dataclass
class Options:
    """The arguments of ``DistributedOptimizer`` that plans and rounds need, checked by ``distributed``."""

    process_set: Any
    sums: bool = False
    predivide: float = 1.0
    wire_dtype: torch.dtype | None = None
    schedule: str | Program = "auto"
    gather: str = "gradients"
    early_step: bool = False
    master_weights: bool = False
    transport: str | None = None
    bucket_bytes: int | None = None
    profile: Any = None
    groups: list[list[int]] | None = None
    sparse_as_dense: bool = False
    row_sparse: bool | str = "auto"
    # With virtual ranks (``commsched.elastic``): what their sum is divided by. 0: there are none.
    virtual_divisor: int = 0

    def for_virtual_ranks(self, count: int, params: Sequence[nn.Parameter]) -> Options:
        """Return the options that put together the ranks' parts of sums, after the backward, bit for bit.

        ``tiers`` scale float16 on the way, and numbers that get too small for its exponent lose bits.
        """
        by, plain = 1 if self.sums else count, {"schedule": "auto", "profile": None, "groups": None}
        if any(p.dtype == torch.float16 for p in params):
            wanted = getattr(self.transport, "name", None) or wanted_transport(self.transport)
            if wanted == "tiers":
                raise ValueError(
                    "virtual ranks need exact sums, but transport 'tiers' rounds small float16 gradients, and"
                    " a parameter is float16; leave transport= and COMMSCHED_TRANSPORT out, or use bfloat16"
                )
            if wanted in (None, "auto"):
                plain["transport"] = flat(self.process_set.size())
        return replace(self, sums=True, row_sparse=False, virtual_divisor=by, **plain)  # type: ignore[arg-type]

    def for_other_params(self, before: Sequence[nn.Parameter], now: Sequence[nn.Parameter]) -> Options:
        """Return the options for other parameters, without the program or profile of these."""
        index = {id(param): i for i, param in enumerate(now)}
        groups = [[index[id(before[i])] for i in g if id(before[i]) in index] for g in self.groups or []]
        schedule = self.schedule if isinstance(self.schedule, str) else "auto"
        return replace(self, schedule=schedule, profile=None, groups=[g for g in groups if g] or None)


# -- the parameters as layers --------------------------------------------------------------------------------

# A ``Model`` maps the parameters to the scheduler's layers: in forward order, after one layer without bytes,
# which represents the time between two iterations (data loading, the optimizer's own work). A weight tied to
# an output matrix, the head, has two layers: one where the embedding is, and one where the head is. Layers
# are named by parameter; the heads' are numbered after the parameters.

OUTSIDE = "(between iterations)"

SHARE = BLOCK_BYTES / (4 * BLOCK)
"""Bytes of a quantised gradient, as a share of float32's."""

_FEWEST = 2048  # smaller tensors, and those of one dimension (norms, biases), are few bytes


def travels_quantised(param: torch.Tensor) -> bool:
    """Return whether ``Compression.int8`` and ``fp8`` quantise this parameter's gradient."""
    return param.dtype == torch.float32 and param.dim() > 1 and param.numel() >= _FEWEST


class Rows(NamedTuple):
    """Of a parameter that travels by rows: the elements of a row, and the bytes that one RS or AG sends."""

    elements: int
    sent: int


@dataclass(frozen=True)
class Model:
    """The facts about the parameters that the scheduler needs: the same on every rank."""

    names: tuple[str, ...]
    numels: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    rows: Mapping[int, Rows] = field(default_factory=dict)  # parameters of which only touched rows travel
    quantised: frozenset[int] = frozenset()  # the parameters that travel in blocks of bytes
    # The tied weights whose heads have layers of their own. Of one that travels by rows the head's part of
    # the gradient is sent first, and then corrected in some rows; the others' gradients are sent whole.
    heads: tuple[int, ...] = ()

    @classmethod
    def of(cls, params: Sequence[nn.Parameter], names: Sequence[str], wire: Any = None) -> Model:
        """Return the facts about these parameters, whose gradients travel as ``wire``."""
        quantised = (i for i, p in enumerate(params) if block_code(wire) and travels_quantised(p))
        numels, dtypes = tuple(p.numel() for p in params), tuple(p.dtype for p in params)
        return cls(tuple(names), numels, dtypes, quantised=frozenset(quantised))

    @property
    def layers(self) -> range:
        """The numbers of all layers: parameters, then heads."""
        return range(len(self.names) + len(self.heads))

    def param(self, i: int) -> int:
        """Return the parameter of a layer."""
        return i if i < len(self.names) else self.heads[i - len(self.names)]

    def name(self, i: int) -> str:
        return self.names[i] if i < len(self.names) else f"{self.names[self.param(i)]} (head)"

    @property
    def head_of(self) -> dict[int, int]:
        """The layer of each tied weight's head."""
        return {i: len(self.names) + place for place, i in enumerate(self.heads)}

    def sent_whole(self) -> Model:
        """Return the model in which the gradients of tied weights are sent when they are whole."""
        return replace(self, rows={i: rows for i, rows in self.rows.items() if i not in self.heads})

    @property
    def groups(self) -> list[int]:
        """The group of each layer: one bucket holds one dtype, quantised or not, or one parameter that
        travels by rows.
        """
        by_layer = [(self.dtypes[self.param(i)], i in self.quantised) for i in self.layers]
        kinds = list(dict.fromkeys(by_layer))
        return [len(kinds) + i if i in self.rows else kinds.index(kind) for i, kind in enumerate(by_layer)]

    def kind(self, group: int) -> torch.dtype:
        return self.dtypes[self.param(self.groups.index(group))]

    def quantises(self, group: int) -> bool:
        """Return whether the buckets of a group travel in blocks of bytes."""
        return self.groups.index(group) in self.quantised

    def layout(
        self,
        buckets: Sequence[Bucket],
        ranks: int,
        owners: Sequence[int] | None = None,
        shares: Sequence[int] = (),
    ) -> Layout:
        """Return the places of the gradients in buckets that name parameters; see ``build_layout``."""
        blocks = {group: BLOCK for group in set(self.groups) if self.quantises(group)}
        rows = {i: row.elements for i, row in self.rows.items()}
        numels = [self.numels[self.param(i)] for i in self.layers]
        heads = {self.head_of[i]: i for i in self.heads if i in self.rows}
        return build_layout(numels, self.itemsizes, buckets, ranks, owners, rows, blocks, heads, shares)

    @property
    def itemsizes(self) -> list[int]:
        return [self.dtypes[self.param(i)].itemsize for i in self.layers]

    def bytes(self, i: int) -> int:
        """Return the bytes of the gradient of a layer's parameter."""
        return self.numels[self.param(i)] * self.dtypes[self.param(i)].itemsize

    def sent(self, i: int) -> int:
        """Return the bytes of one RS or AG of a layer's gradient."""
        if i >= len(self.names):
            return self.bytes(i) if self.param(i) in self.rows else 0
        return self.rows[i].sent if i in self.rows else self.bytes(i)

    def wire_share(self, wire: torch.dtype | None) -> float:
        """Return the bytes of all gradients in messages as a share of their own."""
        scaling, sent = Scaling(wire_dtype=wire), 0.0
        for i, dtype in enumerate(self.dtypes):
            cast = scaling.wire_type(dtype) or dtype
            sent += self.bytes(i) * SHARE if i in self.quantised else self.numels[i] * cast.itemsize
        return sent / (sum(map(self.bytes, range(len(self.numels)))) or 1.0)

    @property
    def fingerprint(self) -> str:
        """Differs between ranks whose parameters differ in number, size, type or order."""
        text = ";".join(f"{n}:{d}" for n, d in zip(self.numels, self.dtypes, strict=True))
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        return f"{len(self.numels)} parameters, {sum(self.numels)} elements, {digest}"

    def profile(self, order: Sequence[int], times: Sample, source: str) -> Profile:
        """Return a profile with the layers in this order; times are given by layer."""
        groups, place = self.groups, {i: number + 1 for number, i in enumerate(order)}
        layers = [Layer(OUTSIDE, times.outside, 0.0, 0)]
        layers += [
            Layer(
                self.name(i),
                times.forward[i],
                times.backward[i],
                self.sent(i),
                group=groups[i],
                needed_by=place[self.param(i)] if i >= len(self.names) and self.sent(i) else -1,
            )
            for i in order
        ]
        return Profile("this model", tuple(layers), source=source)

    def guess(self, order: Sequence[int], link: Link) -> Profile:
        """Return a profile without measurements: compute by bytes, as long as all communication."""
        each = [2 * link.beta * self.sent(i) for i in self.layers]
        times = Sample([t / 3 for t in each], [2 * t / 3 for t in each], 0.0)
        return self.profile(order, times, "a guess from the sizes")

    def fitted(self, profile: Profile, order: Sequence[int]) -> tuple[Profile, list[int]]:
        """Return a user's profile of this model, checked, and the parameter of each layer (-1: none)."""
        index = {name: i for i, name in enumerate(self.names)}
        with_bytes = [layer.name for layer in profile.layers if layer.bytes]
        missing = sorted(set(self.names) - {layer.name for layer in profile.layers})
        strange = [name for name in with_bytes if name not in index]
        wrong = []
        for layer in profile.layers:
            i = index.get(layer.name, -1)
            fewer = i in self.rows and layer.bytes < self.bytes(i)
            if i >= 0 and layer.bytes != self.bytes(i) and not fewer:
                wrong.append(f"{layer.name} has {layer.bytes} bytes there and {self.bytes(i)} here")
        if missing or strange or wrong or len(with_bytes) != len(set(with_bytes)):
            raise ValueError(
                f"profile {profile.name!r} is of another model: {wrong[:3] or ''} parameters without a layer:"
                f" {missing[:3]}, layers without a parameter: {strange[:3]}; write one with"
                " optimizer.profile().save(FILE) in a run of this model"
            )
        if profile.layers[0].bytes:
            profile = replace(profile, layers=(Layer(OUTSIDE, 0.0, 0.0, 0), *profile.layers))
        groups = self.groups
        layers = [
            replace(la, group=groups[index[la.name]]) if la.name in index else la for la in profile.layers
        ]
        return replace(profile, layers=tuple(layers)), [index.get(layer.name, -1) for layer in layers[1:]]


# -- embeddings that travel by rows --------------------------------------------------------------------------

# Here is decided which embeddings may travel by rows ("Touched rows" in ``docs/optimizer.md``), what that
# sends, and whether it takes less time. The engine leaves rows of zeros out, whatever wrote the gradient, so
# a wrong choice here costs time and changes no number. Of a weight tied to a head, the rows are what corrects
# the head's part (``corrections``). ``docs/decisions/optimizer.md`` has the reasons.

Owner = tuple[nn.Module, tuple[int, ...]]
"""A module, and the indices of the parameters that it owns."""

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_START_UPS = 4  # of a bucket of its own: RS, AG, and the counts of rows before each
_WORTH_A_BUCKET = 1 << 16  # bytes of a table whose gradients are sparse


@dataclass(frozen=True)
class Sent:
    """What a rank sent of one parameter in a step: the bytes of one RS or AG, and the seconds of both."""

    bytes: float
    seconds: float


def first_rows(
    model: Model,
    params: Sequence[nn.Parameter],
    modules: Sequence[Owner],
    backend: Backend,
    asked: Options,
    link: Link,
    given: Profile | None,
    tied: Iterable[int] = (),
) -> dict[int, Rows]:
    """Return the embeddings that travel by rows in the first plan, with the bytes of their whole gradients.

    ``tied``: weights of embeddings and heads whose parts may be sent one after the other.

    Always those whose gradients are sparse, unless they are small: zeros alone would travel. With a profile,
    those of which it has fewer bytes than the gradient. Without one, every embedding that is large enough to
    gain if no row at all were touched: its rows are counted in the first iterations.
    """
    always = asked.row_sparse is True
    sure = {i for i in sparse_tables(modules) if model.bytes(i) >= _WORTH_A_BUCKET}
    obstacle = _obstacle(backend, asked)
    refusal = obstacle or _max_norm(model, modules)
    if always and refusal:
        raise ValueError(
            f"rank {backend.ranks.rank}: row_sparse=True {refusal}; use row_sparse='auto', which sends the"
            " whole gradient there"
        )
    found = [] if obstacle else sorted({*_tables(params, modules), *tied})
    if always and not found:
        warnings.warn(
            "row_sparse=True without effect: no trained parameter belongs to an nn.Embedding or"
            " nn.EmbeddingBag, and to no other module",
            stacklevel=2,
        )
    if not always and given is not None:
        sizes = {layer.name: layer.bytes for layer in given.layers}
        found = [i for i in found if i in sure or sizes.get(model.names[i], 0) < model.bytes(i)]
    elif not always:
        least = _START_UPS * link.alpha
        found = [i for i in found if i in sure or 2 * link.beta * model.bytes(i) > least]
    return {i: Rows(params[i].shape[1], model.bytes(i)) for i in found}


def _tables(params: Sequence[nn.Parameter], modules: Sequence[Owner]) -> list[int]:
    """Return the parameters of embeddings alone: the gradients of others have few zero rows."""
    fit, unfit = set[int](), set[int]()
    for module, mine in modules:
        (fit if _is_table(module) else unfit).update(mine)
    return [i for i in sorted(fit - unfit) if _has_rows(params[i])]


def sparse_tables(modules: Sequence[Owner]) -> set[int]:
    """Return the parameters whose gradients are sparse: they are reduced at step time."""
    return {i for module, mine in modules for i in mine if getattr(module, "sparse", False)}


def _is_table(module: nn.Module) -> bool:
    """Whether most rows of its gradient are zero. Of one with ``sparse=True`` all are."""
    return isinstance(module, EMBEDDINGS) and module.max_norm is None


def _has_rows(param: nn.Parameter) -> bool:
    return param.dim() == 2 and param.is_contiguous() and param.numel() > 0 and param.shape[0] < 2**31


def tied_heads(params: Sequence[nn.Parameter], modules: Sequence[Owner]) -> dict[int, nn.Module]:
    """Return the weights that embeddings share with one other module, and that module, the head."""
    tables, heads = set[int](), dict[int, list[nn.Module]]()
    for module, mine in modules:
        for i in mine:
            dense = _is_table(module) and not module.sparse
            tables.add(i) if dense else heads.setdefault(i, []).append(module)
    tied = {i: heads[i][0] for i in sorted(tables & heads.keys()) if len(heads[i]) == 1}
    return {
        i: head
        for i, head in tied.items()
        if not isinstance(head, EMBEDDINGS)
        and _has_rows(params[i])
        and params[i].dtype in (torch.float32, torch.float64)
    }


def _obstacle(backend: Backend, asked: Options) -> str:
    """Return why no gradient of this optimizer can travel by rows; "" if some may."""
    if asked.gather != "gradients":
        return f"needs gather='gradients', got {asked.gather!r}: parameters have no zero rows"
    if not backend.by_rows:
        return f"needs transport 'direct' or 'tiers' on CPUs, but the transport is {backend.name!r}"
    if code := block_code(asked.wire_dtype):
        return f"needs gradients that are not quantised, but compression is Compression.{code}"
    if isinstance(asked.schedule, Program):
        return "needs the name of a policy as the schedule, but it is a Program, whose buckets are whole"
    return ""


def _max_norm(model: Model, modules: Sequence[Owner]) -> str:
    """Return which embedding has ``max_norm``; "" if none."""
    for module, mine in modules:
        if isinstance(module, EMBEDDINGS) and module.max_norm is not None:
            return (
                f"refuses max_norm, but {model.names[mine[0]]} has max_norm={module.max_norm}: the forward"
                " changes the weight on this rank alone"
            )
    return ""


def sent_share(rank: int, size: int, hosts: Sequence[int] = ()) -> float:
    """Return which part of a bucket a rank sends in one RS or AG, in the mean, as the engine's events count.

    ``hosts``: of each rank in the exchange in two tiers. What leaves a host counts, or copies inside a single
    one: in RS the shards on other hosts whose deputy is this rank (``two_tier.h``), in AG its own to each.
    """
    others = len(set(hosts)) - 1
    if others < 1:
        return 1 - 1 / size
    here, places = hosts[rank], [hosts[:other].count(host) for other, host in enumerate(hosts)]
    each = zip(hosts, places, strict=True)
    entrusted = sum(host != here and place % hosts.count(here) == places[rank] for host, place in each)
    return (entrusted + others) / 2 / size


def sent_by_rows(
    events: npt.NDArray[Any], layout: Layout, rows: Mapping[int, Rows], share: float
) -> dict[int, Sent]:
    """Return what this rank sent of each parameter in ``rows``: mean bytes and median seconds of the steps.

    An RS or AG of B bytes sends B * ``share`` from each rank; the mean of both counts.
    """
    found = {}
    for i in rows:
        by_rows = [b for b in layout.slots[i].buckets if layout.slices[b].row]
        mine = events[np.isin(events["bucket"], by_rows)]
        steps = {step: mine[mine["step"] == step] for step in set(mine["step"].tolist())}
        if steps:
            seconds = median(float((op["end"] - op["start"]).sum()) for op in steps.values())
            sent = float(mine["bytes"].sum()) / len(steps) / 2
            found[i] = Sent(sent / share, seconds)
    return found


def counted_rows(
    model: Model, by_rank: Sequence[Mapping[int, Sent]], always: Container[int], link: Link
) -> dict[int, Rows]:
    """Return the parameters for which rows pay, and those in ``always``, with the bytes that were sent.

    The rank with the most bytes counts, and the rank with the least time, which waited for no other rank.
    Corrections are sent besides the gradient. They are no gain where they take half as long, or where a rank
    has not sent a part early.
    """
    found = {}
    for i, rows in model.rows.items():
        seen = [sent[i] for sent in by_rank if i in sent]
        whole, tied = 2 * link.beta * model.bytes(i), i in model.heads
        pays = not seen or min(sent.seconds for sent in seen) < (whole / 2 if tied else whole)
        if (pays or i in always) and not (tied and len(seen) < len(by_rank)):
            one = rows.elements * model.dtypes[i].itemsize
            most = round(max((sent.bytes for sent in seen), default=rows.sent))
            found[i] = Rows(rows.elements, min(max(most, one), model.bytes(i)))
    return found


# -- parameters that one rank updates ------------------------------------------------------------------------

# "Whole matrices" in ``docs/optimizer.md``: each parameter has one owner rank. Each bucket holds the
# parameters of rank 0, then those of rank 1 and so on: its reduce-scatter reduces each gradient to its owner,
# which updates it, and its all-gather sends the updated parameter to the others.

Cost = Callable[[Sequence[int]], float]
"""Estimates the work of one update from a parameter's shape; only the ratios count."""

BUCKET_BYTES = 4 << 20
_UNEVEN = 1.5  # a bucket may close once its longest part has at most so many times the mean part's bytes
_OVERFULL = 4  # at this many times the wanted bytes it closes in any case


def matrix_products(shape: Sequence[int]) -> float:
    """Return the work of products of a matrix with its own transpose; of a vector, its elements."""
    rows, columns = (shape[0], prod(shape[1:])) if len(shape) > 1 else (0, prod(shape))
    return float(prod(shape) * (1 + min(rows, columns)))


def elements(shape: Sequence[int]) -> float:
    return float(prod(shape))


# Compared by exact type, because a subclass may compute something else.
WHOLE: dict[type[Optimizer], Cost] = {torch.optim.Adafactor: elements}
if hasattr(torch.optim, "Muon"):
    WHOLE[torch.optim.Muon] = matrix_products


def register_whole_matrix(cls: type[Optimizer], cost: Cost = matrix_products) -> type[Optimizer]:
    """Declare that an optimizer class of your own updates each parameter by itself, but needs all of it.

    ``cost`` estimates the work of one update from the parameter's shape, so that ranks share it evenly.
    Usable as a decorator.
    """
    WHOLE[cls] = cost
    return register_separable(cls)


def owners_of(
    cls: type[Optimizer], params: Sequence[nn.Parameter], backend: Backend, virtual: bool = False
) -> list[int] | None:
    """Return the owner rank of each parameter; None for optimizers that update every element by itself.

    With ``virtual`` ranks these have owners, too: torch's vector instructions may round otherwise than what
    updates the elements that are left at a tensor's end, so bits would depend on where shards end.
    Collective: raises ``CommError`` unless all ranks find the same owners.
    """
    if not virtual and (cls not in WHOLE or cls in ELEMENTWISE):
        return None
    if not backend.uneven_parts:
        raise ValueError(
            f"gather='parameters' with {cls.__name__} gives each rank whole parameters, and {backend.name}"
            " moves parts of equal length only; use gather='gradients', or transport='direct' on CPUs"
        )
    owners = balanced([WHOLE.get(cls, elements)(p.shape) for p in params], backend.ranks.size)
    digest = hashlib.sha256(str(owners).encode()).hexdigest()[:16]
    backend.ranks.agree("the owners of the parameters", digest, "register the same cost on every rank")
    return owners


def balanced(costs: Sequence[float], ranks: int) -> list[int]:
    """Return a rank for each cost: the largest first, each to the rank with the least work so far.

    Equal costs are dealt out in turn in backward order, so that neighbours, which share a bucket, have
    different owners.
    """
    owners, load = [0] * len(costs), [0.0] * ranks
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], -i)):
        owners[i] = min(range(ranks), key=lambda rank: (load[rank], rank))
        load[owners[i]] += costs[i]
    return owners


def whole_buckets(
    sizes: Sequence[int], groups: Sequence[int], owners: Sequence[int], ranks: int, limit: float
) -> list[Bucket]:
    """Return buckets of uncut layers, about ``limit`` bytes each, whose parts are about equally long.

    ``owners`` are the ranks by layer. A bucket whose bytes belong to few ranks uses few of the links.
    """
    buckets: list[Bucket] = []
    filling: dict[int, list[Piece]] = {}
    for layer in reversed(range(len(sizes))):
        if sizes[layer]:
            pieces = filling.setdefault(groups[layer], [])
            pieces.append(Piece(layer, 0, sizes[layer]))
            parts = [0] * ranks
            for piece in pieces:
                parts[owners[piece.layer]] += piece.bytes
            full, even = sum(parts) >= limit, max(parts) * ranks <= _UNEVEN * sum(parts)
            if (full and even) or sum(parts) >= _OVERFULL * limit:
                buckets.append(Bucket(tuple(filling.pop(groups[layer])), groups[layer]))
    return buckets + [Bucket(tuple(pieces), group) for group, pieces in filling.items()]


# -- the child process ---------------------------------------------------------------------------------------

# [Note: searches]
# The compiler that a policy needs would stay in the training process's memory, so the policy runs in a child
# process. Training goes on while it searches. All ranks take its plan at the same step, e:
#
# | when | rank 0 | all ranks |
# |---|---|---|
# | end of s | starts the child | take a plan that needs no search, or keep theirs |
# | from s+1 on | votes in the round's flags, once the child has ended | train |
# | end of e | reads the child's answer | have rank 0's vote in the last round but one; meet; get the plan |
# | e+1 | | use the plan from the first gradient on |
#
# Flags are exchanged in any case, so a vote costs nothing and no rank can miss it. A number of steps fixed
# beforehand would be a guess, but makes runs comparable: ``COMMSCHED_WAIT_FOR_PLAN=N``, as rank 0 has it,
# makes e s+N-1, and ranks wait there for the child. If the child was killed, or ended because it took half of
# what the other ranks wait, the ranks keep their plan: a search in the training process would stop all, and
# fail likewise. Without a plan to keep (a profile was given), they take one that needs no search.

_FOLDER = str(Path(scheduler.__file__).resolve().parents[1])
# Uses this very package, wherever it lies and whatever lies in the current folder.
_CODE = f"""
import os, sys
sys.path.insert(0, {_FOLDER!r})
os.nice(5)  # the training beside it comes first
from scheduler.policies.prediction import serve
serve()
"""


class Child:
    """A process that answers one request of ``scheduler.policies.prediction``."""

    def __init__(self, *request: Any) -> None:
        # The search uses one processor; other jobs may share the host.
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CODE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,  # launchers take a killed rank for running while its output is open
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._said = self._errors = b""
        self._thread = threading.Thread(
            target=self._talk, args=(pickle.dumps(request),), name="commsched-plan", daemon=True
        )
        self._thread.start()

    def _talk(self, request: bytes) -> None:
        now = settings()
        limit = now.timeout / (2 if now.wait_for_plan else 1)  # other ranks may have begun to wait sooner
        try:
            self._said, self._errors = self._process.communicate(request, timeout=limit)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            self._process.kill()
            self._process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                self._errors = f"it took {limit:g} s (COMMSCHED_TIMEOUT is {now.timeout:g})".encode()

    @property
    def has_ended(self) -> bool:
        """Whether ``answer`` returns at once."""
        return not self._thread.is_alive()

    def answer(self) -> Any:
        """Return or raise what the process answered; ``SubprocessError`` where it failed."""
        self._thread.join()
        if self._process.returncode or not self._said:
            told = self._errors.decode(errors="replace").strip().rpartition("\n")[2]
            raise subprocess.SubprocessError(f"it ended with status {self._process.returncode}: {told}")
        answer = pickle.loads(self._said)
        if isinstance(answer, ValueError):
            raise answer
        return answer

    def stop(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._thread.join()


def plan_in_child(profile: Profile, link: Link, policy: str, options: Mapping[str, Any]) -> Program:
    """Return or raise what ``policies.plan`` does, from a child process if the policy needs a compiler.

    Policies without a compiler, also the user's own, run here.
    """
    if policies.needs_compiler(policy, options):
        answer = _answer_of_child("plan", profile, link, policy, dict(options))
        if answer is not None:
            assert isinstance(answer, Program)
            return answer
    return policies.plan(profile, link, policy, **options)


def _answer_of_child(*request: Any) -> Any:
    """Return or raise a child's answer; None where this process must do the work itself: the compiler is
    loaded already, or no child can be started.
    """
    if "numba" in sys.modules:
        return None
    try:
        return Child(*request).answer()
    except OSError as error:
        _log.warning("no planning process can be started, so this one does its work: %s", error)
        return None


# -- a plan --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """A program, its profile and link, and which of the model's layers each of its layers is (-1: none)."""

    program: Program
    profile: Profile
    link: Link
    layers: tuple[int, ...]
    whole: Mapping[int, int] = field(default_factory=dict)  # bytes in memory of layers that travel by rows
    uncompressed: Link | None = None  # for gradients in their own type, as DDP sends them

    @cached_property
    def prediction(self) -> Prediction:
        """The simulated times of the program; the first access takes about a second."""
        dense = None  # the profile with whole gradients, as DDP sends them
        if self.whole:
            layers = list(self.profile.whole().layers)
            for place, size in self.whole.items():
                layers[place] = replace(layers[place], bytes=size)
            dense = replace(self.profile, layers=tuple(layers))
        request = self.program, self.profile, self.link, dense, self.uncompressed
        with suppress(subprocess.SubprocessError):
            answer: Prediction | None = _answer_of_child("predict", *request)
            if answer is not None:
                return answer
        return predict(*request)

    @property
    def is_predicted(self) -> bool:
        """Whether ``prediction`` returns at once."""
        return "prediction" in self.__dict__

    @property
    def sends(self) -> Any:
        """What is sent in which order; an all-reduce is an RS and its AG."""
        halves = {Kind.AR: (Kind.RS, Kind.AG)}
        order = [(half, a.index) for a in self.program.link for half in halves.get(a.kind, (a.kind,))]
        return self.program.buckets, order

    def buckets(self, model: Model) -> list[Bucket]:
        """Return the program's buckets with parameters in the place of layers.

        They are cut between elements, or between rows, which a bucket gets by its share of the bytes sent.
        """
        sizes, itemsizes = self.profile.sizes, model.itemsizes

        def cut(piece: Piece) -> Piece:
            param, sent = self.layers[piece.layer], sizes[piece.layer]
            unit = itemsizes[param] * (model.rows[param].elements if param in model.rows else 1)
            units = model.bytes(param) // unit
            return Piece(param, piece.start * units // sent * unit, piece.stop * units // sent * unit)

        return [Bucket(tuple(map(cut, bucket.pieces)), bucket.group) for bucket in self.program.buckets]


def _has_parts(program: Program, profile: Profile) -> bool:
    """Return whether a program sends parts of gradients early; else it is for ``profile.whole()``."""
    parts = {place for place, layer in enumerate(profile.layers) if layer.needed_by >= 0}
    return any(parts.intersection(bucket.layers) for bucket in program.buckets)


# -- the link ------------------------------------------------------------------------------------------------


Times = Sequence[tuple[int, float]]  # bytes and seconds of messages
Observed = tuple[Times, dict[int, Sent]]  # of a rank's buckets; what it sent of parameters by rows
_SMALLEST, _LARGEST = 1 << 12, 1 << 21  # bytes of the messages: six sizes, up to the model's own size


def _largest_message(model_bytes: int) -> int:
    """Return the bytes of the largest message that is timed for a model."""
    return min(max(model_bytes, 16 * _SMALLEST), _LARGEST)


class TimedLink:
    """Start-up and rate of the backend's link, fitted to timed RS and AG. To make one is collective.

    In two tiers, both links are timed together, as an RS or AG uses them, and each one alone while the other
    is idle. All ranks of a host use a link at once, so what they cost each other is in its times.
    """

    def __init__(self, backend: Backend, model_bytes: int, shares: tuple[float, float] = (1.0, 1.0)) -> None:
        """``shares``: the parts of a gradient's bytes that messages of an RS and of an AG have. Rates are per
        own byte.
        """
        self._backend, self._shares = backend, shares
        self._largest = _largest_message(model_bytes)
        sizes = [round(_SMALLEST * (self._largest / _SMALLEST) ** (k / 5)) for k in range(6)]
        sent = [round(size * sum(shares) / 2) for size in sizes]
        mine = [(size, backend.exchange_seconds(bytes_)) for size, bytes_ in zip(sizes, sent, strict=True)]
        # Inside a host an RS moves whole gradients, and an AG what the messages have.
        moved = [round(size * (1 + shares[1]) / 2) for size in sizes]
        both = list(zip(moved, sent, strict=True))
        alone = [
            list(zip(sizes, tier, strict=True)) for tier in zip(*backend.tier_seconds(both), strict=True)
        ]
        by_rank = backend.ranks.all_values([mine, *alone])
        self._messages, *tiers = map(_mean, zip(*by_rank, strict=True))
        names = "inside hosts, measured", "between hosts, measured"
        self._tiers = [self._fit(times, name) for times, name in zip(tiers, names, strict=False)]
        whole = self._fit(self._messages)
        if self._tiers:  # these messages had the wire's bytes inside the hosts, too, and buckets have more
            whole = replace(whole, beta=max(whole.beta, self._tiers[0].beta))
        self.link = self._with_tiers(whole)

    def covers(self, model_bytes: int, shares: tuple[float, float]) -> bool:
        """Return whether a model may use these times: as much of its bytes travels, in messages no larger."""
        return shares == self._shares and _largest_message(model_bytes) <= self._largest

    def uncompressed(self, link: Link) -> Link:
        """Return one of these links for messages in the gradients' own type."""
        inside, between = (1 + self._shares[1]) / 2, sum(self._shares) / 2 or 1.0  # parameters may be empty
        if isinstance(link, TwoTierLink):
            tiers = (link.inside, inside), (link.between, between)
            one, other = (replace(tier, beta=tier.beta / share) for tier, share in tiers)
            link = replace(link, inside=one, between=other)
        return replace(link, beta=link.beta / between)

    def refined(self, by_rank: Sequence[Times]) -> Link:
        """Return the link fitted to the ranks' operations too, which are larger messages. Not collective.

        A shaped link sends small messages at full speed, so their times only show the start-up.
        """
        buckets = _mean(by_rank)
        fitted = self._with_tiers(self._fit(self._messages + buckets))
        rest = sum(seconds for _, seconds in buckets) - len(buckets) * fitted.alpha
        total = sum(size for size, _ in buckets)
        return replace(fitted, beta=rest / total) if rest > 0 and total else fitted

    def _fit(self, messages: Sequence[tuple[int, float]], name: str = "") -> Link:
        sizes, seconds = zip(*messages, strict=True)
        return fit(sizes, seconds, name=name or f"{self._backend.name}, measured")

    def _with_tiers(self, link: Link) -> Link:
        """Return a link of two tiers where these were timed; the engine runs one collective at a time."""
        if not self._tiers:
            return link
        inside, between = self._tiers
        ranks = self._backend.ranks
        hosts = len(set(hosts_of(ranks.process_set)))  # all of them have as many ranks
        members = (ranks.size // hosts, hosts)
        return TwoTierLink(link.alpha, link.beta, link.name, link.error, inside, between, members=members)


def _mean(by_rank: Iterable[Times]) -> list[tuple[int, float]]:
    """Return the same messages with the mean of the ranks' times, of those that have any."""
    columns = zip(*(times for times in by_rank if times), strict=True)
    return [(column[0][0], sum(t for _, t in column) / len(column)) for column in columns]


def times_of_buckets(events: Any, buckets: Sequence[Bucket], layout: Layout) -> list[tuple[int, float]]:
    """Return bytes and median seconds of the RS and AG of each bucket that is sent whole.

    A joined rank has none: its operations last until the others have computed.
    """
    times: list[tuple[int, float]] = []
    whole = [(number, bucket) for number, bucket in enumerate(buckets) if not layout.slices[number].row]
    for number, bucket in whole:
        for op in (0, 1):
            took = events[(events["bucket"] == number) & (events["op"] == op)]
            if len(took):
                times.append((bucket.bytes, median((took["end"] - took["start"]).tolist())))
    return times


# -- a plan beside DDP's way ---------------------------------------------------------------------------------

DDP_BYTES = 25 << 20, 4 << 20  # of a bucket: DDP's default, and what it is often tuned to
FASTER = 0.97  # a plan that takes at most this part of another one's time is faster


@dataclass
class Trial:
    """Plans that are timed in turn, and the fastest of them.

        turn    1         2              3             4         5
        plan    searched  DDP's, 25 MiB  DDP's, 4 MiB  searched  the faster one of DDP's

    Turns 4 and 5 come only if that one was faster than the searched plan, which another program may have
    slowed down; it wins if it is faster in them, too.
    """

    plans: Sequence[Plan]
    now: int = 0  # whose turn it is; once the trial is over, the fastest
    over: bool = False

    def __post_init__(self) -> None:
        self.seconds: list[list[float]] = [[] for _ in self.plans]  # of a step, by plan and turn

    def end_turn(self, seconds: float) -> None:
        """Take the time of a step in this turn; find out whose turn is next, or which plan is the fastest."""
        self.seconds[self.now].append(seconds)
        searched, others = self.seconds[0], range(1, len(self.plans))
        waiting = [number for number in others if not self.seconds[number]]
        if waiting:
            self.now = waiting[0]
            return
        best = min(others, key=lambda number: self.seconds[number][0], default=0)
        pairs = zip(searched, self.seconds[best], strict=False)
        if not all(theirs <= FASTER * ours for ours, theirs in pairs):
            self.now, self.over = 0, True
        elif len(searched) == 1:
            self.now = 0
        else:
            self.now, self.over = best, len(self.seconds[best]) > 1


# -- the planner ---------------------------------------------------------------------------------------------

_LEAST_BUCKETS = 4  # of a plan that is made without a search
_UNGROUPED = 8 << 20  # bytes of a bucket of parameters that are in none of the user's groups


class Planner:
    """Makes the plans of one optimizer. Methods are collective unless they say otherwise."""

    def __init__(
        self,
        model: Model,
        backend: Backend,
        asked: Options,
        owners: Sequence[int] | None = None,
        rule: str = "",
        before: Planner | None = None,
    ) -> None:
        """``rule``: what updates the parameters, for the agreement. ``before``: the planner until now."""
        self.model, self.owners = model, owners
        self.backend, self.ranks, self._asked = backend, backend.ranks, asked
        self.schedule = schedule = asked.schedule
        options: dict[str, Any] = {"gather": asked.gather, "early_step": asked.early_step}
        if asked.bucket_bytes:
            options["bucket_bytes"] = asked.bucket_bytes
        self.options = {**options, "ranks": self.ranks.size}
        self.policy = "optimal" if schedule == "auto" else schedule
        if isinstance(self.policy, str):
            policies.get(self.policy)  # an unknown name is an error now
        self.groups, profile = asked.groups, asked.profile
        self.given = Profile.load(profile) if isinstance(profile, (str, Path)) else profile
        self.heads: dict[int, nn.Module] = {}  # the other owners of tied embeddings
        self.ranks.agree("the model's parameters", model.fingerprint, "build the same model on every rank")
        agreed = (
            f"optimizer {rule}, schedule={schedule if isinstance(schedule, str) else schedule.hash},"
            f" {sorted(options.items())}, row_sparse={asked.row_sparse}, wire_dtype={asked.wire_dtype}"
        )
        self.ranks.agree(
            "the arguments of DistributedOptimizer", agreed, "pass the same arguments on every rank"
        )
        share = model.wire_share(asked.wire_dtype)
        # Parameters travel as they are.
        shares = share, 1.0 if asked.gather == "parameters" else share
        size = sum(map(model.bytes, range(len(model.names))))
        # All ranks decide alike: size and share follow from what they have just agreed on. Another epoch of
        # an elastic job has another backend, over connections that have not been timed.
        if before is not None and before.backend is backend and before._timed_link.covers(size, shares):
            self._timed_link: TimedLink = before._timed_link
        else:
            self._timed_link = TimedLink(backend, size, shares)
        self.link = self._timed_link.link
        self._child: Child | None = None  # rank 0's, which makes the plan for ``_wanted``
        self._wanted: tuple[Profile, list[int]] | None = None

    @property
    def adapts(self) -> bool:
        """Whether plans come from times measured in this run."""
        asked = self._asked
        return isinstance(self.schedule, str) and self.given is None and not asked.virtual_divisor

    def send_by_rows(self, params: Sequence[nn.Parameter], modules: Sequence[Owner]) -> None:
        """Let embeddings travel by rows, where the arguments ask for it and it may pay."""
        asked, self.sparse = self._asked, sparse_tables(modules)
        if asked.row_sparse is not False:
            # One policy knows what corrections are.
            parts = self.policy == "optimal" and self.adapts and self.groups is None
            tied = tied_heads(params, modules) if parts else {}
            rows = first_rows(self.model, params, modules, self.backend, asked, self.link, self.given, tied)
            rows, heads = self.ranks.share((rows, tuple(i for i in rows if i in tied)))
            self.model = replace(self.model, rows=rows, heads=heads)
            self.heads = tied

    def observed(
        self, events: Any, plan: Plan, layout: Layout, order: Sequence[int], early: Container[int]
    ) -> Observed:
        """Return what ``learn`` needs of this rank, under a plan that sent all beside no compute.

        Not collective. ``early``: the tied weights of which this rank has sent the head's part first.
        """
        hosts = hosts_of(self.ranks.process_set) if self.backend.name == "tiers" else ()
        share = sent_share(self.ranks.rank, self.ranks.size, hosts)
        sent = sent_by_rows(events, layout, self.model.rows, share)
        place = {i: number for number, i in enumerate(order)}
        for i, head in self.model.head_of.items():
            if i not in early or place[head] < place[i]:
                sent.pop(i, None)
        return times_of_buckets(events, plan.program.buckets, layout), sent

    def learn(self, by_rank: Sequence[Observed]) -> None:
        """Fit the link and count rows with what the ranks that have not joined have ``observed``."""
        self.link = self._timed_link.refined([times for times, _ in by_rank])
        always = self.model.rows if self._asked.row_sparse is True else self.sparse
        rows = counted_rows(self.model, [sent for _, sent in by_rank], always, self.link)
        self.model = replace(self.model, rows=rows)

    def first(self, order: Sequence[int]) -> Plan:
        """Return the first plan; it communicates after the backward if a measured plan will follow."""
        if isinstance(self.schedule, Program):
            return self._given_program(order)
        wanted: tuple[Any, ...] = self.model.guess(order, self.link), list(order), "sequential"
        if self.given is not None:
            wanted = *self.model.fitted(self.given, order), self.policy
        return self._agreed([self._made(*wanted) or self._unsearched(*wanted[:2])])[0][0]

    def begin(
        self, profile: Profile, order: Sequence[int], meanwhile: bool
    ) -> tuple[Plan | None, int | None]:
        """Return a plan for measured times, and when a better one, which is searched, comes from ``finish``.

        That is after so many steps; 0: once ``is_ready``; None: no plan is searched. See [Note: searches].
        ``meanwhile``: return a plan for the time of the search, too; else None.
        """
        self.close()
        self._wanted = wanted = profile, list(order)
        policy, wait = self.policy, settings().wait_for_plan
        steps: int | None = max(0, wait - 1)
        if self.ranks.rank == 0 and isinstance(policy, str) and wait != 1:
            with suppress(OSError, ValueError):  # ``_made`` meets them again
                options = self._options_for(*wanted, policy)
                if policies.needs_compiler(policy, options):
                    self._child = Child("plan", profile, self.link, policy, options)
        if self._child is None:
            made, steps = self._made(*wanted, policy), None
        else:
            made = self._unsearched(*wanted) if meanwhile else None
        (plan,), steps = self._agreed([made], steps)
        return plan, steps

    @property
    def is_ready(self) -> bool:
        """Whether the plan that ``begin`` has had made is there: only rank 0 knows."""
        return self._child is not None and self._child.has_ended

    def finish(self) -> Plan | None:
        """Return the plan that ``begin`` has had searched; None if the search failed."""
        assert self._wanted is not None
        child, self._child = self._child, None
        return self._agreed([self._made(*self._wanted, self.policy, child)])[0][0]

    def like_ddp(self, plan: Plan) -> list[Plan]:
        """Return plans with the profile of this one that all-reduce bucket after bucket, as DDP does.

        One for each size of DDP's buckets, or for those that the user gave, but none that sends as this one.
        """
        plans, order = [plan], list(plan.layers[1:])
        made = [self._made(plan.profile, order, "wfbp", bucket_bytes=size) for size in DDP_BYTES]
        for other in self._agreed(made)[0]:
            if all(other.sends != known.sends for known in plans):
                plans.append(other)
        return plans[1:]

    def close(self) -> None:
        """End the child process, if there is one. Not collective."""
        child, self._child = self._child, None
        if child is not None:
            child.stop()

    def _unsearched(self, profile: Profile, order: list[int]) -> Plan | ValueError | None:
        """Return a plan with every RS under the backward and every AG under the next forward."""
        size = max(1, min(BUCKET_BYTES, sum(profile.sizes) // _LEAST_BUCKETS))
        return self._made(profile, order, "dear", bucket_bytes=size)

    def _made(
        self, profile: Profile, order: list[int], policy: Any, child: Child | None = None, **more: Any
    ) -> Plan | ValueError | None:
        """Return a plan, or why there is none; None on other ranks than 0, where nothing is made.

        ``child`` searches this plan; None if it failed. ``more``: options for what the user leaves open.
        """
        if self.ranks.rank:
            return None
        told = carrier_or_none()
        try:
            if told is not None:
                told.report_progress("makes a plan")  # which may take long; the others wait in an agreement
            if child is not None:
                program = child.answer()
            else:
                options = {**more, **self._options_for(profile, order, policy)}
                program = plan_in_child(profile, self.link, policy, options)
        except ValueError as error:
            return error
        except subprocess.SubprocessError as error:
            _log.warning("the search of a plan failed, so training goes on without its plan: %s", error)
            return None
        finally:
            if told is not None:
                told.report_progress()
        layers = (-1, *order)
        if not _has_parts(program, profile):
            profile = profile.whole()
        whole = {k: self.model.bytes(i) for k, i in enumerate(layers) if i in self.model.rows}
        return self._plan(program, profile, layers, whole)

    def _plan(self, program: Program, profile: Profile, layers: tuple[int, ...], whole: Any = ()) -> Plan:
        plain = self._timed_link.uncompressed(self.link)
        return Plan(program, profile, self.link, layers, dict(whole), plain)

    def _agreed(
        self, made: Sequence[Plan | ValueError | None], steps: int | None = None
    ) -> tuple[list[Any], int | None]:
        """Return, on all ranks, what rank 0 has made, and its ``steps``; raise an error that is among it.

        Each plan brings its hash along: it shows whether this rank has read the same plan.
        """
        hashes = [each.program.hash if isinstance(each, Plan) else "" for each in made]
        plans, steps, hashes = self.ranks.share((made, steps, hashes))
        for plan, told in zip(plans, hashes, strict=True):
            if isinstance(plan, ValueError):
                raise plan
            if plan is not None and plan.program.hash != told:
                reason = (
                    f"rank {self.ranks.rank} has read plan {plan.program.hash}, but rank 0 has made {told};"
                    " this is a fault of commsched, please report it"
                )
                self.backend.abort(reason)  # ranks that have read the right one must not wait for this one
                raise CommError(reason)
            if plan is not None and not _has_parts(plan.program, plan.profile):
                self.model = self.model.sent_whole()
        return plans, steps

    def _options_for(self, profile: Profile, order: Sequence[int], policy: Any) -> dict[str, Any]:
        """Return the policy's options; with the user's groups or owners, the buckets are given."""
        parts = {"keep_parts": True} if self._asked.row_sparse is True and policy == "optimal" else {}
        return {**self._buckets_for(profile, order), **parts}

    def _buckets_for(self, profile: Profile, order: Sequence[int]) -> dict[str, Any]:
        if self.groups is None and self.owners is None:
            return self.options
        options = {key: value for key, value in self.options.items() if key != "bucket_bytes"}
        kinds = [layer.group for layer in profile.layers]
        if self.groups is None:
            assert self.owners is not None
            owners = [0, *(self.owners[i] for i in order)]
            limit = self.options.get("bucket_bytes", BUCKET_BYTES)
            whole = whole_buckets(profile.sizes, kinds, owners, self.ranks.size, limit)
            return {**options, "buckets": in_backward_order(whole)}
        layer_of = {i: place + 1 for place, i in enumerate(order)}
        grouped = [sorted((layer_of[i] for i in group), reverse=True) for group in self.groups]
        taken = {layer for group in grouped for layer in group}
        rest = [0 if layer in taken else size for layer, size in enumerate(profile.sizes)]
        buckets = list(fuse_by_bytes(rest, self.options.get("bucket_bytes", _UNGROUPED), groups=kinds))
        for group in grouped:
            for kind in sorted({kinds[layer] for layer in group}):
                pieces = [
                    Piece(la, 0, profile.sizes[la]) for la in group if kinds[la] == kind and profile.sizes[la]
                ]
                if pieces:
                    buckets.append(Bucket(tuple(pieces), kind))
        return {**options, "buckets": in_backward_order(buckets)}

    def _given_program(self, order: Sequence[int]) -> Plan:
        program = self.schedule
        assert isinstance(program, Program)
        if self.given is not None:
            profile, layers = self.model.fitted(self.given, order)
        else:
            profile, layers = self.model.guess(order, self.link), list(order)
        if program.layers != len(profile.layers):
            raise ValueError(
                f"the program is for {program.layers} layers, this model has {len(profile.layers)}"
                f" ({len(order)} parameters and the time between iterations); plan it from"
                " optimizer.profile(), or pass the profile it was made from as profile="
            )
        if program.ranks != self.ranks.size and len(program.kernel) > 1:
            raise ValueError(
                f"the program is for {program.ranks} ranks, this job has {self.ranks.size}; plan it for"
                f" {self.ranks.size}"
            )
        # Whatever step it was planned for, the engine does the one that was asked for.
        step = {name: self.options[name] for name in ("gather", "early_step")}
        validate(program := replace(program, **step), profile)
        sent = {action.index for action in program.link if action.kind in COLLECTIVE}
        if program.pipeline is not None or len(sent) < len(program.buckets):
            raise ValueError(
                f"the program has {'stages' if program.pipeline else 'collectives outside of lane link'}, but"
                " DistributedOptimizer executes one order on one link; commsched.pipeline trains in stages"
            )
        return self._plan(program, profile, (-1, *layers))
