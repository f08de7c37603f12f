"""Models as chains of layers that can be cut anywhere.

A layer is a module, and a stage runs the model's own forward with the other stages' values absent
(``PartialForward``). Of an ``nn.Sequential`` it calls its modules, which is the same and quicker.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from commsched.pipeline.factory import Make, Origin, WeightSource, named_tensors
from commsched.pipeline.following import Followed, follow_model, writes_shared
from commsched.pipeline.forward_mode import (
    Absent,
    ForwardMode,
    Recording,
    Replay,
    StageEnded,
    dry_run,
    intercepted,
    uncompiled,
)
from commsched.pipeline.layers import (
    Arguments,
    Event,
    ModuleLayer,
    Operations,
    has_blocks,
    in_copy,
    in_no_layer,
    layers_of,
    ordered,
    owners_of,
    set_back,
    skeleton,
    traced_events,
)
from commsched.pipeline.messages import remember
from commsched.pipeline.random_state import ONE_AT_A_TIME


class Chain:
    """A model's forward as a list of layers.

    ``names``: of the layers; ``sizes``: bytes of their trainable parameters, each where it is used first.
    ``inside``: classes of modules that may be cut, beside lists of blocks and what holds them. ``example``:
    inputs of a batch, for models that register their layers in another order than they run them.
    ``elements``: the model is a list of modules, and each element is one layer.

    ``model`` may also be a function that makes it, or on the meta device with ``weights`` to read: then
    parameters are shapes until ``fill`` gives some of them their values.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module] | Make,
        inside: Iterable[type[nn.Module]] = (),
        example: Any = None,
        *,
        elements: bool = False,
        weights: WeightSource | None = None,
    ) -> None:
        self.origin = Origin(model, weights)
        self.model = self.origin.model
        self._run_by(_forward_of(self.model, tuple(inside), example, elements))

    def _run_by(self, forward: ListForward | ModuleForward) -> None:
        self._forward, self.names, self.arguments = forward, forward.names, forward.arguments

    def fill(self, parts: Iterable[range], random: Tensor, device: torch.device | str | None = None) -> None:
        """Gives the layers of these parts, and what belongs to no layer, their values. ``random``: the state
        of torch's generator with which a factory begins.
        """
        if not self.origin.complete:
            rest = self.model.state_dict().keys() - self.stage(0, len(self)).state_dict().keys()
            mine = {name for part in parts for name in self.stage(part.start, part.stop).state_dict()}
            self.origin.fill(rest | mine, random, device)

    def by_node(self) -> Chain:
        """The same model with every module of an ``nn.Sequential`` as a layer; else with the same layers."""
        if not isinstance(self._forward, ListForward):
            return self
        finer = copy.copy(self)
        finer._run_by(ListForward(self.model, self._forward.modules, each=True))
        return finer

    def __len__(self) -> int:
        return len(self.names)

    def layer_parameters(self, layer: int) -> dict[str, nn.Parameter]:
        """The parameters that a layer uses, by their names in the model."""
        tensors = self._forward.tensors(layer)
        return {name: tensor for name, tensor in tensors.items() if isinstance(tensor, nn.Parameter)}

    def layer_sizes(
        self, without: frozenset[int] = frozenset(), size: Callable[[Tensor], float] = lambda p: p.nbytes
    ) -> tuple[int, ...]:
        """Bytes of each layer's trainable parameters; those whose id is in ``without`` do not count. ``size``
        of a parameter: its own, or what a message of its gradient has.
        """
        seen = set(without)
        sizes = []
        for layer in range(len(self)):
            mine = {id(p): p for p in self.layer_parameters(layer).values() if p.requires_grad}
            sizes.append(round(sum(size(p) for key, p in mine.items() if key not in seen)))
            seen |= set(mine)
        return tuple(sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.layer_sizes()

    def shared(self, cuts: Sequence[int]) -> dict[int, dict[int, str]]:
        """Parameters and buffers (by id) that several stages use, and those stages, each with the tensor's
        name there. All ranks get them in the same order.

        Only before stages are made: these exchange the parameters of the model's modules.
        """
        users: dict[int, dict[int, str]] = {}
        for stage, (first, end) in enumerate(zip(cuts, [*cuts[1:], len(self)])):
            for layer in range(first, end):
                for name, tensor in self._forward.tensors(layer).items():
                    users.setdefault(id(tensor), {}).setdefault(stage, name)
        return {key: stages for key, stages in users.items() if len(stages) > 1}

    def tied(self, cuts: Sequence[int]) -> dict[int, dict[int, str]]:
        """Those of ``shared`` that are trained: all ranks sum their gradients in this order."""
        trained = {id(parameter) for parameter in self.model.parameters() if parameter.requires_grad}
        return {key: stages for key, stages in self.shared(cuts).items() if key in trained}

    def free_buffers(self) -> list[Tensor]:
        """Buffers of modules in no layer, which every stage runs."""
        held = {id(tensor) for layer in range(len(self)) for tensor in self._forward.tensors(layer).values()}
        return [buffer for buffer in self.model.buffers() if id(buffer) not in held]

    def first_names(self) -> dict[str, str]:
        """By every name of a parameter the one that ``named_parameters`` of the model has: tied parameters
        have several. Only before stages are made, like ``shared``.
        """
        first: dict[int, str] = {}
        every = self.model.named_parameters(remove_duplicate=False)
        return {name: first.setdefault(id(parameter), name) for name, parameter in every}

    def cuts(self, cuts: Sequence[int | str]) -> tuple[int, ...]:
        """The first layer of each stage. ``cuts``: numbers from 0 on, or names of the modules with which the
        later stages begin.
        """
        found = [self._layer_of(cut) if isinstance(cut, str) else cut for cut in cuts]
        if cuts and isinstance(cuts[0], str) and found[0] != 0:
            found = [0, *found]
        if found != sorted(set(found)) or not found or found[0] != 0 or found[-1] >= len(self):
            raise ValueError(
                f"cuts must start with 0, rise, and stay below the model's {len(self)} layers; got"
                f" {list(cuts)}"
            )
        return tuple(found)

    def _layer_of(self, name: str) -> int:
        for layer, own in enumerate(self.names):
            if own == name or own.startswith(f"{name}."):
                return layer
        raise ValueError(
            f"no layer is named {name!r} or stands in a module of that name; the layers are"
            f" {', '.join(self.names)}"
        )

    def even_cuts(self, stages: int) -> tuple[int, ...]:
        """Cuts that give every stage about as many layers."""
        if not 1 <= stages <= len(self):
            raise ValueError(
                f"a model of {len(self)} layers (modules with parameters) cannot be cut into {stages} stages;"
                " pass inside= (classes of modules that may be cut), or a list of modules"
            )
        return tuple(stage * len(self) // stages for stage in range(stages))

    def stage(self, first: int, end: int) -> nn.Module:
        """Layers ``first`` to ``end - 1`` as a module that takes and returns the values that cross its
        borders. It shares the model's submodules and parameters.
        """
        return self._forward.stage(first, end)


class ListForward:
    """Modules called one after the other. A layer is one with parameters and all that follow it up to the
    next such; with ``each``, every module.
    """

    arguments = Arguments(("input",), {})

    def __init__(self, model: nn.Module, modules: dict[str, nn.Module], each: bool = False) -> None:
        self.model, self.modules, self._names = model, modules, list(modules)
        holding = [each or next(part.parameters(), None) is not None for part in modules.values()]
        full = [place for place, holds in enumerate(holding) if holds]
        self._starts = [0, *full[1:]]
        self.names = tuple(self._names[place] for place in full or [0])

    def _part(self, first: int, end: int) -> dict[str, nn.Module]:
        starts = [*self._starts, len(self._names)]
        return {name: self.modules[name] for name in self._names[starts[first] : starts[end]]}

    def tensors(self, layer: int) -> dict[str, Tensor]:
        tensors = {name: named_tensors(module) for name, module in self._part(layer, layer + 1).items()}
        return {f"{name}.{key}": tensor for name, part in tensors.items() for key, tensor in part.items()}

    def stage(self, first: int, end: int) -> nn.Module:
        stage = ListStage(self._part(first, end), end == len(self.names))
        mine = set(stage.modules())
        stage._stage_followed = [
            Followed(name, part, part if part in mine else None) for name, part in self.model.named_modules()
        ]
        return stage


class ListStage(nn.Module):
    """Some modules of a list, under their names in the model; returns a tuple where others follow."""

    def __init__(self, modules: dict[str, nn.Module], last: bool) -> None:
        super().__init__()
        self._stage_calls, self._stage_last = list(modules.values()), last
        self._stage_followed: list[Followed] = []
        self._stage_known: dict[Any, Any] = {}
        self._stage_writes: dict[bool, bool] = {}
        for name, module in modules.items():
            parent: nn.Module = self
            *path, own = name.split(".")
            for part in path:
                parent = parent._modules.setdefault(part, nn.Module())  # type: ignore[assignment]
            parent._modules[own] = module

    def forward(self, value: Any) -> Any:
        """Autograd allows no writing to what came from another stage, and recomputation reads it again: a
        stage that begins with an operation in place works on a copy. The first forward of each mode shows
        whether it does.
        """
        mode = next((module.training for module in self._stage_calls), False)
        copies: list[Tensor] = []
        if self._stage_writes.get(mode, True):
            value = tree_map_only(Tensor, partial(_cloned_leaf, copies), value)
        result = value
        try:
            for module in self._stage_calls:
                result = module(result)
        except AttributeError as error:
            raise ValueError(
                f"{error}: a stage of an nn.Sequential calls its own modules only; if one reads what another"
                " keeps, make it a class of your own (class Net(nn.Sequential): ...)"
            ) from error
        if copies and mode not in self._stage_writes:
            self._stage_writes[mode] = any(copied._version for copied in copies)
        return result if self._stage_last else (result,)


def _cloned_leaf(copies: list[Tensor], value: Tensor) -> Tensor:
    if value.is_leaf:
        copies.append(value := value.clone())
    return value


def _plain_modules(model: nn.Module, prefix: str = "") -> dict[str, nn.Module]:
    """The modules that an ``nn.Sequential`` calls, by name; none where it does more, or where one of them is
    to be opened.
    """
    own = vars(model)
    hooked = any(own[name] for name in own if "_hooks" in name and "state_dict" not in name)
    if type(model) is not nn.Sequential or hooked:
        return {}
    found: dict[str, nn.Module] = {}
    for name, part in model._modules.items():
        assert part is not None
        opened = type(part) is nn.Sequential and len(part) > 0
        inner = _plain_modules(part, f"{prefix}{name}.") if opened else {}
        if not inner and (opened or has_blocks(part)):
            return {}
        found |= inner or {f"{prefix}{name}": part}
    return found


def reads(stage: nn.Module) -> list[nn.Module]:
    """The modules that a stage calls, in that order."""
    if isinstance(stage, StageForward):
        return stage.reads()
    assert isinstance(stage, ListStage)
    return stage._stage_calls


def _forward_of(
    model: nn.Module, inside: tuple[type[nn.Module], ...], example: Any, elements: bool
) -> ListForward | ModuleForward:
    if elements:
        return ListForward(
            model, {name: part for name, part in model._modules.items() if part is not None}, each=True
        )
    if modules := _plain_modules(model):
        return ListForward(model, modules)
    return ModuleForward(model, example, inside)


def split(
    model: nn.Module | Sequence[nn.Module],
    stages: int | None = None,
    *,
    cuts: Sequence[int | str] | None = None,
    inside: Iterable[type[nn.Module]] = (),
    example: Any = None,
) -> list[nn.Module]:
    """A model's stages as modules: in ``stages`` parts with about as many layers each, or from the layers
    ``cuts`` on. Values that a later stage needs (skip connections, masks) are carried along: a
    stage takes the values alive at its start as arguments and returns those alive at its end as a tuple.
    """
    chain = Chain(model, inside, example)
    if (stages is None) == (cuts is None):
        raise ValueError("split needs either stages= (how many) or cuts= (the first layer of each)")
    chosen = chain.even_cuts(stages) if stages is not None else chain.cuts(cuts or ())
    found = [chain.stage(first, end) for first, end in zip(chosen, [*chosen[1:], len(chain)])]
    for stage in found:
        stage.register_forward_pre_hook(lambda stage, _: follow_model(stage))
    return found


# -- a stage of a model: a part of the model's own forward ---------------------------------------------------


class PartialForward:
    """The forward of a model in layers, any part of which can run alone: that of a copy which has the layers
    ``kept``, and of others the shapes.
    """

    def __init__(
        self, model: nn.Module, layers: Sequence[ModuleLayer], kept: range, arguments: Arguments
    ) -> None:
        self.model, self.arguments = skeleton(model, layers, kept), arguments
        self.layers, self._kept = [in_copy(self.model, layer) for layer in layers], kept
        self.containers = [self.model.get_submodule(name) for name in in_no_layer(model, layers)]
        copied = self.model.get_submodule
        self.followed = [Followed(name, part, copied(name)) for name, part in model.named_modules()]
        self._whole_layers = [layer.own.module if layer.own.whole else None for layer in self.layers]
        self._known: dict[Any, list[Operations]] = {}

    def operations(self, inputs: dict[str, Any], device: torch.device, seed: int) -> Operations:
        """The operations of a forward with these inputs, from a dry run; kept for inputs of the same shapes
        with which the code decides alike.
        """
        leaves, spec = tree_flatten(inputs)
        modes = [followed.runs.training for followed in self.followed]  # type: ignore[union-attr]
        shapes = ((tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        key = (str(spec), *shapes, *modes, torch.is_grad_enabled())
        known = self._known.pop(key, [])
        remember(self._known, key, known, 256)
        if known and known[-1].decisions:
            inputs = _copied(inputs)
            mode = self._dry_mode(inputs, device, seed)
            self._imagine(mode, Replay(mode, known[-1].calls), inputs)
            known.sort(key=lambda found: found.decisions == mode.found.decisions)  # the one that fits is last
            if known[-1].decisions != mode.found.decisions:
                known.append(self._dry_run(inputs, device, seed))
        elif not known:
            known.append(self._dry_run(inputs, device, seed))
        return known[-1]

    def _dry_run(self, inputs: dict[str, Any], device: torch.device, seed: int) -> Operations:
        recorded, outputs = self._recorded(inputs, device, seed)
        # A call may also leave something behind in an argument or attribute: then skipping it shows.
        copied = _copied(inputs)
        again = self._dry_mode(copied, device, seed)
        try:
            same = self._imagine(again, Replay(again, recorded.calls), copied) == outputs
        except Exception:
            same = False
        seen = again.found.maker, again.found.outer_uses
        if same and seen == (recorded.maker, recorded.outer_uses):
            return recorded
        recorded, _ = self._recorded(inputs, device, seed)  # the first forward may have prepared something
        recorded.calls = {}
        return recorded

    def _recorded(
        self, inputs: dict[str, Any], device: torch.device, seed: int
    ) -> tuple[Operations, list[int | None]]:
        inputs = _copied(inputs)
        mode = self._dry_mode(inputs, device, seed)
        recording = Recording(mode)
        outputs = self._imagine(mode, recording, inputs)
        mode.found.calls = recording.settle()
        mode.found.writes_inputs = any(x._version for x in tree_leaves(inputs) if isinstance(x, Tensor))
        return mode.found, outputs

    def _dry_mode(self, inputs: dict[str, Any], device: torch.device, seed: int) -> ForwardMode:
        owners = owners_of(self.layers)
        return ForwardMode(owners, range(0), device, inputs=_places(tree_leaves(inputs)), seed=seed)

    def events(self, inputs: dict[str, Any], originals: Sequence[ModuleLayer]) -> list[Event]:
        """What a forward with these inputs runs, and which tensors of the original layers it reads."""
        mode = ForwardMode(owners_of(self.layers), range(0), torch.device("cpu"))
        self._imagine(mode, Recording(mode), _copied(inputs))
        copies = zip(originals, self.layers, strict=True)
        pairs = [zip(a.tensors().values(), b.tensors().values(), strict=True) for a, b in copies]
        own = {id(copied): id(one) for same in pairs for one, copied in same}
        return [(kind, [(layer, own.get(t, 0)) for layer, t in read]) for kind, read in mode.found.events]

    def _imagine(self, mode: ForwardMode, handle: Any, inputs: dict[str, Any]) -> list[int | None]:
        """The numbers of the outputs of a forward in which nothing computes."""
        device = mode.device
        parts = [(name, part._buffers, dict(part._buffers)) for name, part in self.model.named_modules()]
        with (
            ONE_AT_A_TIME,
            dry_run(),
            uncompiled(),
            torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        ):
            with set_back(self.model, (int, float)), intercepted(self._whole_layers, handle), mode:
                output = self.arguments.call(self.model, inputs)
        for name, buffers, before in parts:
            self._settle_buffers(mode, f"{name}." if name else "", buffers, before)
        tensors = [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor)]
        leaves = [leaf for leaf in tensors if isinstance(leaf, Absent)]
        # What the forward returns of its inputs alone: the last stage must have them whole.
        mode._read_inputs(mode._places([leaf for leaf in tensors if not isinstance(leaf, Absent)]), math.inf)
        for leaf in leaves:
            mode.found.use(mode.number(leaf), len(self.layers) - 1)  # type: ignore[arg-type]
        return [mode.number(leaf) for leaf in leaves]

    def _settle_buffers(
        self, mode: ForwardMode, prefix: str, buffers: dict[str, Any], before: dict[str, Any]
    ) -> None:
        """Gives buffers that a dry run has assigned their values again; those of other stages are refused."""
        for key, value in before.items():
            number = mode.number(buffers.get(key))  # type: ignore[arg-type]
            if number is None:
                continue
            users = [*mode.owners.get(id(value), range(len(self.layers))), mode.found.maker[number]]
            buffers[key] = value
            if self._kept and len({layer in self._kept for layer in users}) > 1:
                raise writes_shared(prefix + key)

    def run(self, mode: ForwardMode, operations: Operations, inputs: dict[str, Any]) -> Any:
        """The model's output as far as the mode's layers make it. Buffers that the forward replaces are kept
        meanwhile: no other tensor gets their ids.
        """
        kept = [followed.runs._buffers.copy() for followed in self.followed]  # type: ignore[union-attr]
        try:
            with intercepted(self._whole_layers, Replay(mode, operations.calls)), mode:
                output = self.arguments.call(self.model, inputs)
        except StageEnded:
            return None
        finally:
            del kept
        return tree_map_only(Absent, lambda leaf: mode.made[mode.number(leaf)], output)  # type: ignore[index]


class StageForward(nn.Module):
    """Layers ``first`` to ``end - 1``: takes the model's arguments, or what the part before returned; returns
    the values that cross its border, the model's inputs and the seed of shared random numbers, or the model's
    output.

    Has the modules of its own layers under their names in the model, with the model's parameters. ``whole``
    is a skeleton of the model, where other layers have only shapes.
    """

    def __init__(self, whole: PartialForward, layers: range) -> None:
        super().__init__()
        self._stage_whole = (whole,)  # in a tuple: it is no part of this module
        self._stage_followed, self._stage_known = whole.followed, whole._known
        self._stage_layers = layers
        self.training = whole.model.training
        parts = [part for number in layers for part in whole.layers[number].parts]
        only: dict[int, frozenset[str]] = {}
        for part in parts:
            if part.only is None:
                *_, name = path = part.name.split(".")
                self._home(path)._modules[name] = part.module
            else:
                only[id(part.module)] = only.get(id(part.module), frozenset()) | part.only
        for part in parts:
            if part.only is not None:
                self._hold(part.name, part.module, only[id(part.module)])
        self._stage_device = next((p.device for p in self.parameters()), torch.device("cpu"))

    def modules(self, remove_duplicate: bool = True) -> Iterator[nn.Module]:
        """Also those outside of all layers, which every stage runs."""
        yield from super().modules()
        yield from self._stage_whole[0].containers

    def _home(self, path: Sequence[str]) -> nn.Module:
        """The module in which the last name of a path stands."""
        parent: nn.Module = self
        for part in path[:-1]:
            parent = parent._modules.setdefault(part, nn.Module())  # type: ignore[assignment]
        return parent

    def _hold(self, name: str, module: nn.Module, only: frozenset[str]) -> None:
        """These tensors of a module, so that weight versions reach the model."""
        own: nn.Module | None = self
        if name:
            *_, last = path = name.split(".")
            own = self._home(path)._modules.setdefault(last, nn.Module())
        assert own is not None
        if own is not module:  # else all of it is held
            own._parameters = _Some(module._parameters, only)
            own._buffers = _Some(module._buffers, only)
            own._non_persistent_buffers_set = module._non_persistent_buffers_set

    def reads(self) -> list[nn.Module]:
        """The modules that it calls."""
        held = [part for number in self._stage_layers for part in self._stage_whole[0].layers[number].parts]
        return [part.module for part in held if part.whole]

    def forward(self, *arguments: Any) -> Any:
        (whole,) = self._stage_whole
        first, end = self._stage_layers.start, self._stage_layers.stop
        if first:
            values, inputs, seeds = arguments
        else:
            values, inputs, seeds = (), whole.arguments.by_name(arguments), ()
        shaped = tree_map_only(Tensor, _filled, inputs)
        leaves, _ = tree_flatten(shaped)
        operations = whole.operations(shaped, self._stage_device, _seed(seeds))
        if operations.draws and not first:
            seeds = (_seeds(leaves),)
            operations = whole.operations(shaped, self._stage_device, _seed(seeds))
        if operations.writes_inputs:  # every stage does, and none may find what another has written
            shaped = _copied(shaped)
            leaves = tree_leaves(shaped)
        mode = self._mode(operations, values, leaves, seeds)
        output = whole.run(mode, operations, shaped)
        self._check(mode, operations)
        if end == len(whole.layers):
            return output
        carried = self._carried(inputs, operations)
        return tuple(mode.made[number] for number in operations.crossing(end)), carried, seeds

    def _mode(
        self, operations: Operations, values: Sequence[Tensor], leaves: list[Any], seeds: Sequence[Tensor]
    ) -> ForwardMode:
        """``values``: of the earlier stages. They are copied where the stage writes to them: autograd allows
        no writing to a leaf. Views stand for leaves: an autograd function that gave one back would detach it.
        """
        values = [
            value.view_as(value) if value.is_leaf and value.requires_grad else value for value in values
        ]
        first, end = self._stage_layers.start, self._stage_layers.stop
        received = dict(zip(operations.crossing(first), values, strict=True)) if first else {}
        for number in operations.written & received.keys():
            received[number] = received[number].clone()
        return ForwardMode(
            owners_of(self._stage_whole[0].layers),
            self._stage_layers,
            self._stage_device,
            received,
            _places(leaves),
            operations.crossing(end),
            _seed(seeds),
        )

    def _check(self, mode: ForwardMode, expected: Operations) -> None:
        """All stages must have decided and numbered alike."""
        count, decisions = expected.before(self._stage_layers.stop), mode.found.decisions
        if len(mode.found.maker) != count or decisions != expected.decisions[: len(decisions)]:
            raise ValueError(
                f"the forward of {type(self._stage_whole[0].model).__name__} is not the same every time: up"
                f" to layer {self._stage_layers.stop - 1} a dry run made {count} values and this run"
                f" {len(mode.found.maker)}; a pipeline needs a forward whose operations depend on shapes and"
                " inputs alone"
            )

    def _carried(self, inputs: dict[str, Any], operations: Operations) -> dict[str, Any]:
        """The inputs for the next stage. Of a tensor that it does not read only the shape travels, as
        (rows, 0, ...).
        """
        leaves, spec = tree_flatten(inputs)
        for place, leaf in enumerate(leaves):
            unread = operations.inputs.get(place, -1) < self._stage_layers.stop
            if unread and isinstance(leaf, Tensor) and leaf.dim() and leaf.numel():
                leaves[place] = leaf.new_empty((len(leaf), 0, *leaf.shape[1:]))
        return tree_unflatten(leaves, spec)


class ModuleForward:
    """A forward in layers that are modules; a stage runs it with the other layers' values absent."""

    def __init__(
        self, model: nn.Module, example: Any = None, inside: tuple[type[nn.Module], ...] = ()
    ) -> None:
        self.model, self.layers = model, layers_of(model, inside)
        self.arguments = Arguments.of(model)
        example = getattr(model, "dummy_inputs", None) if example is None else example
        if example is None:
            events = traced_events(model, self.layers)
        else:
            partial = PartialForward(model, self.layers, range(0), self.arguments)
            events = partial.events(self.arguments.named(example), self.layers)
        self.layers = ordered(model, self.layers, events)
        self.names = tuple(layer.own.name or type(model).__name__ for layer in self.layers)

    def tensors(self, layer: int) -> dict[str, Tensor]:
        return self.layers[layer].tensors()

    def stage(self, first: int, end: int) -> nn.Module:
        layers = range(first, end)
        return StageForward(PartialForward(self.model, self.layers, layers, self.arguments), layers)


class _Some(dict[str, Any]):
    """Some entries of a module's dictionary of tensors: what is written here is written there."""

    def __init__(self, home: dict[str, Any], names: frozenset[str]) -> None:
        super().__init__({name: value for name, value in home.items() if name in names})
        self.home = home

    def __getitem__(self, key: str) -> Any:
        return self.home[key]

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self.home[key] = value

    def items(self) -> Any:
        return [(key, self.home[key]) for key in self]

    def values(self) -> Any:
        return [self.home[key] for key in self]


def _copied(inputs: dict[str, Any]) -> dict[str, Any]:
    """For a forward that may write to them, and is not the last one."""
    return tree_map_only(Tensor, lambda leaf: leaf.detach().clone(), inputs)


def _filled(leaf: Tensor) -> Tensor:
    """An input with its full shape again; no layer reads its values."""
    if leaf.dim() > 1 and leaf.shape[1] == 0:
        return leaf.new_zeros((len(leaf), *leaf.shape[2:]))
    return leaf


def _seeds(leaves: Sequence[Any]) -> Tensor:
    """A new seed, once for each row: rows are what travels."""
    rows = next((len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()), 1)
    return torch.randint(1 << 62, (1,)).expand(rows).contiguous()


def _seed(seeds: Sequence[Tensor]) -> int:
    return int(seeds[0][0]) if seeds else 0


def _places(leaves: Sequence[Any]) -> dict[int, int]:
    return {id(leaf): place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
