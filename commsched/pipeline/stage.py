"""One stage on one rank: forward, backward and weight gradients of micro-batches, with weight versions."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node
from torch.utils._pytree import tree_flatten, tree_unflatten

from commsched.backends.interface import Scaling
from commsched.collectives.compression import block_code
from commsched.optimizer.planner import SHARE, travels_quantised
from commsched.optimizer.sharded_step import HALVES
from commsched.pipeline.following import follow_model, replaced, writes_shared
from commsched.pipeline.random_state import random_state, set_random_state
from commsched.pipeline.rows import Cut

if TYPE_CHECKING:
    from commsched.pipeline.tiled import TiledModule

Loss = Callable[[Any, Any], Tensor]
Micro = tuple[int, int]
"""Micro-batch and period."""
Attributes = Sequence[tuple[dict[str, Any], dict[str, Any], frozenset[str]]]
"""The dictionary of each module, and its attributes and all of its keys at some time."""
Hooks = Sequence[tuple[dict[int, Any], ...]]
"""The forward hooks of each module at some time, by ``_HOOKS``."""
_HOOKS = tuple(key for key in vars(nn.Module()) if key.startswith("_forward") and "hooks" in key)
_INTERNAL = frozenset(vars(nn.Module())) - {"training"} | {"_compiled_call_impl"}
_GONE = object()


@dataclass(frozen=True)
class GradientTypes:
    """In which types the gradients of a stage are summed, and travel between its replicas. ``masters``:
    those of half-precision parameters are summed in float32. ``wire``: the ``wire_dtype`` of a `Compression`.
    """

    masters: bool = False
    wire: torch.dtype | None = None

    def sum_type(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if self.masters and dtype in HALVES else dtype

    def quantises(self, parameter: Tensor) -> bool:
        return bool(block_code(self.wire)) and travels_quantised(parameter)

    def rs_bytes(self, parameter: Tensor) -> float:
        """Bytes of its gradient in a reduce-scatter, all replicas' parts together."""
        kind = self.sum_type(parameter.dtype)
        if self.quantises(parameter):
            return SHARE * kind.itemsize * parameter.numel()
        return (Scaling(wire_dtype=self.wire).wire_type(kind) or kind).itemsize * parameter.numel()


@dataclass
class Head:
    """Targets and weight of this replica's part of the mean loss. ``counts``: add the value to the step's
    loss; one tile of a replica does that, since all tiles have the same value. ``count``: a function of whole
    outputs and targets to call instead of the loss.
    """

    targets: Any
    weight: float
    counts: bool = True
    count: Loss | None = None


@dataclass
class Saved:
    """The state that a stage keeps of a micro-batch until its backward."""

    version: Version
    leaves: list[Any]
    spec: Any
    head: Head | None
    random: list[Tensor]
    micro: Micro
    cuts: list[Cut | None]
    outputs: list[Any] = field(default_factory=list)
    buffers: dict[int, Tensor | None] = field(default_factory=dict)  # by place: as the forward found them
    weights: Callable[[], Any] | None = None
    attributes: Attributes = ()
    hooks: Hooks = ()  # those of the forward; () after ``resume``
    written: set[int] = field(default_factory=set)  # buffers that a script has written to since, by place


