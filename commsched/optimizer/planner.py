"""Plans of one optimizer: the link is timed, rank 0 makes a program from measured times, every rank takes it.

``Planner`` makes a policy's arguments of what was measured (``measuring``), of the parameters as layers
(``model_layers``) and of the embeddings that travel by rows (``row_traffic``). The policy runs in a child
process: the compiler that it needs would stay in the training process's memory.
"""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from torch import nn

import scheduler
from commsched.backends.interface import Backend
from commsched.env import settings
from commsched.optimizer.buckets import Layout
from commsched.optimizer.model_layers import Model
from commsched.optimizer.options import Options
from commsched.optimizer.row_traffic import Owner, counted_rows, first_rows, sent_by_rows, tied_heads
from commsched.optimizer.whole_matrix import BUCKET_BYTES, whole_buckets
from scheduler import policies
from scheduler.ir.actions import Kind
from scheduler.ir.buckets import Bucket, Piece, fuse_by_bytes, in_backward_order
from scheduler.ir.link import Link, fit
from scheduler.ir.profile import Profile
from scheduler.ir.program import Program
from scheduler.policies.prediction import Prediction, predict
from scheduler.validate import validate

_log = logging.getLogger("commsched")

_UNGROUPED = 8 << 20  # bytes of a bucket of parameters that are in none of the user's groups

# -- the child process ---------------------------------------------------------------------------------------

_FOLDER = str(Path(scheduler.__file__).resolve().parents[1])
# Uses this very package, wherever it lies and whatever lies in the current folder.
_CODE = f"""
import sys
sys.path.insert(0, {_FOLDER!r})
from scheduler.policies.planner_process import serve
serve()
"""


