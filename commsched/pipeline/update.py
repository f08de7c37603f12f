"""From a stage's gradients to its next weight version: reduction over its replicas, and the optimizer.

[Note: what the optimizer steps]
The user's function gets the stage's whole parameters once. They follow the newest version: before each step
their memory becomes that of the version that is made. Where buckets sum the gradients, a rank steps the
optimizer package's shards of them (``Shards``), each as a leaf over its elements of that memory::

    gradients of a bucket    RS ->  | . . slot . . |   update: leaf.grad = slot
    the version's memory               leaf            leaf -= ...
    the same bucket       <- copy   | . . slot . . |   AG -> | whole bucket |  copy -> the version's memory

So weights that a script changes between two steps count, if it changes them alike on all replicas. With
``master_weights`` the leaf of a half-precision parameter is a float32 copy of it, and its gradients are
summed in float32, over micro-batches, stages and replicas: half-precision sums would differ with the mesh.
The weights are gathered in half precision.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from inspect import signature
from itertools import chain
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from commsched.optimizer.buckets import Buffers, Layout
from commsched.optimizer.gradient import RESIDUAL, Gradient
from commsched.optimizer.pending import Access, can_pend, clear_pending, mark_pending, without_completing
from commsched.optimizer.sharded_step import (
    HALVES,
    KEY,
    Shards,
    ShardView,
    load_state_dict_of,
    state_dict_with,
    total_norm,
)
from commsched.pipeline.chain import reads
from commsched.pipeline.forward_mode import in_dry_run
from commsched.pipeline.messages import Fabric, NoLane, from_host, to_host
from commsched.pipeline.reduction import ReplicaBuckets, Replicas, StageRanks, summed_over
from commsched.pipeline.stage import Stage, Version

_MEMBERS = ("params", "param_names")  # of a group: not options

Factory = Callable[[list[Any]], Optimizer]
"""Makes an optimizer of parameters; if its first argument is called ``named_parameters``, of pairs of name
and parameter.
"""
OnStep = Callable[[Optimizer, int], None]
"""Called before each step with its number: for learning rates."""


def made_by(
    factory: Factory, named: Mapping[str, nn.Parameter], own: Mapping[nn.Parameter, nn.Parameter]
) -> Optimizer:
    """The optimizer that a function makes of parameters, which then steps ``own`` ones in their places."""
    try:
        first = next(iter(signature(factory).parameters), None)
    except ValueError:  # of a function in C
        first = None
    given: list[Any] = list(named.items() if first == "named_parameters" else named.values())
    try:
        made = factory(given)
    except ValueError as error:
        if "empty parameter list" not in str(error):
            raise
        raise ValueError(
            f"optimizer= has chosen none of a stage's parameters, {', '.join(list(named)[:4])}, ...: pass a"
            " group, which may be empty: [{'params': chosen}]"
        ) from error
    groups = getattr(made, "param_groups", None)
    if groups is None or not callable(getattr(made, "step", None)):
        raise ValueError(f"optimizer= must return an optimizer, but returned {type(made).__name__}")
    known = set(map(id, named.values()))
    if any(id(parameter) not in known for group in groups for parameter in group["params"]):
        raise ValueError(
            "optimizer= must make an optimizer of the parameters that it is given, a stage's; this one has"
            " others, such as the model's own, which do not train"
        )
    _exchange([given, groups, getattr(made, "state", {}), vars(made)], own, set())
    return made


def _exchange(value: Any, own: Mapping[Any, nn.Parameter], seen: set[int]) -> Any:
    """Exchange parameters for ``own`` ones within what an optimizer keeps, also in variables of its hooks.
    Lists and dicts in place: the function that made it may have kept the list that it was given.
    """
    if isinstance(value, nn.Parameter):
        return own.get(value, value)
    if type(value) in (tuple, set):
        return type(value)(_exchange(each, own, seen) for each in value)
    if id(value) in seen or not isinstance(value, (list, dict, Optimizer, FunctionType)):
        return value
    seen.add(id(value))
    if isinstance(value, Optimizer):
        _exchange(vars(value), own, seen)
    elif isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # it is empty
                cell.cell_contents = _exchange(cell.cell_contents, own, seen)
    elif isinstance(value, list):
        value[:] = [_exchange(each, own, seen) for each in value]
    else:
        entries = [(_exchange(k, own, seen), _exchange(v, own, seen)) for k, v in value.items()]
        value.clear()
        value.update(entries)
    return value


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return bool(one == other)


class Update:
    """Sums a stage's gradients over its ranks and steps it; the interpreter calls in the program's order.

    ``buckets`` move gradients and parameters between replicas; ``numbers``: these buckets by the program's
    number. ``early``: buckets may leave as they fill. ``replicas`` sums other gradients.
    ``counted``: the parameters whose gradients this rank counts in a norm over all stages.
    """

    optimizer: Optimizer | None = None
    taken = 0

    def __init__(
        self,
        stage: Stage,
        buckets: ReplicaBuckets | None = None,
        numbers: Mapping[int, Sequence[int]] | None = None,
        early: bool = False,
        replicas: Replicas | None = None,
        counted: Collection[int] = (),
    ) -> None:
        self.stage, self.buckets, self._early = stage, buckets, early
        self.numbers, self.replicas, self.counted = numbers or {}, replicas, counted
        self.grads: list[Tensor | None] = []  # of the period that is stepped, without those in buckets

    def early(self, period: int, version: Version) -> AbstractContextManager[None]:
        """Around the backward that completes a gradient."""
        if self.buckets is None or not self._early:
            return nullcontext()
        self.finish()
        return self.buckets.leaving(period, version)

    def reduce(self, period: int, bucket: int) -> None:
        if self.buckets is not None:
            self.finish()
            grads = self.stage.grads[period]
            self.buckets.begin(period)
            for part in self.numbers[bucket]:
                self.buckets.ready(period, part, grads)
            self.buckets.complete(grads)

    def wait_reduced(self) -> None:
        """Before the step: sums that are under way."""
        if self.buckets is not None:
            self.buckets.wait_reduced()

    def collect(self, period: int) -> None:
        """Sums the gradients that no bucket carries; those in buckets have arrived."""
        grads = self.stage.grads.pop(period, self.stage._no_grads())
        if self.buckets is not None:
            self.buckets.keep_unread()
            for place in self.buckets.places:
                grads[place] = None
        if self.replicas is not None:
            grads = self.replicas.sums(grads, self.stage)
        self.grads = grads

    def _sums(self) -> list[Tensor]:
        """The sums that this rank's shards have."""
        return []

    def counted_grads(self) -> list[Tensor]:
        """The gradients of the period that is stepped, each on one rank only."""
        return self._sums() + [grad for place in self.counted if (grad := self.grads[place]) is not None]

    def all_grads(self) -> list[Tensor]:
        """The gradients of the period that is stepped that this rank has."""
        return self._sums() + [grad for grad in self.grads if grad is not None]

    def settle(self) -> None:
        """No other rank needs this one for what has begun."""
        if self.buckets is not None:
            self.buckets.wait_begun()

    def step(self, period: int, needed: Callable[[int], bool], skip: bool = False) -> None:
        """Makes the next version of the weights, with ``skip`` a copy of the last one."""
        raise NotImplementedError

    def gather(self, bucket: int) -> None:
        if self.buckets is not None:
            for part in self.numbers[bucket]:
                self.buckets.updated(part)

    def prepare(self, version: Version) -> None:
        """Before a forward with this version."""

    def finish(self) -> None:
        """The newest version is complete."""

    def restart(self) -> None:
        """Periods count from 0 again."""
        if self.buckets is not None:
            self.buckets.begun = -1

    def state(self) -> dict[str, Any]:
        """For a checkpoint of this rank."""
        return {"taken": self.taken, "residuals": [] if self.buckets is None else self.buckets.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        self.taken = state["taken"]
        if self.buckets is not None:
            self.buckets.load(state["residuals"])

    def close(self) -> None:
        if self.buckets is not None:
            self.buckets.close()


class WholePart(ShardView):
    """A whole parameter, whose gradient no bucket carries; it may be sparse, and is set before each step."""

    def end_update(self) -> None:
        if self.master is not None and self.leaf.grad is not None:
            self.weight.copy_(self.master)
        self.leaf.grad = None


class _BeforeCompiled:
    """Calls ``first`` before each call of a compiled module, until it is removed."""

    def __init__(self, module: nn.Module, first: Callable[[], None]) -> None:
        compiled: Any = module._compiled_call_impl
        self._module, self._compiled = module, compiled

        def run(*args: Any, **kwargs: Any) -> Any:
            first()
            return compiled(*args, **kwargs)

        module._compiled_call_impl = self._run = run

    def remove(self) -> None:
        if self._module._compiled_call_impl is self._run:
            self._module._compiled_call_impl = self._compiled


class Stepped(Update):
    """Steps the optimizer: on whole parameters, or on this rank's shards of those in buckets. ``parameters``:
    what the optimizer was made of, in the order of the stage's versions.
    """

    def __init__(
        self,
        stage: Stage,
        optimizer: Optimizer | None,
        parameters: Sequence[nn.Parameter],
        on_step: OnStep | None,
        wait_within: bool = False,
        **reduction: Any,
    ) -> None:
        super().__init__(stage, **reduction)
        self.optimizer, self.parameters, self.on_step = optimizer, parameters, on_step
        # None where the optimizer itself can step the parameters.
        self.shards: Shards | None = None
        self._masters = stage.types.masters and any(parameter.dtype in HALVES for parameter in parameters)
        if optimizer is not None and (self.buckets is not None or self._masters):
            self.shards = self._make_shards(optimizer)
            # Their state is spread over leaves and ranks: the user's optimizer shows and takes whole ones.
            optimizer.__dict__.update(state_dict=self.state_dict, load_state_dict=self.load_state_dict)
        self._handles: list[Any] = []
        self._callers: list[Any] = []  # of all modules: what calls each of them, if it is compiled
        self._marked: dict[int, nn.Parameter] = {}  # by place: those that are still on their way
        if wait_within:
            self._wait_within()

    def _make_shards(self, optimizer: Optimizer) -> Shards:
        """This rank's shards of the buckets, and other parameters whole, with the optimizer's first state."""
        gradients = [
            Gradient(place, parameter, self.stage.versions.names[place])
            for place, parameter in enumerate(self.parameters)
        ]
        here = Buffers(Layout({}, [], {}), {})
        if self.buckets is not None:
            here = self.buckets.sums_on(self.stage.device)
            for place in self.buckets.places:
                gradients[place].place(here)
        shards = Shards(
            optimizer,
            type(optimizer),
            gradients,
            here,
            StageRanks(NoLane(), 0, [0]) if self.buckets is None else self.buckets.ranks,
            self._masters,
            set(),
            lambda do, *given: do(*given),
        )
        shards.whole_parts = [self._whole(g) for g in gradients if g.view is None]
        shards.take_state(optimizer.state)
        return shards

    def _whole(self, gradient: Gradient) -> WholePart:
        parameter = gradient.param
        weight = parameter.detach()
        part = WholePart(gradient, weight, 0, weight.numel(), weight, True, nn.Parameter(weight), weight)
        part.bind()
        if self._masters and weight.dtype in HALVES:
            part.leaf = nn.Parameter(weight.float())
        return part

    def parts(self) -> list[ShardView]:
        """Everything that this rank steps as a leaf of its own."""
        return [] if self.shards is None else [*chain(*self.shards.parts), *self.shards.whole_parts]

    def _sums(self) -> list[Tensor]:
        if self.shards is None or self.buckets is None:
            return []
        return self.shards.owned_gradients(self.buckets.used)

    def wait_reduced(self) -> None:
        super().wait_reduced()
        if self.shards is not None and self.buckets is not None:
            self.buckets.bring_shards()

    def step(self, period: int, needed: Callable[[int], bool], skip: bool = False) -> None:
        version = self.stage.versions.advance(needed)
        for parameter, leaf, grad in zip(self.parameters, version.leaves, self.grads, strict=True):
            if self.buckets is not None:
                leaf.data = leaf.data.contiguous()  # a script may have given it other memory
            parameter.data = leaf.data
            if grad is None or grad.dtype == leaf.dtype:  # others are for masters
                parameter.grad = grad
        if self.optimizer is not None and not skip:
            with self._refusing_to_read():
                if self.on_step is not None:
                    self.on_step(self.optimizer, self.taken)
                if self.shards is None:
                    self.optimizer.step()
                else:
                    self._step_shards(self.optimizer, self.shards)
        self.taken += 1
        if self.buckets is not None and self.shards is not None:
            self.buckets.give(self.shards.parts)
            version.pending = set(range(len(self.buckets.layout.slices)))
        self.grads = []
        for parameter in self.parameters:
            parameter.grad = None

    @contextmanager
    def _refusing_to_read(self) -> Iterator[None]:
        """``on_step`` and hooks of the step get an error for gradients of which this rank has a shard or a
        float32 copy: None would mean that there are none.
        """
        used = self._used()
        hidden = [
            place for place, p in enumerate(self.parameters) if used[place] and p.grad is None and can_pend(p)
        ]
        for place in hidden:
            access = Access(partial(self._refuse_reading, place), lambda _: False, lambda _: False)
            mark_pending(self.parameters[place], access, only_grad=True)
        try:
            yield
        finally:
            for place in hidden:
                clear_pending(self.parameters[place])

    def _refuse_reading(self, place: int) -> None:
        raise ValueError(
            f"stage {self.stage.number}: on_step and hooks of the optimizer cannot read or set the gradient"
            f" of {self.stage.versions.names[place]}: each replica has a shard of it, and"
            " master_weights=True a float32 copy; clip with max_norm=, or pass optimizer=None and take the"
            " steps after pipeline.step()"
        )

    def _used(self) -> list[int]:
        """By parameter how many replicas have used it: 0 or 1 where this rank has the whole gradient."""
        used = [int(grad is not None) for grad in self.grads]
        if self.buckets is not None:
            counts = self.buckets.used
            used = [counts[place] if place in self.buckets.places else n for place, n in enumerate(used)]
        return used

    def _step_shards(self, optimizer: Optimizer, shards: Shards) -> None:
        used = self._used()
        for part in shards.whole_parts:
            grad = self.grads[part.gradient.number]
            if grad is not None:
                part.grad = from_host(grad, self.stage.device)

        def update(_: Optimizer) -> None:
            for bucket in range(len(shards.parts)):
                shards.update(bucket, used)
            shards.update_whole(used)

        # With the hooks of the optimizer's own step.
        Optimizer.profile_hook_step(update)(optimizer)
        optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers of learning rates look

    def state(self) -> dict[str, Any]:
        parts = []
        for part in self.parts():
            assert self.shards is not None
            master = {} if part.master is None else {KEY: part.master}
            parts.append(self.shards.state.get(part.leaf, {}) | master)
        optimizer = self.optimizer
        whole = None if optimizer is None else type(optimizer).state_dict(optimizer)
        # Copies: training goes on in the tensors, here and where a state in memory is loaded.
        return {**super().state(), **copy.deepcopy({"optimizer": whole, "parts": parts})}

    def load(self, state: Mapping[str, Any]) -> None:
        super().load(state)
        if self.optimizer is not None:
            type(self.optimizer).load_state_dict(self.optimizer, copy.deepcopy(state["optimizer"]))
        for part, entries in zip(self.parts(), copy.deepcopy(state["parts"]), strict=True):
            assert self.shards is not None
            if part.master is not None:
                part.master.copy_(entries.pop(KEY))
            self.shards.state[part.leaf] = entries

    # The state of whole parameters

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's, with the state of whole parameters. Every rank of the stage must call: each has a
        part.
        """
        optimizer, shards, buckets = self.optimizer, self.shards, self.buckets
        assert optimizer is not None
        if shards is None:
            return type(optimizer).state_dict(optimizer)
        self.finish()
        self.settle()  # the engine must not use the connections of what is gathered here
        gather = (lambda *_: None) if buckets is None else buckets.backend.gather_now
        whole = shards.gathered_state(gather)
        whole = whole if buckets is None else buckets.residuals.added_to(whole)
        members = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        whole = optimizer.state | {p: whole[p] for p in members if p in whole}
        return state_dict_with(optimizer, type(optimizer), whole)

    def load_state_dict(self, state: dict[str, Any], keep_types: bool = False) -> None:
        """Takes this rank's parts of the state of whole parameters; every rank of the stage must call.
        ``keep_types``: where torch rounds tensors to the parameters' type.
        """
        optimizer, shards = self.optimizer, self.shards
        assert optimizer is not None
        load_state_dict_of(optimizer, type(optimizer), state, keep_types or self._masters)
        if self.buckets is not None:
            self.settle()
            self.buckets.residuals.load()
        if shards is not None:
            shards.take_state(optimizer.state)

    def state_by_name(self, names: Mapping[str, str]) -> dict[str, Any]:
        """The optimizer's state, and the options of its groups, by the first ``names`` of parameters
        (``Chain.first_names``). Every rank of the stage must call.
        """
        if self.optimizer is None:
            return {"groups": [], "state": {}}
        whole, groups, numbered = self.state_dict(), [], dict[Any, str]()
        for kept, mine in zip(whole["param_groups"], self._groups(names), strict=True):
            numbered |= zip(kept["params"], mine, strict=True)
            groups.append((mine, {key: value for key, value in kept.items() if key not in _MEMBERS}))
        if others := [key for key in whole["state"] if key not in numbered]:
            raise ValueError(
                f"{type(self.optimizer).__name__} keeps a state of no parameter ({others[:4]}), and stages"
                " that are cut anew can only share out that of parameters"
            )
        return {"groups": groups, "state": {numbered[n]: kept for n, kept in whole["state"].items()}}

    def load_by_name(self, kept: Mapping[str, Any], names: Mapping[str, str]) -> None:
        """Takes this stage's part of what ``state_by_name`` has returned for all stages. A group gets each
        option that its parameters had alike; another one is as the function has made it.
        """
        if self.optimizer is None:
            return
        options = {name: given for mine, given in kept["groups"] for name in mine}
        state: dict[str, Any] = {"state": {}, "param_groups": []}
        made = type(self.optimizer).state_dict(self.optimizer)["param_groups"]
        for group, mine in zip(made, self._groups(names), strict=True):
            given = [options[name] for name in mine if name in options]
            alike = {
                key: value
                for key, value in (given[0] if given else {}).items()
                if all(key in other and _is_equal(other[key], value) for other in given)
            }
            state["param_groups"].append(group | alike)
            for number, name in zip(group["params"], mine, strict=True):
                if name in kept["state"]:
                    entries = copy.deepcopy(kept["state"][name])
                    if self.buckets is None:
                        entries.pop(RESIDUAL, None)  # nobody would send it
                    if entries:
                        state["state"][number] = entries
        self.load_state_dict(state, keep_types=True)

    def _groups(self, names: Mapping[str, str]) -> list[list[str]]:
        """The parameters of each of the optimizer's groups."""
        assert self.optimizer is not None
        own = {
            id(p): names.get(n, n) for p, n in zip(self.parameters, self.stage.versions.names, strict=True)
        }
        return [
            [own[id(parameter)] for parameter in group["params"]] for group in self.optimizer.param_groups
        ]

    # Reading a new version

    def _wait_within(self) -> None:
        """Makes the forward wait for each bucket at the first module that needs it. What a module reads of
        another one (``F.linear(x, self.a.weight)``, shared weights) has no hook there: see ``prepare``.

        A module that ``Module.compile`` has compiled waits outside of its code: hooks would be compiled, too.
        """
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        compiled = [module for module in self.stage.module.modules() if module._compiled_call_impl]
        inside = {part for module in compiled for part in module.modules() if part is not module}
        for module in dict.fromkeys([*reads(self.stage.module), *compiled]):
            mine = self._held(module)
            if not mine or module in inside:
                continue
            take_in = partial(self._take_in, mine)
            if module in compiled:
                self._handles.append(_BeforeCompiled(module, take_in))
            else:  # before hooks of the model that read the weights (pruning, spectral norm)
                hook = module.register_forward_pre_hook(lambda *_, take_in=take_in: take_in(), prepend=True)
                self._handles.append(hook)
        self._callers = self._compiled_callers()

    def _compiled_callers(self) -> list[Any]:
        return [module._compiled_call_impl for module in self.stage.module.modules()]

    def _held(self, module: nn.Module) -> frozenset[int]:
        """The parameters under a module."""
        owners = {id(part._parameters) for part in module.modules()}
        slots = self.stage.versions.slots.values()
        return frozenset(
            place for place, kept in enumerate(slots) if any(id(owner) in owners for owner, _ in kept)
        )

    def prepare(self, version: Version) -> None:
        """Parameters that have not come complete themselves where the forward reads them, as those of
        ``DistributedOptimizer`` do, whatever module or function reads them.
        """
        newest = self.stage.versions.newest
        if newest.pending and self._handles and all(map(can_pend, newest.leaves)):
            if self._callers != self._compiled_callers():  # some were compiled since
                self._wait_within()
            for place in self._places_of(newest.pending) - self._marked.keys():
                read = partial(self._take_in, frozenset([place]))
                mark_pending(newest.leaves[place], Access(read, lambda _: False, lambda _: False))
                self._marked[place] = newest.leaves[place]
        else:
            self.finish()

    def _places_of(self, buckets: Iterable[int]) -> set[int]:
        assert self.buckets is not None
        return {place for bucket in buckets for place in self.buckets.layout.slices[bucket].params}

    def _take_in(self, places: frozenset[int] | None = None) -> None:
        """Waits for the buckets of these parameters, or for all."""
        version = self.stage.versions.newest
        # A dry run reads no weights, and holds a lock that ranks which are threads share: the all-gather may
        # wait for a rank that waits for this lock.
        if not version.pending or in_dry_run():
            return
        assert self.buckets is not None
        # The forward in which this is called sees its own operations only, and no parameter completes itself.
        with torch._C.DisableTorchFunction(), without_completing():
            for bucket in sorted(version.pending, reverse=True):
                if places is None or not places.isdisjoint(self.buckets.layout.slices[bucket].params):
                    self.buckets.take_in(version, bucket)
        for place in self._marked.keys() - self._places_of(version.pending):
            clear_pending(self._marked.pop(place))

    def finish(self) -> None:
        self._take_in()

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        for parameter in self._marked.values():
            clear_pending(parameter)
        super().close()


# -- updates without an optimizer: a stage's gradients are summed over its ranks and left to the caller ------


@contextmanager
def added_to(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Adds the gradients that the body leaves to those that the parameters had before."""
    before = {parameter: parameter.grad for parameter in parameters}
    for parameter in before:
        parameter.grad = None
    yield
    for parameter, grad in before.items():
        if grad is not None:
            parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)


class Gradients(Update):
    """No optimizer: the sums are left in the ``.grad`` of the stage's parameters, the same on all its ranks.
    The caller steps the weights between two steps of the pipeline.
    """

    def step(self, period: int, needed: Callable[[int], bool], skip: bool = False) -> None:
        if self.buckets is not None:
            leaves, used = self.stage.versions.newest.leaves, self.buckets.used
            for place in self.buckets.places:
                sums = torch.zeros_like(leaves[place], memory_format=torch.contiguous_format)
                self.grads[place] = sums if used[place] else None
        self.stage.versions.advance(lambda version: False)

    def finish(self) -> None:
        if self.grads and self.buckets is not None:
            for bucket in range(len(self.buckets.layout.slices)):
                self.buckets.write(bucket, self.grads)
        for leaf, grad in zip(self.stage.versions.newest.leaves, self.grads):
            leaf.grad = grad
        self.grads = []


# -- clipping by the norm over all stages, and steps that all stages skip ------------------------------------


class Clipping:
    """Called before the steps of a period, when all gradients are there. Every rank computes the same norm
    from one number of each rank.
    """

    def __init__(
        self,
        fabric: Fabric,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        skip_nonfinite: bool = False,
    ) -> None:
        self.rank, self.size, self.lane = fabric.rank, fabric.size, fabric.lane("norms")
        self.max_norm, self.norm_type, self.skip_nonfinite = max_norm, norm_type, skip_nonfinite

    def __call__(self, updates: Collection[Update]) -> bool:
        """Clips the gradients of this rank's stages; whether the step is to be skipped."""
        counted = [grad for update in updates for grad in update.counted_grads()]
        finite = True
        if self.max_norm is not None:
            total = self.norm(counted, self.norm_type)
            scale([grad for update in updates for grad in update.all_grads()], self.max_norm, total)
            finite = bool(total.isfinite())
        if self.skip_nonfinite and (self.max_norm is None or not finite):
            # A norm may also overflow.
            finite = bool(self.norm(counted, torch.inf).isfinite())
        return self.skip_nonfinite and not finite

    def norm(self, grads: Iterable[Tensor], norm_type: float) -> Tensor:
        """The norm of all ranks' gradients, in double precision: rounded sums would differ with the mesh."""
        values = [grad.coalesce().values() if grad.is_sparse else grad for grad in grads]
        norms = [torch.linalg.vector_norm(v, norm_type, dtype=_double(v)) for v in values if v.numel()]
        return total_norm([to_host(norm) for norm in norms], norm_type, self._everyones, torch.device("cpu"))

    def _everyones(self, mine: Tensor) -> Tensor:
        row = torch.zeros(self.size, dtype=torch.float64)
        row[self.rank] = mine
        summed_over(self.lane, self.rank, range(self.size), [row])
        return row


def _double(value: Tensor) -> torch.dtype:
    return torch.complex128 if value.is_complex() else torch.float64


def scale(grads: Iterable[Tensor], max_norm: float, total: Tensor) -> None:
    """Multiplies the gradients, each once, as ``torch.nn.utils.clip_grad_norm_`` does."""
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0).item()
    if factor != 1.0:
        for grad in {id(grad): grad for grad in grads}.values():
            grad.mul_(factor)
