"""Memory that user code may keep: aliases of a flat buffer, who holds them, and how they leave it."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from comm_core import (
    alias_of,
    foreign_users,
    foreign_uses,
    gradients_held,
    move_out,
    overlapping,
    shares_storage,
    storage_holders,
    storages_held,
    write_into,
)


def numbers(n: int = 100) -> Tensor:
    return torch.arange(float(n))


def rows(flat: Tensor, offset: int = 10) -> Tensor:
    return alias_of(flat, offset, [2, 3], [3, 1])


# ---------------------------------------------------------------------------------------------------- aliases
@pytest.mark.parametrize(
    ("sizes", "strides"),
    [([2, 3], [3, 1]), ([2, 3], [1, 2]), ([4], [3]), ([], []), ([0, 5], [5, 1]), ([3, 2], [0, 1])],
)
def test_an_alias_has_the_values_of_as_strided(sizes: list[int], strides: list[int]) -> None:
    flat = numbers()
    alias = alias_of(flat, 7, sizes, strides)
    assert torch.equal(alias, flat.as_strided(sizes, strides, 7))
    assert alias.stride() == tuple(strides)
    assert alias.storage_offset() == 0
    assert not shares_storage(alias, flat)


def test_an_alias_and_its_buffer_are_the_same_memory() -> None:
    flat = numbers()
    alias = rows(flat)
    alias.fill_(-1)
    assert flat[10:16].tolist() == [-1] * 6
    flat.zero_()
    assert alias.tolist() == [[0] * 3] * 2
    assert alias.data_ptr() == flat[10:].data_ptr()


def test_an_alias_of_a_part_of_a_larger_tensor_starts_at_the_part() -> None:
    part = numbers()[20:60]
    assert rows(part, 1).flatten().tolist() == [21, 22, 23, 24, 25, 26]


def test_a_complex_alias_pairs_real_numbers() -> None:
    flat = numbers()
    alias = alias_of(flat, 4, [2], [1], torch.complex64)
    assert alias.tolist() == [4 + 5j, 6 + 7j]
    alias.mul_(1j)
    assert flat[4:8].tolist() == [-5, 4, -7, 6]


def test_an_alias_keeps_the_memory_of_its_buffer_alive() -> None:
    flat = numbers()
    storage = weakref.ref(flat.untyped_storage())
    alias = rows(flat)
    del flat
    others = [torch.full((100,), -1.0) for _ in range(50)]
    assert alias.flatten().tolist() == [10, 11, 12, 13, 14, 15]
    move_out(alias)
    assert storage() is None  # the alias was the last one that needed it
    assert len(others) == 50


def test_a_saved_alias_holds_only_its_own_bytes() -> None:
    sizes = []
    flat = torch.zeros(100_000)
    for tensor in (rows(flat), torch.zeros(2, 3)):
        file = io.BytesIO()
        torch.save(tensor, file)
        sizes.append(file.tell())
    assert sizes[0] == sizes[1]
    alias = rows(numbers())
    assert torch.equal(pickle.loads(pickle.dumps(alias)), alias)
    assert torch.equal(copy.deepcopy(alias), alias)


def test_an_alias_can_be_a_gradient_and_be_resized_like_torchs_own() -> None:
    flat = numbers()
    parameter = nn.Parameter(torch.ones(2, 3))
    parameter.grad = rows(flat)
    parameter.sum().backward()
    assert flat[10:16].tolist() == [11, 12, 13, 14, 15, 16]
    alias = parameter.grad
    alias.resize_(10, 10)  # more than its bytes: torch moves it to other memory
    assert alias.flatten()[:6].tolist() == [11, 12, 13, 14, 15, 16]
    alias.fill_(0)
    assert flat[10] == 11
    shared = rows(flat).share_memory_()
    assert shared.flatten().tolist() == [11, 12, 13, 14, 15, 16]


def test_an_alias_made_in_inference_mode_is_an_ordinary_tensor() -> None:
    flat = numbers()
    with torch.inference_mode():
        alias = rows(flat)
    assert not alias.is_inference()
    alias.add_(1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: alias_of(numbers(), 95, [2, 3], [3, 1]), "bytes 380 to 404"),
        (lambda: alias_of(numbers(), -1, [1], [1]), "within the buffer"),
        (lambda: alias_of(numbers(), 0, [2, 3], [3]), "one stride for each size"),
        (lambda: alias_of(numbers(), 0, [2], [-1]), "at least 0"),
        (lambda: alias_of(numbers().view(10, 10), 0, [2], [1]), "one-dimensional"),
        (lambda: alias_of(numbers()[::2], 0, [2], [1]), "contiguous"),
        (lambda: alias_of(numbers(), 3, [2], [1], torch.complex64), "multiple of 8"),
        (lambda: storages_held([numbers()], []), "one expectation for each"),
    ],
)
def test_wrong_arguments_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_only_tensors_are_accepted() -> None:
    with pytest.raises(TypeError, match=r"torch\.Tensor is needed, not <class 'int'>"):
        overlapping([3])  # type: ignore[list-item]


# ---------------------------------------------------------------------------------------------------- holders
def test_holders_of_a_storage_are_its_tensors_and_storage_objects() -> None:
    alias = rows(numbers())
    assert storage_holders(alias) == 1
    again = alias
    assert storage_holders(alias) == 1  # the same tensor
    view, detached, data = alias.view(-1), alias.detach(), again.data
    assert storage_holders(alias) == 4
    storage = alias.untyped_storage()
    assert storage_holders(alias) == 5
    del view, detached, data, storage
    assert storage_holders(alias) == 1  # torch keeps the storage's Python object, to which nobody refers now
    assert storages_held([alias, alias, numbers()], [1, 0, 1]) == [1]
    assert storage_holders(torch.eye(2).to_sparse()) == 0


def test_sharing_is_told_by_the_storage() -> None:
    flat = numbers()
    assert shares_storage(flat, flat[5:])
    assert shares_storage(flat, flat.detach())
    assert not shares_storage(flat, flat.clone())
    sparse = torch.eye(2).to_sparse()
    assert not shares_storage(sparse, sparse)


def test_overlapping_tensors_are_found() -> None:
    flat, sparse = numbers(), torch.eye(2).to_sparse()
    columns = torch.as_strided(flat, (2, 2), (4, 1))  # elements 0, 1, 4 and 5
    assert overlapping([flat[6:8], sparse, columns, flat[:0], sparse]) == []
    assert overlapping([flat[5:6], flat[6:8], columns]) == [0, 2]
    assert overlapping([flat[1:2], numbers(), flat[8:9], flat, flat]) == [0, 2, 3, 4]


@pytest.mark.parametrize("count", [12, 1 << 16])
def test_gradients_are_written_into_their_slots(count: int) -> None:
    slot = torch.zeros(3, count // 3)
    for grad in (
        torch.randn(3, count // 3),
        torch.randn(count // 3, 3).t(),
        torch.randn(3, count // 3).double(),
        torch.view_as_complex(torch.randn(3, count // 3, 2)).conj().imag,
    ):
        version = slot._version
        write_into(slot, grad)
        assert torch.equal(slot, grad.float()) and slot._version > version
    version, values = slot._version, slot.clone()
    write_into(slot, slot.view(3, -1))
    assert torch.equal(slot, values) and slot._version == version
    square, turned = torch.arange(4.0).view(2, 2), torch.tensor([[0.0, 2.0], [1.0, 3.0]])
    write_into(square, square.t())
    assert torch.equal(square, turned)


KEEPERS: list[tuple[str, Callable[[Tensor], Any]]] = [
    ("itself", lambda g: g),
    ("list", lambda g: [g]),
    ("view", lambda g: g.view(-1)),
    ("row", lambda g: g[0]),
    ("detached", lambda g: g.detach()),
    ("data", lambda g: g.data),
    ("numpy", lambda g: g.numpy()),
    ("storage", lambda g: g.untyped_storage()),
    ("graph", lambda g: (g * torch.ones(2, 3, requires_grad=True)).sum()),
    ("dlpack", torch.utils.dlpack.to_dlpack),
]


@pytest.mark.parametrize("keep", [keep for _, keep in KEEPERS], ids=[name for name, _ in KEEPERS])
@pytest.mark.parametrize("seen", [False, True], ids=["never read", "read before"])
def test_whoever_keeps_a_gradient_is_seen_until_it_lets_go(keep: Callable[[Tensor], Any], seen: bool) -> None:
    flat = numbers()
    parameters = [nn.Parameter(torch.ones(2, 3)) for _ in range(3)]
    for i in range(2):
        parameters[i].grad = rows(flat, 10 * i)
    if seen:
        assert parameters[1].grad is not None
        parameters[1].grad.untyped_storage()
    assert gradients_held(parameters) == []
    assert parameters[1].grad is not None
    kept = keep(parameters[1].grad)
    assert gradients_held(parameters) == [1]
    assert kept is not None
    del kept
    assert gradients_held(parameters) == []


def test_a_weak_reference_does_not_hold_a_gradient() -> None:
    parameter = nn.Parameter(torch.ones(2, 3))
    parameter.grad = rows(numbers())
    weak = weakref.ref(parameter.grad)
    assert gradients_held([parameter]) == []
    assert weak() is not None


# ------------------------------------------------------------------------------------------ moving a gradient
def test_all_tensors_of_a_storage_move_and_keep_their_values() -> None:
    flat = numbers()
    parameter = nn.Parameter(torch.ones(2, 3))
    parameter.grad = rows(flat)
    kept, view, detached = parameter.grad, parameter.grad.view(-1)[2:], parameter.grad.detach()
    version = kept._version
    move_out(parameter.grad)
    flat.fill_(-1)
    assert kept.flatten().tolist() == [10, 11, 12, 13, 14, 15]
    assert view.tolist() == [12, 13, 14, 15]
    assert detached.data_ptr() == kept.data_ptr() == parameter.grad.data_ptr() != flat[10:].data_ptr()
    assert kept._version == version
    kept[0, 2] = 5
    assert view[0] == 5
    assert flat.tolist() == [-1] * 100


def test_moving_gives_back_the_buffer() -> None:
    flat = numbers()
    alias = rows(flat)
    assert storage_holders(flat) == 2
    move_out(alias)
    assert storage_holders(flat) == 1
    alias.untyped_storage().resize_(0)  # it has an allocator of its own now
    assert flat[10] == 10


def test_a_graph_that_saved_a_gradient_sees_the_old_values_after_the_move() -> None:
    flat = numbers()
    gradient = rows(flat)
    x = torch.ones(2, 3, requires_grad=True)
    loss = (gradient * x).sum()
    move_out(gradient)
    flat.zero_()
    loss.backward()
    assert x.grad is not None
    assert x.grad.flatten().tolist() == [10, 11, 12, 13, 14, 15]


def test_moving_an_empty_tensor_is_allowed_and_a_sparse_one_refused() -> None:
    empty = alias_of(numbers(), 3, [0], [1])
    move_out(empty)
    assert empty.tolist() == []
    with pytest.raises(ValueError, match="needs a tensor with a storage"):
        move_out(torch.eye(2).to_sparse())


# ----------------------------------------------------------------------------------------- uses of parameters
def users(module: nn.Module) -> list[str]:
    names = [name for name, _ in module.named_parameters()]
    return [names[i] for i in foreign_users(list(module.parameters()))]


class Square(nn.Module):
    """Its product saves the parameter itself for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.weight


