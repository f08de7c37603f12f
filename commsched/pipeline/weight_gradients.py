"""A backward in two halves: the gradients of the inputs now, those of the parameters later (zero bubble).

The first half runs the graph towards the inputs only and keeps what arrives at the nodes where a parameter
joins; the second half runs from each of these nodes to its parameters alone, so nothing is computed twice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

Grads = tuple["Tensor | None", ...]


def split_backward(
    outputs: Sequence[Tensor], grads: Sequence[Tensor], inputs: Sequence[Tensor], parameters: Sequence[Tensor]
) -> tuple[Grads, Callable[[], Grads]]:
    """The inputs' gradients, and a function that computes the parameters' once."""
    order = _nodes([output.grad_fn for output in outputs if output.grad_fn is not None])
    if any(type(node).__name__ == "CompiledFunctionBackward" for node in order):
        # torch.compile's backward of a block gives all gradients at once, and gives its memory back.
        every = torch.autograd.grad(outputs, [*inputs, *parameters], grads, allow_unused=True)
        kept = _owned(every[len(inputs) :], [*every[: len(inputs)], *grads])
        return every[: len(inputs)], lambda: kept
    joints = _joints(order, inputs, parameters)
    if joints is None:
        return _whole_backward_later(outputs, grads, inputs, parameters)
    arrived: dict[Node, Any] = {}
    hooks = [joint.register_prehook(_keeper(arrived, joint)) for joint in joints]
    try:
        found = torch.autograd.grad(outputs, inputs, grads, retain_graph=True, allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()

    def weights() -> Grads:
        results: dict[int, Tensor] = {}
        came = []
        for joint, places in joints.items():
            if joint not in arrived:
                continue
            sent = [(GradientEdge(joint, n), g) for n, g in enumerate(arrived.pop(joint)) if g is not None]
            came += [grad for _, grad in sent]
            wanted = [parameters[place] for place in places]
            values = torch.autograd.grad(
                [edge for edge, _ in sent], wanted, [grad for _, grad in sent], allow_unused=True
            )
            for place, value in zip(places, values, strict=True):
                if value is not None:
                    results[place] = value
        return _owned([results.get(place) for place in range(len(parameters))], came)

    return found, weights


def _whole_backward_later(
    outputs: Sequence[Tensor], grads: Sequence[Tensor], inputs: Sequence[Tensor], parameters: Sequence[Tensor]
) -> tuple[Grads, Callable[[], Grads]]:
    """For graphs without such nodes: computes the gradients on the way to the inputs twice."""
    found = torch.autograd.grad(outputs, inputs, grads, retain_graph=True, allow_unused=True)
    return found, lambda: _owned(torch.autograd.grad(outputs, parameters, grads, allow_unused=True), grads)


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


def _keeper(arrived: dict[Node, Any], joint: Node) -> Callable[[Any], None]:
    def keep(grads: Any) -> None:
        arrived[joint] = grads

    return keep


def _joints(
    order: Sequence[Node], inputs: Sequence[Tensor], parameters: Sequence[Tensor]
) -> dict[Node, list[int]] | None:
    """Of the nodes under the outputs those on the way to the inputs at which parameters join, and which ones;
    None where a parameter joins at several places, or none of this way leads to the inputs.
    """
    input_nodes = {_accumulator(tensor) for tensor in inputs}
    places = {_accumulator(tensor): place for place, tensor in enumerate(parameters)}
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