class Stage:
    """``module`` with its parameters in versions. ``recompute``: keep inputs only and repeat the forward.
    ``stays``: micro-batches may be in flight between two steps; a checkpoint repeats their forward.
    ``tiled``: by micro-batch, the module on the grid of tiles that computes it; empty for whole samples.
    ``types``: of gradients. ``shared``: tensors that other stages have, too.
    """

    def __init__(
        self,
        number: int,
        module: nn.Module,
        loss: Loss | None,
        recompute: bool,
        stays: bool = True,
        tiled: Mapping[int, TiledModule] | None = None,
        own_parameters: bool = False,
        types: GradientTypes = GradientTypes(),
        shared: Iterable[str] = (),
    ) -> None:
        self.number, self.module, self.loss, self.recompute = number, module, loss, recompute
        self._class_weights = _has_class_weights(loss)
        self.tiled = tiled or {}
        self.modules = list(dict.fromkeys([module, *(each.module for each in self.tiled.values())]))
        self.versions = Versions(self.modules, own_parameters)
        kinds = [leaf.dtype for leaf in self.versions.newest.leaves]
        self.types = types
        self.grad_types = [self.types.sum_type(kind) for kind in kinds]
        self.stays, self._repeats = stays, recompute or stays
        self.saved: dict[Micro, Saved] = {}
        self.grads: defaultdict[int, list[Tensor | None]] = defaultdict(self._no_grads)
        self.losses: defaultdict[int, Any] = defaultdict(float)  # by period; read once, when it is told
        self.most_saved = self.forwards = 0
        self.output_spec: Any = None
        self.output_cuts: list[Cut | None] = []
        self.device = next(module.parameters(), torch.empty(0)).device
        self._checked = -1  # the last period whose graph was looked at
        with_buffers = [
            (part, key)
            for part in dict.fromkeys(part for each in self.modules for part in each.modules())
            for key, buffer in part._buffers.items()
            if buffer is not None
        ]
        self._buffer_slots: list[tuple[dict[str, Any], str]] = [
            (part._buffers, key) for part, key in with_buffers
        ]
        self._buffer_modules = [part for part, _ in with_buffers]
        # Of this step, where another step may run its backward.
        self._attributes: Attributes = ()
        self._hooks: Hooks = ()
        self._found: dict[int, Tensor | None] = {}  # copies of the buffers, as the last forward found them
        self._shared = [(name, *slot_of(module, name)) for name in shared]
        followed = [each for part in self.modules for each in part._stage_followed]  # type: ignore[union-attr]
        for each in followed:
            each.remember()  # tiles change modules
        self._owns = [vars(each.runs) for each in followed if each.runs is not None]
        self._of_backwards: set[tuple[int, str]] = set()  # attributes that backwards change, in a hook

    def follow(self) -> None:
        """Takes over what a script has changed in the model."""
        self.versions.use_newest()
        for module in self.modules:
            follow_model(module)
        if self.stays:
            self._attributes = self.present()
            hooks = [tuple(dict(own[key]) for key in _HOOKS) for own in self._owns]
            if hooks != self._hooks:
                self._hooks = hooks
            if self.saved:
                written = self._unlike(self._found)
                for saved in self.saved.values():
                    saved.written |= written

    def present(self) -> Attributes:
        """The attributes of the modules that the stage runs, in the same order in pipelines made alike."""
        return [(own, attributes(own), frozenset(own)) for own in self._owns]

    def leave(self) -> None:
        """Ends a step, or an evaluation: until the next ``follow``, only scripts write to buffers."""
        if self.stays and self.saved:
            self._copied_buffers()

    @contextmanager
    def _as_forwarded(self, saved: Saved, in_backward: bool = False) -> Iterator[None]:
        """With the attributes, modes and forward hooks that the modules had in the step of a forward, and the
        buffers that a script has written to since: a backward may repeat the forward, or a checkpointed block
        in it. What only backwards change stays: a hook may count them.
        """
        # Most modules are as they were, which is seen soon; the others by place, with what they are now.
        now = {n: dict(then[0]) for n, then in enumerate(saved.attributes) if not _is_as(*then)}
        given = [attributes for _, attributes, _ in saved.attributes]
        for place, before in now.items():
            stay = {key for at, key in self._of_backwards if at == place}
            values = {key: value for key, value in given[place].items() if key not in stay}
            given[place] = values | {key: before[key] for key in stay & before.keys()}
            _assign(saved.attributes[place][0], given[place])
        hooks = self._use_hooks(saved.hooks)
        slots = [(saved.buffers[place], *self._buffer_slots[place]) for place in saved.written]
        buffers = [(held, key, held.get(key, _GONE)) for _, held, key in slots]
        try:
            for copied, held, key in slots:
                held[key] = None if copied is None else copied.clone()
            yield
        finally:
            self._use_hooks(hooks)
            for place, (own, then, keys) in enumerate(saved.attributes):
                if place in now or not _is_as(own, then, keys):
                    self._leave_module(place, own, given[place], now.get(place, then), in_backward)
            for held, key, buffer in buffers:
                if buffer is _GONE:
                    held.pop(key, None)
                else:
                    held[key] = buffer

    def _use_hooks(self, hooks: Hooks) -> Hooks:
        """Gives the modules the hooks of another step; returns what they had, () if those are the same."""
        if not hooks or hooks is self._hooks:
            return ()
        before = [tuple(dict(own[key]) for key in _HOOKS) for own in self._owns]
        for own, then in zip(self._owns, hooks, strict=True):
            for key, mine in zip(_HOOKS, then, strict=True):
                own[key].clear()  # in place: handles that remove a hook refer to this dictionary
                own[key].update(mine)
        for module in self.modules:
            module._stage_known.clear()  # type: ignore[operator, union-attr]  # hooks may do other operations
        return before

    def _leave_module(
        self,
        place: int,
        own: dict[str, Any],
        given: dict[str, Any],
        before: dict[str, Any],
        in_backward: bool,
    ) -> None:
        """Gives a module its attributes back, but for those that only a backward has changed."""
        kept = {}
        for key, value in attributes(own).items() if in_backward else ():
            had = given.get(key, _GONE)
            if value is not had and had is before.get(key, _GONE):
                self._of_backwards.add((place, key))
                kept[key] = value
        _assign(own, before | kept)

    def load(self, state: Mapping[str, Any]) -> None:
        """Copies a state into the module; its copies share the parameters and get the same buffers."""
        for module in self.modules:
            load_state(module, state)

    @torch.no_grad()
    def load_buffers(self, state: Mapping[str, Tensor]) -> None:
        for module in self.modules:
            for key, value in module.named_buffers():
                value.copy_(state[key])

    @contextmanager
    def with_buffers(self, state: Mapping[str, Tensor]) -> Iterator[None]:
        """With copies of these in place of the module's buffers, which graphs in flight may have saved."""
        slots = [
            (*slot_of(module, name), own, name)
            for module in self.modules
            for name, own in module.named_buffers(remove_duplicate=False)
        ]
        copies = {id(own): state[name].to(own.device, copy=True) for *_, own, name in slots}
        for buffers, key, own, _ in slots:
            buffers[key] = copies[id(own)]
        try:
            yield
        finally:
            for buffers, key, own, _ in slots:
                buffers[key] = own

    def copies(self, name: str) -> list[Tensor]:
        """A tensor of the module, and that of each copy on tiles, without a script's view of their writes."""
        return [values[key].data for module in self.modules for values, key in [slot_of(module, name)]]

    def _no_grads(self) -> list[Tensor | None]:
        return [None] * len(self.versions.names)

    def zeros(self, place: int) -> Tensor:
        """The gradient of a parameter that nothing has used."""
        return torch.zeros_like(self.versions.newest.leaves[place], dtype=self.grad_types[place])

    def summed(self, place: int, before: Tensor | None, grad: Tensor | None) -> Tensor | None:
        """The gradient of a parameter so far, ``before``, and what a backward has added to it."""
        if grad is None:
            return before
        grad = grad.to(self.grad_types[place])
        if before is None:
            return grad
        return before + grad if before.is_sparse else before.add_(grad)

    # Forward

    def forward(
        self,
        micro: Micro,
        inputs: tuple[list[Any], Any, list[Cut | None]],
        version: Version,
        head: Head | None,
    ) -> list[Any]:
        """The leaves of what the stage puts out; the last stage's is the loss of its rows. ``inputs``:
        leaves, structure, and how tiles cut the leaves.
        """
        leaves, spec, cuts = inputs
        self.forwards += 1
        random = random_state(self.device) if self._repeats else []
        saved = Saved(version, leaves, spec, head, random, micro, cuts)
        saved.attributes, saved.hooks = self._attributes, self._hooks
        self.saved[micro] = saved
        self.most_saved = max(self.most_saved, len(self.saved))
        saved.buffers = self._copied_buffers() if self._repeats else {}
        with torch.no_grad() if self.recompute else self._reading_copies(saved):
            saved.outputs = self.run(saved)
        if head is not None:
            self.add_loss(micro[1], saved.outputs[0], head)
        outputs = saved.outputs
        if self.recompute:
            saved.outputs = []
        return outputs

    @contextmanager
    def _reading_copies(self, saved: Saved) -> Iterator[None]:
        """With copies of the buffers of modules in evaluation mode, where a later step may train in between:
        batch norm's backward reads its statistics again, and autograd does not see that its forward in
        training writes to them.
        """
        places = [n for n, part in enumerate(self._buffer_modules if self.stays else ()) if not part.training]
        slots = [
            (*self._buffer_slots[place], found)
            for place in places
            if (found := saved.buffers[place]) is not None
        ]
        lent = [(held, key, held[key], found, found.clone()) for held, key, found in slots]
        for held, key, _, _, copied in lent:
            held[key] = copied
        try:
            yield
        finally:
            for held, key, buffer, found, copied in lent:
                if held[key] is copied:
                    held[key] = buffer
                    if not _alike(copied, found):  # by the forward
                        buffer.data.copy_(copied)

    def add_loss(self, period: int, loss: Tensor, head: Head) -> None:
        """Adds to a period's loss where it is computed: reading it here would wait for the device."""
        if head.counts:
            self.losses[period] += loss.detach().double().view(()) * head.weight

    def run(self, saved: Saved) -> list[Any]:
        """The leaves that the module puts out, or the loss."""
        self.versions.use(saved.version)
        tiled = self.tiled.get(saved.micro[0])
        leaves = saved.leaves if tiled is None else tiled.enter(saved.leaves, saved.cuts)
        module = self.module if tiled is None else tiled.module
        before = [(values[key], values[key]._version) for _, values, key in self._shared]
        spec = saved.spec
        output = module(*(leaves if _is_flat(spec, len(leaves)) else tree_unflatten(leaves, spec)))
        for (name, values, key), (tensor, version) in zip(self._shared, before, strict=True):
            if values[key] is not tensor or tensor._version != version:
                raise writes_shared(name)
        if saved.head is not None:
            if saved.head.count is not None:
                whole = output if tiled is None else tiled.whole(output)
                return [saved.head.count(whole, saved.head.targets)]
            assert self.loss is not None
            self._check_class_weights(saved.head)
            loss = self.loss(output, saved.head.targets)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                raise ValueError(
                    "loss(outputs, targets) must return one number, the mean over the rows or, with count=,"
                    " the sum over the terms; got"
                    f" {tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__}"
                )
            return [loss if tiled is None else tiled.local(loss)]
        leaves, self.output_spec = flattened(output, self.output_spec)
        if tiled is None:
            self.output_cuts = [None] * len(leaves)
        else:
            leaves, self.output_cuts = tiled.leave(leaves)
        return leaves

    def _check_class_weights(self, head: Head) -> None:
        """``ValueError`` for a mean over class weights of a part of a step's rows."""
        indices = isinstance(head.targets, Tensor) and not head.targets.is_floating_point()
        if self._class_weights and indices and head.weight != 1:
            raise ValueError(
                "loss= divides by the sum of its targets' class weights, and a pipeline weights the means of"
                f" a step's micro-batches and replicas by their rows (here {head.weight:.3g}): pass"
                " reduction='sum' and count=lambda targets: weight[targets].sum()"
            )

    def needs_grad(self, leaves: list[Any], inputs: list[Any]) -> list[bool]:
        """Which outputs have a gradient. Without a graph (recomputation) all that can have one."""
        if not self.recompute:
            return [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
        possible = self.versions.names or any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
        return [
            bool(possible and isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()))
            for x in leaves
        ]

    # Backward

    def backward(self, micro: Micro, grads: list[Tensor | None], split: bool) -> list[Tensor | None]:
        """The gradients of the inputs, for each leaf; those of the parameters are added to the period's,
        unless ``split`` leaves them to ``weight_gradients``.
        """
        saved = self.saved[micro]
        if self.recompute:
            with self._as_forwarded(saved):
                self._repeat(saved)
        with self._as_forwarded(saved, in_backward=True):
            return self._backward(saved, grads, split)

    def _backward(self, saved: Saved, grads: list[Tensor | None], split: bool) -> list[Tensor | None]:
        micro = saved.micro
        # A checkpointed block is computed again in its backward.
        self.versions.use(saved.version)
        pairs = self._roots(saved, grads)
        if micro[1] != self._checked:
            self._checked = micro[1]
            self._check_parameters(saved, [output for output, _ in pairs])
        inputs = [x for x in saved.leaves if isinstance(x, Tensor) and x.requires_grad]
        halves = None
        if split and inputs and pairs:
            outputs, sent = [output for output, _ in pairs], [grad for _, grad in pairs]
            halves = split_backward(outputs, sent, inputs, saved.version.leaves)
        if halves is not None:
            found, saved.weights = halves
            result = iter(found)
        else:
            self._whole_backward(pairs, inputs, saved.version, self.grads[micro[1]])
            result = iter([x.grad for x in inputs])
        saved.outputs = []
        if saved.weights is None and not split:
            del self.saved[micro]
        return [next(result) if isinstance(x, Tensor) and x.requires_grad else None for x in saved.leaves]

    def _check_parameters(self, saved: Saved, outputs: Sequence[Tensor]) -> None:
        """``ValueError`` where outputs depend on a parameter that nothing steps."""
        mine = {id(leaf) for leaf in (*saved.version.leaves, *saved.leaves)}
        for node in _nodes([output.grad_fn for output in outputs if output.grad_fn is not None]):
            leaf = getattr(node, "variable", None)
            if isinstance(leaf, nn.Parameter) and id(leaf) not in mine:
                raise ValueError(
                    f"stage {self.number} computes with a parameter of shape {tuple(leaf.shape)} that it does"
                    " not train, of another stage or held in a list: read parameters from their modules only,"
                    " and put penalties on them into the optimizer (weight_decay=) or into their layers"
                )

    def _roots(self, saved: Saved, grads: list[Tensor | None]) -> list[tuple[Tensor, Tensor]]:
        if saved.head is not None:
            loss = saved.outputs[0]
            if not loss.requires_grad:
                if not loss.detach().any():
                    return []  # of a micro-batch without a term: outputs.new_zeros(())
                raise ValueError(
                    f"the loss, of stage {self.number}, depends on no trained parameter (requires_grad is"
                    " False), so a step would train nothing: compute outputs and loss without detach() and"
                    " no_grad(), and unfreeze what is to be trained"
                )
            return [(loss, torch.full_like(loss, saved.head.weight))]
        return [
            (output, grad)
            for output, grad in zip(saved.outputs, grads, strict=True)
            if grad is not None and isinstance(output, Tensor) and output.requires_grad
        ]

    def weight_gradients(self, micro: Micro) -> None:
        """The second half of a split backward."""
        saved = self.saved.pop(micro)
        if saved.weights is None:
            return
        self.versions.use(saved.version)
        mine = self.grads[micro[1]]
        for place, grad in enumerate(saved.weights()):
            mine[place] = self.summed(place, mine[place], grad)

    def _whole_backward(
        self,
        pairs: list[tuple[Tensor, Tensor]],
        inputs: list[Tensor],
        version: Version,
        mine: list[Tensor | None],
    ) -> None:
        """Adds to a period's gradients, ``mine``: several periods may use one version. Gradients of another
        type than their parameter's cannot be its ``.grad``: they stay in ``mine``.
        """
        for x in inputs:
            x.grad = None
        for leaf, grad in zip(version.leaves, mine, strict=True):
            leaf.grad = grad if grad is None or grad.dtype == leaf.dtype else None
        try:
            if pairs:
                torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])
        finally:
            self.gradients(version, mine)
            for leaf in version.leaves:
                leaf.grad = None

    def gradients(self, version: Version, mine: list[Tensor | None]) -> list[Tensor | None]:
        """A period's gradients so far, ``mine``, in the midst of a backward too."""
        for place, leaf in enumerate(version.leaves):
            if leaf.dtype == self.grad_types[place]:
                mine[place] = leaf.grad
            else:
                mine[place], leaf.grad = self.summed(place, mine[place], leaf.grad), None
        return mine

    # Recomputation

    def _copied_buffers(self) -> dict[int, Tensor | None]:
        """The buffers as they are, by place; what has not changed shares the copy of an earlier forward.

        Their values are compared: ``.data`` and batch norm's kernels change them without a new version. Any
        may be another one when the forward is repeated: later forwards, an evaluation and scripts write, too.
        """
        found: dict[int, Tensor | None] = {}
        for place, (held, key) in enumerate(self._buffer_slots):
            before, now = self._found.get(place), held.get(key)
            found[place] = before if _alike(before, now) else None if now is None else now.detach().clone()
        self._found = found
        return found

    def _unlike(self, copies: Mapping[int, Tensor | None]) -> set[int]:
        """The places of the buffers that differ from these copies."""
        slots = enumerate(self._buffer_slots)
        return {place for place, (held, key) in slots if not _alike(copies[place], held.get(key))}

    def changed_buffers(self, saved: Saved) -> dict[int, Tensor | None]:
        """Those that are no longer as a forward has found them, by place, with their values then."""
        return {place: saved.buffers[place] for place in self._unlike(saved.buffers)}

    def _repeat(self, saved: Saved) -> None:
        """The forward again, with the same random numbers and buffers; the buffers have had their update."""
        now = random_state(self.device)
        set_random_state(saved.random, self.device)
        kept = [(buffers, key, buffers.get(key)) for buffers, key in self._buffer_slots]
        for place, (buffers, key, _) in enumerate(kept):
            found = saved.buffers[place]
            buffers[key] = None if found is None else found.clone()
        # Some releases of torch also cache casts that autocast makes under no_grad: these have no graph.
        torch.clear_autocast_cache()
        try:
            with torch.enable_grad():
                saved.outputs = self.run(saved)
        finally:
            set_random_state(now, self.device)
            for buffers, key, buffer in kept:
                buffers[key] = buffer

    def restore(self, micro: Micro, saved: Saved) -> None:
        """Takes up a micro-batch that was between forward and backward when it was saved."""
        self.saved[micro] = saved
        saved.buffers = self._copied_buffers() | saved.buffers
        if not self.recompute:
            with self._as_forwarded(saved):
                self._repeat(saved)


