"""A stage of a model: a part of the model's own forward."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from commsched.pipeline.absent import Absent
from commsched.pipeline.arguments import Arguments
from commsched.pipeline.forward_mode import ForwardMode, StageEnded
from commsched.pipeline.layer_calls import Recording, Replay, intercepted
from commsched.pipeline.module_layers import (
    ModuleLayer,
    in_copy,
    layers_of,
    ordered,
    owners_of,
    run_in,
    skeleton,
    traced_events,
)
from commsched.pipeline.operations import Event, Operations
from commsched.pipeline.random_state import ONE_AT_A_TIME


class PartialForward:
    """The forward of a model in layers, any part of which can run alone: that of a copy which has the layers
    ``kept``, and of others the shapes.
    """

    def __init__(
        self, model: nn.Module, layers: Sequence[ModuleLayer], kept: range, arguments: Arguments
    ) -> None:
        self.model, self.arguments = skeleton(model, layers, kept), arguments
        self.layers = [in_copy(self.model, layer) for layer in layers]
        own = run_in(model, layers, kept)
        self.containers = [self.model.get_submodule(name) for name in run_in(model, layers, range(0))]
        self._followed = [_Followed(model.get_submodule(n), self.model.get_submodule(n)) for n in own]
        self._whole_layers = [layer.own.module if layer.own.whole else None for layer in self.layers]
        self._known: dict[Any, list[Operations]] = {}

    def follow(self) -> None:
        """Takes over what the caller has assigned to attributes of the model."""
        for followed in self._followed:
            followed.follow()

    def operations(self, inputs: dict[str, Any], device: torch.device, seed: int) -> Operations:
        """The operations of a forward with these inputs, from a dry run; kept for inputs of the same shapes
        with which the code decides alike.
        """
        leaves, spec = tree_flatten(inputs)
        key = (str(spec), *map(_shape_key, leaves), self.model.training, torch.is_grad_enabled())
        known = self._known.setdefault(key, [])
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
        own = {
            id(copy): id(one) for a, b in copies for one, copy in zip(a.tensors(), b.tensors(), strict=True)
        }
        return [(kind, [(layer, own.get(t, 0)) for layer, t in read]) for kind, read in mode.found.events]

    def _imagine(self, mode: ForwardMode, handle: Any, inputs: dict[str, Any]) -> list[int | None]:
        """The numbers of the outputs of a forward in which nothing computes."""
        device = mode.device
        eager = torch.compiler.set_stance("force_eager")  # torch.compile cannot see values that are absent
        with ONE_AT_A_TIME, eager, torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            with intercepted(self._whole_layers, handle), mode:
                output = self.arguments.call(self.model, inputs)
        leaves = [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Absent)]
        for leaf in leaves:
            mode.found.use(mode.number(leaf), len(self.layers) - 1)  # type: ignore[arg-type]
        return [mode.number(leaf) for leaf in leaves]

    def run(self, mode: ForwardMode, operations: Operations, inputs: dict[str, Any]) -> Any:
        """The model's output as far as the mode's layers make it."""
        try:
            with intercepted(self._whole_layers, Replay(mode, operations.calls)), mode:
                output = self.arguments.call(self.model, inputs)
        except StageEnded:
            return None
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

    def reads(self) -> tuple[list[nn.Module], list[str]]:
        """The modules that it calls, and the names of parameters that it reads elsewhere."""
        held = [part for number in self._stage_layers for part in self._stage_whole[0].layers[number].parts]
        return [h.module for h in held if h.whole], [n for h in held if not h.whole for n in h.parameters()]

    def forward(self, *arguments: Any) -> Any:
        (whole,) = self._stage_whole
        first, end = self._stage_layers.start, self._stage_layers.stop
        whole.follow()
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
        no writing to a leaf.
        """
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
        result: dict[str, Any] = tree_unflatten(leaves, spec)
        return result


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

    def parameters(self, layer: int) -> dict[str, nn.Parameter]:
        return self.layers[layer].parameters()

    def stage(self, first: int, end: int) -> nn.Module:
        layers = range(first, end)
        return StageForward(PartialForward(self.model, self.layers, layers, self.arguments), layers)


class _Followed:
    """A module and its copy, which gets what is assigned to attributes of the first, and the hooks that are
    added to it. Nothing that is computed is assigned there: forwards run in the copy.
    """

    def __init__(self, module: nn.Module, copied: nn.Module) -> None:
        self._module, self._copied = weakref.ref(module), vars(copied)
        self._seen, self._hooks = {}, {}
        for name, value in vars(module).items():
            if "_hooks" in name and isinstance(value, dict):
                self._hooks[name] = list(value)
                self._copied[name] = type(value)(value)  # not copies of what the hooks belong to
            elif name not in _TENSORS:
                self._seen[name] = value

    def follow(self) -> None:
        module = self._module()
        if module is None:
            return
        for name, value in vars(module).items():
            if name in self._hooks:
                if list(value) != self._hooks[name]:
                    self._take_hooks(name, value)
            elif name not in _TENSORS and value is not self._seen.get(name, self):
                self._seen[name] = self._copied[name] = value

    def _take_hooks(self, name: str, hooks: dict[int, Any]) -> None:
        mine, known = self._copied[name], self._hooks[name]
        for key in known:
            if key not in hooks:
                mine.pop(key, None)
        mine.update({key: hook for key, hook in hooks.items() if key not in known})
        self._hooks[name] = list(hooks)


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


_TENSORS = ("_parameters", "_buffers", "_modules")


def _copied(inputs: dict[str, Any]) -> dict[str, Any]:
    """For a forward that may write to them, and is not the last one."""
    copied: dict[str, Any] = tree_map_only(Tensor, lambda leaf: leaf.detach().clone(), inputs)
    return copied


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


def _shape_key(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf
