"""A stage of a model whose forward cannot be traced: a part of the model's own forward."""

from __future__ import annotations

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
    Held,
    ModuleLayer,
    homes_of,
    in_copy,
    layers_of,
    order_of,
    skeleton,
)
from commsched.pipeline.operations import Operations
from commsched.pipeline.random_state import ONE_AT_A_TIME


class PartialForward:
    """The forward of a model in ``layers``, any part of which can run alone."""

    def __init__(self, model: nn.Module, layers: Sequence[ModuleLayer]) -> None:
        self.model, self.layers = model, layers
        held = {id(part) for layer in layers for part in layer.modules()}
        self.containers = [part for part in model.modules() if id(part) not in held]
        self._whole_layers = [layer.own.module if layer.own.whole else None for layer in layers]
        self._known: dict[Any, list[Operations]] = {}

    def owners(self) -> dict[int, list[int]]:
        """The layers of each parameter and buffer, by id; new at each call: weight versions exchange them."""
        found: dict[int, list[int]] = {}
        for number, layer in enumerate(self.layers):
            for tensor in layer.tensors():
                found.setdefault(id(tensor), []).append(number)
        return found

    def operations(self, inputs: dict[str, Any], device: torch.device, seed: int) -> Operations:
        """The operations of a forward with these inputs, from a dry run; kept for inputs of the same shapes
        with which the code decides alike.
        """
        leaves, spec = tree_flatten(inputs)
        key = (str(spec), *map(_shape_key, leaves), self.model.training, torch.is_grad_enabled())
        known = self._known.setdefault(key, [])
        if known and known[-1].decisions:
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
        again = self._dry_mode(inputs, device, seed)
        try:
            same = self._imagine(again, Replay(again, recorded.calls), inputs) == outputs
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
        mode = self._dry_mode(inputs, device, seed)
        recording = Recording(mode)
        outputs = self._imagine(mode, recording, inputs)
        mode.found.calls = recording.settle()
        return mode.found, outputs

    def _dry_mode(self, inputs: dict[str, Any], device: torch.device, seed: int) -> ForwardMode:
        return ForwardMode(self.owners(), range(0), device, inputs=_places(tree_leaves(inputs)), seed=seed)

    def order(self, inputs: dict[str, Any]) -> dict[int, list[str]]:
        """The layers as a forward with these inputs runs them, each with what it borrows."""
        mode = ForwardMode(self.owners(), range(0), torch.device("cpu"))
        self._imagine(mode, Recording(mode), inputs)
        return order_of(self.model, self.layers, mode.found.events)

    def _imagine(self, mode: ForwardMode, handle: Any, inputs: dict[str, Any]) -> list[int | None]:
        """The numbers of the outputs of a forward in which nothing computes."""
        device = mode.device
        with ONE_AT_A_TIME, torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            with intercepted(self._whole_layers, handle), mode:
                output = self.model(**inputs)
        leaves = [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Absent)]
        for leaf in leaves:
            mode.found.use(mode.number(leaf), len(self.layers) - 1)  # type: ignore[arg-type]
        return [mode.number(leaf) for leaf in leaves]

    def run(self, mode: ForwardMode, operations: Operations, inputs: dict[str, Any]) -> Any:
        """The model's output as far as the mode's layers make it."""
        try:
            with intercepted(self._whole_layers, Replay(mode, operations.calls)), mode:
                output = self.model(**inputs)
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

    def __init__(self, whole: PartialForward, layers: range, arguments: Arguments) -> None:
        super().__init__()
        self._stage_whole = (whole,)  # in a tuple: it is no part of this module
        self._stage_layers, self._stage_arguments = layers, arguments
        self.training = whole.model.training
        for number in layers:
            for part in whole.layers[number].parts:
                self._hold(part)
        self._stage_device = next((p.device for p in self.parameters()), torch.device("cpu"))

    def modules(self, remove_duplicate: bool = True) -> Iterator[nn.Module]:
        """Also those outside of all layers, which every stage runs."""
        yield from super().modules()
        yield from self._stage_whole[0].containers

    def _hold(self, held: Held) -> None:
        if not held.name:
            self._parameters, self._buffers = held.module._parameters, held.module._buffers
            return
        parent: nn.Module = self
        *path, last = held.name.split(".")
        for part in path:
            if part not in parent._modules:
                parent.add_module(part, nn.Module())
            parent = parent._modules[part]  # type: ignore[assignment]
        if held.whole:
            parent._modules[last] = held.module
        elif held.module not in parent._modules.values():
            # The same dictionaries, so that weight versions reach the model.
            own = parent._modules.setdefault(last, nn.Module())
            assert own is not None
            own._parameters, own._buffers = held.module._parameters, held.module._buffers

    def reads(self) -> tuple[list[nn.Module], list[str]]:
        """The modules that it calls, and the names of parameters that it reads elsewhere."""
        held = [part for number in self._stage_layers for part in self._stage_whole[0].layers[number].parts]
        return [h.module for h in held if h.whole], [n for h in held if not h.whole for n in h.parameters()]

    def forward(self, *arguments: Any) -> Any:
        (whole,) = self._stage_whole
        first, end = self._stage_layers.start, self._stage_layers.stop
        if first:
            values, inputs, seeds = arguments
        else:
            values, inputs, seeds = (), self._stage_arguments.by_name(arguments), ()
        shaped = tree_map_only(Tensor, _filled, inputs)
        leaves, _ = tree_flatten(shaped)
        operations = whole.operations(shaped, self._stage_device, _seed(seeds))
        if operations.draws and not first:
            seeds = (_seeds(leaves),)
            operations = whole.operations(shaped, self._stage_device, _seed(seeds))
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
            self._stage_whole[0].owners(),
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
        if example is not None:
            self.layers = self._ordered(self.arguments.named(example))
        self.names = tuple(layer.own.name or type(model).__name__ for layer in self.layers)

    def parameters(self, layer: int) -> dict[str, nn.Parameter]:
        return self.layers[layer].parameters()

    def stage(self, first: int, end: int) -> nn.Module:
        return StageForward(self._partial(range(first, end)), range(first, end), self.arguments)

    def _partial(self, kept: range) -> PartialForward:
        copied = skeleton(self.model, self.layers, kept)
        return PartialForward(copied, [in_copy(copied, layer) for layer in self.layers])

    def _ordered(self, inputs: dict[str, Any]) -> list[ModuleLayer]:
        """The layers as a forward with these inputs runs them."""
        order = self._partial(range(0)).order(inputs)
        homes = homes_of(self.model)
        return [
            ModuleLayer(self.layers[number].own, tuple(homes[name] for name in borrowed))
            for number, borrowed in order.items()
        ]


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