def attributes(own: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes in a module's dictionary, without results that a forward has left there: these have a
    graph, so no script has set them.
    """
    return {
        key: value
        for key, value in own.items()
        if key not in _INTERNAL and not (isinstance(value, Tensor) and value.grad_fn is not None)
    }


def _is_as(own: Mapping[str, Any], then: Mapping[str, Any], keys: frozenset[str]) -> bool:
    """Whether a module has the attributes that it had, told soon: every backward asks this of all modules."""
    return own.keys() == keys and all(own.get(key, _GONE) is value for key, value in then.items())


def _assign(own: dict[str, Any], values: Mapping[str, Any]) -> None:
    for key in attributes(own).keys() - values.keys():
        del own[key]
    own.update(values)


def _has_class_weights(loss: Any) -> bool:
    """Whether it is a loss of torch that divides by the sum of class weights."""
    if isinstance(loss, partial):
        known, given = loss.func in (F.cross_entropy, F.nll_loss), loss.keywords
    else:
        forward = getattr(type(loss), "forward", None)
        known = forward in (nn.CrossEntropyLoss.forward, nn.NLLLoss.forward)
        given = {"weight": loss.weight, "reduction": loss.reduction} if known else {}
    return known and given.get("weight") is not None and given.get("reduction", "mean") == "mean"


@torch.no_grad()
def load_state(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Copies a state into a module's tensors, and gives its modules their extra state."""
    for key, value in module.state_dict().items():
        path, _, name = key.rpartition(".")
        if name == "_extra_state":
            module.get_submodule(path).set_extra_state(state[key])
        else:
            value.copy_(state[key])


def slot_of(module: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """The dictionary that holds a parameter or buffer of a module, and its key there."""
    path, _, key = name.rpartition(".")
    part = module.get_submodule(path)
    return (part._parameters if key in part._parameters else part._buffers), key


def _alike(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    kinds = [(tensor.dtype, tensor.device, tensor.layout) for tensor in (one, other)]
    return kinds[0] == kinds[1] and one.layout is torch.strided and (one.is_meta or torch.equal(one, other))


def _is_flat(spec: Any, count: int) -> bool:
    """A tuple of so many leaves, which needs no walk: this happens for every micro-batch."""
    return spec is not None and spec.type is tuple and spec.num_nodes == spec.num_children + 1 == count + 1


def flattened(output: Any, last: Any) -> tuple[list[Any], Any]:
    """Leaves and structure; ``last`` was that of the one before."""
    if type(output) is tuple and _is_flat(last, len(output)) and all(isinstance(x, Tensor) for x in output):
        return list(output), last
    return tree_flatten(output)


# -- weight versions of one stage on one rank ----------------------------------------------------------------

# A version is a set of tensors of its own; the module gets the version it is to compute with by exchanging
# its parameters, so nothing that is in flight is ever written to. A step writes into the tensors of a version
# that nothing needs any more, or into new ones.

Slot = tuple[dict[str, nn.Parameter | None], str]
"""A module's dictionary of parameters, and the key of one."""


class Version:
    """The weights after ``number`` steps. ``pending``: buckets whose all-gather has not been taken in."""

    def __init__(self, number: int, leaves: list[nn.Parameter]) -> None:
        self.number, self.leaves = number, leaves
        self.pending: set[int] = set()

    @property
    def data(self) -> list[Tensor]:
        return [leaf.data for leaf in self.leaves]


def with_attributes(parameter: nn.Parameter, of: nn.Parameter) -> nn.Parameter:
    """Return the parameter with the attributes of another: factories choose groups by them."""
    parameter.__dict__.update(of.__dict__)
    return parameter


def _has_hooks(parameter: nn.Parameter) -> bool:
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


class Versions:
    """The trainable parameters of a stage, by name, in all versions that something may still need.

    ``modules``: the stage's, and copies that share its parameters. ``own_parameters``: the first version is
    the caller's own parameters and no copies of them.
    """

    def __init__(self, modules: Sequence[nn.Module], own_parameters: bool = False) -> None:
        self.slots: dict[str, list[Slot]] = {}
        self.given: list[nn.Parameter] = []  # the caller's, where the first version is copies of them
        by_id: dict[int, str] = {}
        leaves: list[nn.Parameter] = []
        self.places: dict[str, int] = {}  # of every name in the leaves
        self._frozen: list[tuple[str, dict[str, nn.Parameter | None], str, nn.Parameter | None]] = []
        # Shared parameters have one name and several slots.
        every = [found for module in modules for found in module.named_modules(remove_duplicate=False)]
        for prefix, part in every:
            for key, parameter in part._parameters.items():
                path = f"{prefix}.{key}" if prefix else key
                if parameter is None or not parameter.requires_grad:
                    self._frozen.append((path, part._parameters, key, parameter))
                    continue
                name = by_id.setdefault(id(parameter), path)
                if name not in self.slots:
                    self.slots[name] = []
                    leaves.append(parameter)
                self.slots[name].append((part._parameters, key))
                self.places[path] = self.places.get(name, len(leaves) - 1)
        self.names = tuple(self.slots)
        if not own_parameters:
            # Hooks and gradients of the caller's parameters stay out of the pipeline.
            hooked = [name for name, leaf in zip(self.names, leaves, strict=True) if _has_hooks(leaf)]
            if hooked:
                warnings.warn(
                    f"the hooks of {', '.join(hooked[:4])} are not called: a pipeline with optimizer= trains"
                    " parameters of its own; with optimizer=None it trains the model's",
                    stacklevel=2,
                )
            # ``data`` has a version counter of its own: steps are no writes of a script (see ``Followed``).
            leaves = [with_attributes(nn.Parameter(leaf.data.contiguous()), leaf) for leaf in leaves]
        first = Version(0, leaves)
        self.live: dict[int, Version] = {0: first}
        self.newest = first
        self._types = [leaf.dtype for leaf in first.leaves]
        self._free: list[list[nn.Parameter]] = []
        self._in_use: Version | None = None
        self.most = 1
        self.use(first)

    def use(self, version: Version) -> None:
        """Makes the module compute with this version."""
        if version is self._in_use:
            return
        for slots, leaf in zip(self.slots.values(), version.leaves, strict=True):
            now = slots[0][0][slots[0][1]]
            if now is not None and now.requires_grad is not leaf.requires_grad:
                leaf.requires_grad_(now.requires_grad)  # frozen between steps
            for parameters, key in slots:
                parameters[key] = leaf
        self._in_use = version

    @contextmanager
    def callers(self) -> Iterator[list[nn.Parameter]]:
        """The caller's parameters, which the modules have meanwhile. They are not kept any longer."""
        given, self.given = self.given, []
        self.use(Version(-1, given))
        try:
            yield given
        finally:
            self.use(self.newest)

    def use_newest(self) -> None:
        """``ValueError`` if the modules have other parameters than the version in use, or train one that was
        frozen at the start.
        """
        assert self._in_use is not None
        in_use = zip(self.slots.items(), self._in_use.leaves, self._types, strict=True)
        for (name, slots), leaf, dtype in in_use:
            if any(parameters.get(key) is not leaf for parameters, key in slots):
                raise replaced(name)
            if leaf.dtype != dtype:
                text = f"has been converted from {dtype} to {leaf.dtype} since the pipeline was made"
                raise ValueError(f"{name} {text}: convert it before, or make a new Pipeline")
        for name, parameters, key, frozen in self._frozen:
            if parameters.get(key) is not frozen:
                raise replaced(name)
            if frozen is not None and frozen.requires_grad:
                text = "was frozen when the pipeline was made, so no optimizer steps it"
                raise ValueError(f"{name} {text}: freeze it again, or make a new Pipeline")
        self.use(self.newest)

    def advance(self, needed: Callable[[int], bool]) -> Version:
        """The tensors for the next version. They are the newest version's own where ``needed`` says that
        nothing will compute with it again; otherwise they hold a copy of it.
        """
        # autocast keeps its casts of parameters, by tensor, until the caller leaves it.
        torch.clear_autocast_cache()
        for number in [n for n in self.live if n != self.newest.number and not needed(n)]:
            self._free.append(self.live.pop(number).leaves)
        old = self.newest
        if needed(old.number):
            new = Version(old.number + 1, self._copied(old))
        else:
            del self.live[old.number]
            new = Version(old.number + 1, old.leaves)
        self.live[new.number] = self.newest = new
        self.most = max(self.most, len(self.live))
        return new

    def _copied(self, version: Version) -> list[nn.Parameter]:
        """Other tensors, with the values of a version's."""
        made = (nn.Parameter(torch.empty_like(leaf)) for leaf in version.leaves)
        leaves = self._free.pop() if self._free else list(made)
        if leaves:
            torch._foreach_copy_([leaf.data for leaf in leaves], version.data)
        return leaves

    def part(self) -> None:
        """Gives the newest version tensors of its own: a script may write to them, and what is in flight goes
        on with those that it has.
        """
        self.newest = self.live[self.newest.number] = Version(self.newest.number, self._copied(self.newest))
        self.use(self.newest)

    def reset(self, number: int) -> None:
        """The newest version becomes number ``number``, and the only one."""
        self.live = {number: self.newest}
        self.newest.number = number
        self.use(self.newest)


# -- a backward in two halves (zero bubble) ------------------------------------------------------------------

# The gradients of the inputs now, those of the parameters later. The first half runs the graph towards the
# inputs only and keeps what arrives at the nodes where a parameter joins; the second half runs from each of
# these nodes to its parameters alone, so nothing is computed twice. Both halves call hooks of these nodes'
# tensors.

Grads = tuple["Tensor | None", ...]
# The backward of a compiled block gives its memory back; that of a checkpoint with use_reentrant=True refuses
# to compute some gradients only.
_AT_ONCE = ("CompiledFunctionBackward", "CheckpointFunctionBackward")


def split_backward(
    outputs: Sequence[Tensor], grads: Sequence[Tensor], inputs: Sequence[Tensor], parameters: Sequence[Tensor]
) -> tuple[Grads, Callable[[], Grads]] | None:
    """The inputs' gradients, and a function that computes the parameters' once, None for frozen ones; None
    where a part of the graph gives all gradients at once.
    """
    order = _nodes([output.grad_fn for output in outputs if output.grad_fn is not None])
    if any(type(node).__name__ in _AT_ONCE for node in order):
        return None
    joints = _joints(order, inputs, parameters)
    if joints is None:
        return _whole_backward_later(outputs, grads, inputs, parameters)
    reached = [(output.grad_fn, output.output_nr) for output in outputs]
    reached += [edge for node in order for edge in node.next_functions]
    edges = [GradientEdge(node, number) for node, number in dict.fromkeys(reached) if node in joints]
    ends: list[Any] = [*inputs, *edges]
    # What arrives there, as it is before hooks of a tensor change it: the second half calls these once more.
    found = torch.autograd.grad(outputs, ends, grads, retain_graph=True, allow_unused=True)
    arrived: defaultdict[Node, list[tuple[GradientEdge, Tensor]]] = defaultdict(list)
    for edge, grad in zip(edges, found[len(inputs) :], strict=True):
        if grad is not None:
            arrived[edge.node].append((edge, grad))

    def weights() -> Grads:
        results: dict[int, Tensor] = {}
        came = []
        for joint, places in joints.items():
            if joint not in arrived:
                continue
            sent = arrived.pop(joint)
            came += [grad for _, grad in sent]
            wanted = [parameters[place] for place in places]
            values = torch.autograd.grad(
                [edge for edge, _ in sent], wanted, [grad for _, grad in sent], allow_unused=True
            )
            for place, value in zip(places, values, strict=True):
                if value is not None:
                    results[place] = value
        return _owned([results.get(place) for place in range(len(parameters))], came)

    return found[: len(inputs)], weights


def _whole_backward_later(
    outputs: Sequence[Tensor], grads: Sequence[Tensor], inputs: Sequence[Tensor], parameters: Sequence[Tensor]
) -> tuple[Grads, Callable[[], Grads]]:
    """For graphs without such nodes: computes the gradients on the way to the inputs twice."""
    found = torch.autograd.grad(outputs, inputs, grads, retain_graph=True, allow_unused=True)
    trained = [tensor for tensor in parameters if tensor.requires_grad]

    def weights() -> Grads:
        values = iter(torch.autograd.grad(outputs, trained, grads, allow_unused=True) if trained else ())
        return _owned([next(values) if tensor.requires_grad else None for tensor in parameters], grads)

    return found, weights


def _owned(found: Sequence[Tensor | None], others: Sequence[Tensor]) -> Grads:
    """The gradients with memory of their own, for later ones are added in place: autograd hands one tensor to
    several parameters, hands on what came in, and expands instead of writing.
    """
    taken = {_storage(tensor) for tensor in others}
    result: list[Tensor | None] = []
    for grad in found:
        if grad is not None and grad.layout is torch.strided:
            storage = grad.untyped_storage()
            if storage.data_ptr() in taken or storage.nbytes() != grad.nbytes:
                grad = grad.clone(memory_format=torch.contiguous_format)
            taken.add(_storage(grad))
        result.append(grad)
    return tuple(result)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def _joints(
    order: Sequence[Node], inputs: Sequence[Tensor], parameters: Sequence[Tensor]
) -> dict[Node, list[int]] | None:
    """Of the nodes under the outputs those on the way to the inputs at which parameters join, and which ones;
    None where a parameter joins at several places, or none of this way leads to the inputs.
    """
    input_nodes = {_accumulator(tensor) for tensor in inputs}
    trained = [(place, tensor) for place, tensor in enumerate(parameters) if tensor.requires_grad]
    places = {_accumulator(tensor): place for place, tensor in trained}
    leads: set[Node] = set()  # to the inputs
    below: dict[Node, set[int]] = defaultdict(set)  # parameters that a node off that way leads to
    joints: dict[Node, list[int]] = {}
    seen: set[int] = set()
    for node in order:  # those nearer to the leaves first
        following = [after for after, _ in node.next_functions if after is not None]
        if node in input_nodes or any(after in leads for after in following):
            leads.add(node)
            found = sorted({p for after in following if after not in leads for p in below[after]})
            if found:
                if seen & set(found):
                    return None
                seen |= set(found)
                joints[node] = found
        elif node in places:
            below[node] = {places[node]}
        else:
            below[node] = {p for after in following for p in below[after]}
    reached = {places[node] for node in order if node in places}
    return joints if leads and seen == reached else None


def _nodes(roots: Sequence[Node]) -> list[Node]:
    """All nodes under the roots, each after all that it leads to."""
    done: list[Node] = []
    visited: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(root, False) for root in roots]
    while stack:
        node, left = stack.pop()
        if left:
            done.append(node)
        elif node not in visited:
            visited.add(node)
            stack.append((node, True))
            stack += [(after, False) for after, _ in node.next_functions if after is not None]
    return done


def _accumulator(leaf: Tensor) -> Node:
    return torch.autograd.graph.get_gradient_edge(leaf).node