def test_training_leaves_no_foreign_use() -> None:
    net = Square()
    optimizer = torch.optim.AdamW(net.parameters())
    net.weight.register_hook(lambda gradient: None)
    net.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    assert foreign_uses(net.weight) == 0
    for _ in range(2):
        loss = net(torch.ones(3)).sum()
        assert users(net) == ["weight"]  # saved for backward
        loss.backward()
        assert users(net) == []  # the loss is alive still
        optimizer.step()
    node = torch.autograd.graph.get_gradient_edge(net.weight).node
    node.register_hook(lambda *gradients: None)
    assert users(net) == []
    del loss
    assert users(net) == []


def test_a_retained_graph_uses_what_it_saved() -> None:
    net = Square()
    loss = net(torch.ones(3)).sum()
    loss.backward(retain_graph=True)
    assert users(net) == ["weight"]
    del loss
    assert users(net) == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("make", [torch.jit.script, lambda net: torch.jit.trace(net, torch.ones(3))])
def test_torchscript_uses_the_parameters_as_long_as_it_lives(make: Callable[[nn.Module], object]) -> None:
    net = Square()
    program = make(net)
    assert users(net) == ["weight"]
    assert foreign_uses(net.weight) >= 1
    del program
    gc.collect()
    assert users(net) == []


def test_a_view_uses_its_parameter_and_a_detached_tensor_does_not() -> None:
    net = Square()
    view = net.weight.view(1, 3)
    assert users(net) == ["weight"]
    del view
    others = [
        net.weight.detach(),
        net.weight.data,
        copy.deepcopy(net),
        net.state_dict(),
        nn.ParameterList([net.weight]),
    ]
    net.share_memory()
    assert users(net) == []
    assert len(others) == 5