def plan_in_child(profile: Profile, link: Link, policy: str, options: Mapping[str, Any]) -> Program:
    """Return or raise what ``policies.plan`` does, from a child process if the policy needs a compiler.

    Policies without a compiler, also the user's own, run here.
    """
    if policies.needs_compiler(policy):
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
        # The search uses one processor; other jobs may share the host.
        child = subprocess.run(
            [sys.executable, "-c", _CODE],
            input=pickle.dumps(request),
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            timeout=settings().timeout,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        _log.warning("the planning process failed, so this training process does its work: %s", error)
        return None
    answer = pickle.loads(child.stdout)
    if isinstance(answer, ValueError):
        raise answer
    return answer


# -- a plan --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """A program, its profile and link, and which of the model's layers each of its layers is (-1: none)."""

    program: Program
    profile: Profile
    link: Link
    layers: tuple[int, ...]
    whole: Mapping[int, int] = field(default_factory=dict)  # bytes in memory of layers that travel by rows

    @cached_property
    def prediction(self) -> Prediction:
        """The simulated times of the program; the first access takes about a second."""
        dense = None  # the profile with whole gradients, as DDP sends them
        if self.whole:
            layers = list(self.profile.whole().layers)
            for place, size in self.whole.items():
                layers[place] = replace(layers[place], bytes=size)
            dense = replace(self.profile, layers=tuple(layers))
        request = self.program, self.profile, self.link, dense
        answer: Prediction | None = _answer_of_child("predict", *request)
        return answer or predict(*request)

    @property
    def is_predicted(self) -> bool:
        """Whether ``prediction`` returns at once."""
        return "prediction" in self.__dict__

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


_SMALLEST, _LARGEST = 1 << 12, 1 << 21  # bytes of the messages: six sizes, up to the model's own size


class TimedLink:
    """Start-up and rate of the backend's link, fitted to timed RS and AG. Its methods are collective."""

    def __init__(self, backend: Backend, model_bytes: int, wire_share: float = 1.0) -> None:
        """``wire_share``: the part of a gradient's bytes that its messages have. Rates are per own byte."""
        self._backend = backend
        largest = min(max(model_bytes, 16 * _SMALLEST), _LARGEST)
        sizes = [round(_SMALLEST * (largest / _SMALLEST) ** (k / 5)) for k in range(6)]
        self._messages = self._mean(
            [(size, backend.exchange_seconds(round(size * wire_share))) for size in sizes]
        )
        self.link = self._fit(self._messages)

    def refined(self, operations: Sequence[tuple[int, float]]) -> Link:
        """Return the link fitted to these operations' bytes and seconds too, which are larger messages.

        A shaped link sends small messages at full speed, so their times only show the start-up.
        """
        buckets = self._mean(operations)
        fitted = self._fit(self._messages + buckets)
        rest = sum(seconds for _, seconds in buckets) - len(buckets) * fitted.alpha
        total = sum(size for size, _ in buckets)
        return replace(fitted, beta=rest / total) if rest > 0 and total else fitted

    def _mean(self, mine: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
        rows = [row for row in self._backend.ranks.all_values(list(mine)) if row]
        return [(column[0][0], sum(t for _, t in column) / len(column)) for column in zip(*rows, strict=True)]

    def _fit(self, messages: Sequence[tuple[int, float]]) -> Link:
        sizes, seconds = zip(*messages, strict=True)
        return fit(sizes, seconds, name=f"{self._backend.name}, measured")


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


# -- the planner ---------------------------------------------------------------------------------------------


class Planner:
    """Makes the plans of one optimizer. Every method is collective."""

    def __init__(
        self,
        model: Model,
        backend: Backend,
        asked: Options,
        owners: Sequence[int] | None = None,
    ) -> None:
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
            f"schedule={schedule if isinstance(schedule, str) else schedule.hash}, {sorted(options.items())},"
            f" row_sparse={asked.row_sparse}, wire_dtype={asked.wire_dtype}"
        )
        self.ranks.agree(
            "the arguments of DistributedOptimizer", agreed, "pass the same arguments on every rank"
        )
        share = model.wire_share(asked.wire_dtype)
        if asked.gather == "parameters":
            share = (share + 1) / 2  # parameters travel as they are
        self._timed_link = TimedLink(backend, sum(map(model.bytes, range(len(model.names)))), share)
        self.link = self._timed_link.link

    @property
    def adapts(self) -> bool:
        """Whether plans come from times measured in this run."""
        return isinstance(self.schedule, str) and self.given is None

    def send_by_rows(self, params: Sequence[nn.Parameter], modules: Sequence[Owner]) -> None:
        """Let embeddings travel by rows, where the arguments ask for it and it may pay."""
        asked = self._asked
        if asked.row_sparse is not False:
            # One policy knows what corrections are.
            parts = self.policy == "optimal" and self.adapts and self.groups is None
            tied = tied_heads(params, modules) if parts else {}
            rows = first_rows(self.model, params, modules, self.backend, asked, self.link, self.given, tied)
            rows, heads = self.ranks.share((rows, tuple(i for i in rows if i in tied)))
            self.model = replace(self.model, rows=rows, heads=heads)
            self.heads = tied

    def learn(
        self,
        events: Any,
        plan: Plan,
        layout: Layout,
        joined: bool,
        order: Sequence[int],
        early: Container[int],
    ) -> None:
        """Fit the link and count rows with the operations under a plan that sent them beside no compute.

        ``early``: the tied weights of which this rank has sent the head's part first.
        """
        mine = [] if joined else times_of_buckets(events, plan.program.buckets, layout)
        self.link = self._timed_link.refined(mine)
        if self.model.rows:
            sent = sent_by_rows(events, layout, self.model.rows, self.ranks.size)
            place = {i: number for number, i in enumerate(order)}
            late = [i for i, head in self.model.head_of.items() if i not in early or place[head] < place[i]]
            sent = {i: of for i, of in sent.items() if i not in late}
            by_rank = [each for each in self.ranks.all_values(None if joined else sent) if each is not None]
            rows = counted_rows(self.model, by_rank, self._asked.row_sparse is True, self.link)
            self.model = replace(self.model, rows=rows)

    def first(self, order: Sequence[int]) -> Plan:
        """Return the first plan; it communicates after the backward if a measured plan will follow."""
        if isinstance(self.schedule, Program):
            return self._given_program(order)
        if self.given is not None:
            return self._agreed(*self.model.fitted(self.given, order), self.policy)
        return self._agreed(self.model.guess(order, self.link), list(order), "sequential")

    def better(self, profile: Profile, order: Sequence[int]) -> Plan:
        """Return the plan for measured times."""
        return self._agreed(profile, list(order), self.policy)

    def _agreed(self, profile: Profile, order: list[int], policy: Any) -> Plan:
        plan: Any = None
        if self.ranks.rank == 0:
            try:
                given = self._options_for(profile, order)
                if self._asked.row_sparse is True and policy == "optimal":
                    given = {**given, "keep_parts": True}
                program = plan_in_child(profile, self.link, policy, given)
                layers = (-1, *order)
                if not _has_parts(program, profile):
                    profile = profile.whole()
                whole = {k: self.model.bytes(i) for k, i in enumerate(layers) if i in self.model.rows}
                plan = Plan(program, profile, self.link, layers, whole)
            except ValueError as error:
                plan = error
        plan = self.ranks.share(plan)
        if isinstance(plan, ValueError):
            raise plan
        assert isinstance(plan, Plan)
        self.ranks.agree("the plan", plan.program.hash, "this is a fault of commsched; please report it")
        if not _has_parts(plan.program, plan.profile):
            self.model = self.model.sent_whole()
        return plan

    def _options_for(self, profile: Profile, order: Sequence[int]) -> dict[str, Any]:
        """Return the policy's options; with the user's groups or owners, the buckets are given."""
        if self.groups is None and self.owners is None:
            return self.options
        options = {key: value for key, value in self.options.items() if key != "bucket_bytes"}
        if self.groups is None:
            assert self.owners is not None
            owners = [0, *(self.owners[i] for i in order)]
            kinds, limit = [layer.group for layer in profile.layers], self.options.get("bucket_bytes")
            whole = whole_buckets(profile.sizes, kinds, owners, self.ranks.size, limit or BUCKET_BYTES)
            return {**options, "buckets": in_backward_order(whole)}
        layer_of = {i: place + 1 for place, i in enumerate(order)}
        kinds = [layer.group for layer in profile.layers]
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
        validate(program, profile)
        if any(a.kind is Kind.AR for a in program.link) and self.options["gather"] == "parameters":
            raise ValueError(
                "the program all-reduces, and gather='parameters' updates between RS and AG; plan with"
                " gather='parameters'"
            )
        return Plan(program, profile, self.link, (-1, *layers))
