"""The choice of a program: from measured times, on rank 0, the same on every rank."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from commsched.backends.interface import Backend
from commsched.optimizer.bucket_layout import Layout
from commsched.optimizer.link_timing import TimedLink, times_of_buckets
from commsched.optimizer.model_layers import Model
from commsched.optimizer.options import Options
from commsched.optimizer.planner_process import plan_in_child, predict_in_child
from commsched.optimizer.row_traffic import Owner, counted_rows, first_rows, sent_by_rows, tied_heads
from commsched.optimizer.whole_matrix import BUCKET_BYTES, whole_buckets
from scheduler import policies
from scheduler.ir.actions import Kind
from scheduler.ir.buckets import Bucket, Piece, fuse_by_bytes, in_backward_order
from scheduler.ir.link import Link
from scheduler.ir.profile import Profile
from scheduler.ir.program import Program
from scheduler.policies.prediction import Prediction

# Bytes of a bucket of parameters that are in none of the user's groups.
_UNGROUPED = 8 << 20


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
        return predict_in_child(self.program, self.profile, self.link, self._dense() if self.whole else None)

    def _dense(self) -> Profile:
        """Return the profile with whole gradients, as DDP sends them."""
        layers = list(self.profile.whole().layers)
        for place, size in self.whole.items():
            layers[place] = replace(layers[place], bytes=size)
        return replace(self.profile, layers=tuple(layers))

    @property
    def is_predicted(self) -> bool:
        """Whether ``prediction`` returns at once."""
        return "prediction" in self.__dict__

    def buckets(self, model: Model) -> list[Bucket]:
        """Return the program's buckets with parameters in the place of layers.

        They are cut between elements, or between rows, which a bucket gets by its share of the bytes sent.
        """
        sizes = self.profile.sizes
        found = []
        for bucket in self.program.buckets:
            pieces = (_cut(model, self.layers[p.layer], p, sizes[p.layer]) for p in bucket.pieces)
            found.append(Bucket(tuple(pieces), bucket.group))
        return found


def _cut(model: Model, param: int, piece: Piece, sent: int) -> Piece:
    """Return the bytes of a parameter that are sent as bytes ``[start, stop)`` of ``sent``."""
    unit = model.itemsizes[param] * (model.rows[param].elements if param in model.rows else 1)
    units = model.bytes(param) // unit
    return Piece(param, piece.start * units // sent * unit, piece.stop * units // sent * unit)


def _has_parts(program: Program, profile: Profile) -> bool:
    """Return whether a program sends parts of gradients early; else it is for ``profile.whole()``."""
    parts = {place for place, layer in enumerate(profile.layers) if layer.needed_by >= 0}
    return any(parts.intersection(bucket.layers) for bucket in program.buckets)


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
        from scheduler.validate import validate

        validate(program, profile)
        if any(a.kind is Kind.AR for a in program.link) and self.options["gather"] == "parameters":
            raise ValueError(
                "the program all-reduces, and gather='parameters' updates between RS and AG; plan with"
                " gather='parameters'"
            )
        return Plan(program, profile, self.link, (-1, *layers))
