"""A pending parameter completes itself for whoever looks at it, and is ordinary before and after."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.dlpack import from_dlpack, to_dlpack
from torch.utils.flop_counter import FlopCounterMode

from comm_core import storages_held, write_into
from commsched.optimizer import pending
from commsched.optimizer.pending import (
    Access,
    PendingGradient,
    PendingParameter,
    can_pend,
    clear_pending,
    keep_class,
    mark_pending,
    release_class,
    without_completing,
)


class Arrival:
    """Marks a parameter; when completed, it becomes all ones with a gradient of all twos."""

    def __init__(self, only_grad: bool = False, compiled: bool = False) -> None:
        self.parameter = nn.Parameter(torch.zeros(3, 4))
        if compiled:
            keep_class(self.parameter)
        self.parameter.grad = torch.zeros(3, 4)
        self.completed = 0
        mark_pending(self.parameter, access_of(self), only_grad)

    def complete(self) -> None:
        self.completed += 1
        clear_pending(self.parameter)
        with torch.no_grad():
            self.parameter.fill_(1.0)
        self.parameter.grad = torch.full((3, 4), 2.0)


def access_of(
    arrival: Arrival,
    replaced: Callable[[torch.Tensor | None], bool] = lambda grad: False,
    cleared: Callable[[bool], bool] = lambda set_to_none: False,
) -> Access:
    return Access(arrival.complete, replaced, cleared)


@pytest.fixture(autouse=True)
def nothing_stays_behind() -> Iterator[None]:
    gc.collect()  # the optimizers of other tests: what is pending there must not end within this one
    before = dict(pending._accesses), set(pending._only_gradients)
    yield
    assert (pending._accesses, pending._only_gradients) == before


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("promised", [True, False])
def test_a_module_clears_gradients_that_have_not_arrived(set_to_none: bool, promised: bool) -> None:
    """It reads each gradient, which once completed all parameters before the next forward."""
    arrival = Arrival()
    module = nn.Module()
    module.weight = arrival.parameter
    arrival.completed = 0  # torch reads it when it is assigned
    asked: list[bool] = []

    def clear(how: bool) -> bool:
        asked.append(how)
        return promised

    mark_pending(arrival.parameter, access_of(arrival, cleared=clear))
    module.zero_grad(set_to_none)
    assert asked == [set_to_none] and arrival.completed == (not promised)
    grad = arrival.parameter.grad  # any other reader waits
    assert arrival.completed == 1
    assert promised or (grad is None if set_to_none else not grad.any())


SCRIPT: Any = torch.jit.CompilationUnit(
    """
    def square(x): return x * x
    def sum_of(xs: List[Tensor]): return xs[0].sum()
    """
)
Module = torch.jit.script(nn.Flatten(0))  # a module of TorchScript without parameters


def grad_of(loss: torch.Tensor, p: nn.Parameter) -> torch.Tensor:
    """Return the gradient, which autograd computes from the value that it has saved in the forward."""
    return torch.autograd.grad(loss.sum(), p)[0]


def now_holding(p: nn.Parameter) -> torch.Tensor:
    other = torch.zeros(3, 4)
    other.data = p
    return other


READS: dict[str, Callable[[nn.Parameter], Any]] = {
    "operator": lambda p: (p + 1).sum() == 24,
    "reflected operator": lambda p: (1 - p).abs().sum() == 0,
    "function": lambda p: torch.sum(p) == 12,
    "method": lambda p: p.mean() == 1,
    "detach": lambda p: p.detach()[0, 0] == 1,
    "data": lambda p: p.data[0, 0] == 1,
    "grad": lambda p: p.grad[0, 0] == 2,
    "index": lambda p: p[1, 2] == 1,
    "item": lambda p: p[0, 0].item() == 1,
    "tolist": lambda p: p.tolist()[2][3] == 1,
    "repr": lambda p: "1." in repr(p),
    "format": lambda p: "1." in f"{p}",
    "numpy": lambda p: p.detach().numpy()[0, 0] == 1,
    "linear": lambda p: F.linear(torch.ones(1, 4), p)[0, 0] == 4,
    "in a list": lambda p: torch.cat([torch.ones(3, 4), p]).sum() == 24,
    "in a nested tuple": lambda p: torch.stack((p, p)).sum() == 24,
    "by keyword": lambda p: torch.add(torch.ones(3, 4), other=p).sum() == 24,
    "foreach": lambda p: torch._foreach_norm([p])[0] ** 2 == 12,
    "deepcopy": lambda p: copy.deepcopy(p)[0, 0] == 1,
    "copy": lambda p: copy.copy(p)[0, 0] == 1,
    "another parameter": lambda p: nn.Parameter(p)[0, 0] == 1,
    "as a subclass": lambda p: p.as_subclass(torch.Tensor)[0, 0] == 1,
    "pickle": lambda p: pickle.loads(pickle.dumps(p))[0, 0] == 1,
    "iteration": lambda p: next(iter(p))[0] == 1,
    "bool": lambda p: bool((p == 1).all()),
    "equal": lambda p: torch.equal(p, torch.ones(3, 4)),
    "storage": lambda p: p.untyped_storage()[3] == 0x3F,
    "clone": lambda p: p.clone().sum() == 12,
    "to": lambda p: p.to(torch.float64).sum() == 12,
    "vmap": lambda p: torch.vmap(torch.sum)(p).sum() == 12,
    "functional call": lambda p: (
        torch.func.functional_call(nn.Linear(4, 3, bias=False), {"weight": p}, torch.ones(4))[0] == 4
    ),
    "function of TorchScript": lambda p: SCRIPT.square(p).sum() == 12,
    "function of TorchScript by keyword": lambda p: SCRIPT.square(x=p).sum() == 12,
    "function of TorchScript in a list": lambda p: SCRIPT.sum_of([p]) == 12,
    "module of TorchScript": lambda p: Module(p).sum() == 12,
    "method of TorchScript": lambda p: Module.forward(p).sum() == 12,
    "gradient through TorchScript": lambda p: grad_of(SCRIPT.square(p), p).sum() == 24,
    "operator by name": lambda p: torch.ops.aten.mul.Tensor(p, p).sum() == 12,
}

# These call no ``__torch_function__``: torch's dispatcher completes.
OPERATORS: dict[str, Callable[[nn.Parameter], Any]] = {
    "torch.Tensor(p)": lambda p: torch.Tensor(p).sum() == 12,
    "torch.FloatTensor(p)": lambda p: torch.FloatTensor(p).sum() == 12,
    "x.new(p)": lambda p: torch.ones(1).new(p).sum() == 12,
    "torch.tensor(p)": lambda p: torch.tensor(p).sum() == 12,
    "x.new_tensor(p)": lambda p: torch.ones(1).new_tensor(p).sum() == 12,
    "x.data = p": lambda p: now_holding(p).sum() == 12,
    "x.set_(p)": lambda p: torch.zeros(3, 4).set_(p).sum() == 12,
    "torch.sparse_coo_tensor(i, p)": lambda p: torch.sparse_coo_tensor([[0, 1, 2]], p).to_dense().sum() == 12,
    "torch.func.grad": lambda p: torch.func.grad(lambda q: (q * q).sum())(p).sum() == 24,
    "torch.func.vjp": lambda p: torch.func.vjp(torch.square, p)[1](torch.ones(3, 4))[0].sum() == 24,
    "torch.func.jacrev": lambda p: torch.func.jacrev(lambda q: (q * q).sum())(p).sum() == 24,
    "torch.nested.nested_tensor([p])": lambda p: torch.nested.nested_tensor([p])[0].sum() == 12,
    "torch.Tensor._make_subclass": lambda p: torch.Tensor._make_subclass(torch.Tensor, p).sum() == 12,
}


def copied_in_cpp(p: nn.Parameter) -> bool:
    """Read a parameter in a C++ function that calls no operator."""
    copied = torch.zeros(3, 4)
    write_into(copied, p)
    return bool(copied.sum() == 12)


UNABLE: dict[str, Callable[[nn.Parameter], Any]] = {
    "functions of C++ extensions": copied_in_cpp,
    "torch.utils.dlpack.to_dlpack(p)": lambda p: from_dlpack(to_dlpack(p)).sum() == 12,
}
LIMITS = (Path(__file__).parents[3] / "docs/exactness.md").read_text().partition("Known limit: ")[2]


@pytest.mark.parametrize("what", READS)
def test_every_read_sees_what_has_arrived(what: str) -> None:
    arrival = Arrival()
    assert READS[what](arrival.parameter), what
    assert arrival.completed == 1
    assert type(arrival.parameter) is nn.Parameter


@pytest.mark.parametrize("what", OPERATORS)
def test_operators_that_cpp_code_calls_see_what_has_arrived(what: str) -> None:
    arrival = Arrival()
    assert OPERATORS[what](arrival.parameter), what
    assert arrival.completed == 1
    assert type(arrival.parameter) is nn.Parameter


@pytest.mark.parametrize("what", [name for name in READS if "TorchScript" in name])
def test_torchscript_sees_what_has_arrived_in_parameters_of_compiled_graphs(what: str) -> None:
    """Operators do not complete these, so this fails where calls go around the one that pending.py wraps."""
    arrival = Arrival(compiled=True)
    assert READS[what](arrival.parameter), what
    assert arrival.completed == 1
    release_class(arrival.parameter)


@pytest.mark.parametrize("what, compiled", [*((w, True) for w in OPERATORS), *((w, False) for w in UNABLE)])
def test_the_page_lists_what_reads_earlier_values(what: str, compiled: bool) -> None:
    """A reader that has become able to wait fails here: take it from docs/exactness.md and from this list."""
    arrival = Arrival(compiled=compiled)
    assert not (OPERATORS | UNABLE)[what](arrival.parameter) and arrival.completed == 0
    assert what.split("(i, ")[0] in LIMITS, f"docs/exactness.md does not list {what}"
    arrival.complete()
    release_class(arrival.parameter)


def test_the_own_work_on_late_parameters_completes_none() -> None:
    arrival = Arrival()
    with without_completing():
        assert not torch.zeros_like(arrival.parameter, requires_grad=False).any()
        with without_completing():
            pass
        assert not arrival.parameter.detach().any() and arrival.completed == 0
    assert arrival.parameter.sum() == 12


def test_registering_twice_is_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads may mark their first parameters together."""
    for kind, name in ((torch.autograd.Function, "apply"), (torch.jit.ScriptFunction, "__call__")):
        monkeypatch.setattr(kind, name, vars(kind)[name])
    pending._complete_before_functions.__wrapped__()
    arrival = Arrival()
    assert torch.tensor(arrival.parameter).sum() == 12 and arrival.completed == 1


def test_a_parameter_may_stay_marked_after_an_access() -> None:
    """As one that no rank has used. Operators called themselves without end."""
    parameter = nn.Parameter(torch.ones(3))
    mark_pending(parameter, Access(lambda: None, lambda grad: False, lambda set_to_none: False))
    assert torch.tensor(parameter).sum() == 3 and parameter.sum() == 3 and torch.stack([parameter]).sum() == 3
    clear_pending(parameter)


@pytest.mark.parametrize("read", [torch.tensor, lambda p: torch.func.grad(lambda q: (q * q).sum())(p) / 2])
def test_modes_of_the_dispatcher_see_complete_values(read: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """torch refused kernels of Python for all operators while a mode was on."""
    arrival = Arrival()
    with FlopCounterMode(display=False):
        assert read(arrival.parameter).sum() == 12
    assert arrival.completed == 1


def test_a_gradient_on_its_way_waits_for_no_operator() -> None:
    arrival = Arrival(only_grad=True)
    assert torch.tensor(arrival.parameter).sum() == 0 and SCRIPT.square(arrival.parameter).sum() == 0
    assert arrival.completed == 0
    clear_pending(arrival.parameter)


class ReadsMemory(torch.autograd.Function):
    """Reads memory as a C++ extension does, without an operator."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        copied = torch.zeros(3, 4)
        write_into(copied, weight)
        return copied * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def test_a_function_of_autograd_gets_what_has_arrived() -> None:
    arrival = Arrival()
    product = ReadsMemory.apply(arrival.parameter, torch.tensor(3.0))
    assert torch.equal(product, torch.full((3, 4), 3.0)) and arrival.completed == 1


def test_writes_come_after_the_arrival() -> None:
    for write in (
        lambda p: p.data.mul_(3),
        lambda p: p.detach().copy_(torch.full((3, 4), 3.0)),
        lambda p: nn.init.constant_(p, 3.0),
        lambda p: p.data.__setitem__((slice(None),), 3.0),
    ):
        arrival = Arrival()
        write(arrival.parameter)
        assert arrival.completed == 1 and arrival.parameter.sum() == 36
    arrival = Arrival()
    with torch.no_grad():
        arrival.parameter.sub_(0.5)
    assert arrival.parameter.sum() == 6
    arrival = Arrival()
    arrival.parameter.data = torch.full((3, 4), 9.0)
    assert arrival.completed == 1 and arrival.parameter.sum() == 108
    arrival = Arrival()
    arrival.parameter.grad = None
    assert arrival.completed == 1 and arrival.parameter.grad is None


def test_what_does_not_depend_on_the_value_does_not_wait() -> None:
    arrival = Arrival()
    p = arrival.parameter
    assert p.shape == (3, 4) and p.dtype == torch.float32 and p.requires_grad and p.is_leaf
    assert p.numel() == 12 and p.shape[1] == 4 and p.dim() == 2 and p.device.type == "cpu"
    assert isinstance(p, nn.Parameter) and isinstance(p, torch.Tensor) and hash(p) == id(p)
    module = nn.Module()
    module._parameters["weight"] = p  # without the checks of an assignment, which look at grad_fn
    assert list(module.parameters())[0] is p and "weight" in dict(module.named_parameters())
    assert arrival.completed == 0
    arrival.complete()


def test_where_only_the_gradient_is_on_its_way_the_value_is_free() -> None:
    arrival = Arrival(only_grad=True)
    assert type(arrival.parameter) is PendingGradient
    assert arrival.parameter.sum() == 0 and arrival.completed == 0
    assert F.linear(torch.ones(1, 4), arrival.parameter).sum() == 0 and arrival.completed == 0
    assert type(nn.Parameter(arrival.parameter)) is nn.Parameter and arrival.completed == 0
    assert type(arrival.parameter.as_subclass(torch.Tensor)) is torch.Tensor and arrival.completed == 0
    assert arrival.parameter.grad[0, 0] == 2 and arrival.completed == 1
    for touch in (lambda p: setattr(p, "grad", None), lambda p: delattr(p, "grad")):
        arrival = Arrival(only_grad=True)
        touch(arrival.parameter)
        assert arrival.completed == 1 and arrival.parameter.grad is None


@pytest.mark.parametrize(
    "backward",
    [
        lambda loss, p: loss.backward(inputs=[p]),
        lambda loss, p: torch.autograd.backward([loss], inputs=(p,)),
        lambda loss, p: torch.autograd.grad(loss, p),
    ],
)
def test_hooks_inside_a_backward_to_given_inputs_see_what_is_on_its_way(backward: Any) -> None:
    """torch calls ``__torch_function__`` for these, and reads were let through until the backward's end."""
    given, other, seen = Arrival(only_grad=True), Arrival(only_grad=True), []
    middle = given.parameter * 3
    middle.register_hook(lambda grad: seen.append(other.parameter.grad))
    backward(middle.sum(), given.parameter)
    assert other.completed == 1 and given.completed == 0 and torch.equal(seen[0], torch.full((3, 4), 2.0))
    clear_pending(given.parameter)


def test_gradients_of_pending_parameters_are_those_of_ordinary_ones() -> None:
    p, q = Arrival(only_grad=True).parameter, Arrival(only_grad=True).parameter
    found = torch.autograd.grad((p * 3).sum(), (p, q), materialize_grads=True)
    assert torch.equal(found[0], torch.full((3, 4), 3.0)) and torch.equal(found[1], torch.zeros(3, 4))
    assert torch.autograd.grad((p * 3).sum(), [p, q], allow_unused=True)[1] is None
    with pytest.raises(RuntimeError, match="not have been used"):
        torch.autograd.grad((p * 3).sum(), [p, q])
    scalar = Arrival(only_grad=True)
    scalar.parameter.requires_grad_(False)
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.autograd.grad((p * 3).sum(), scalar.parameter)
    for one in (p, q, scalar.parameter):
        clear_pending(one)


@pytest.mark.parametrize("grad", [None, torch.ones(3, 4)])
def test_a_gradient_is_replaced_without_waiting_for_the_one_that_was_to_come(
    grad: torch.Tensor | None,
) -> None:
    """``for p in params: p.grad = None`` once waited for every gradient before the next forward."""
    arrival = Arrival(only_grad=True)
    told: list[torch.Tensor | None] = []

    def replaced(now: torch.Tensor | None) -> bool:
        told.append(now)
        clear_pending(arrival.parameter)
        pending.set_raw_grad(arrival.parameter, now)
        return True

    mark_pending(arrival.parameter, access_of(arrival, replaced), only_grad=True)
    arrival.parameter.grad = grad
    assert len(told) == 1 and told[0] is grad and arrival.completed == 0
    assert arrival.parameter.grad is grad
    mark_pending(arrival.parameter, access_of(arrival, replaced), only_grad=True)
    del arrival.parameter.grad
    assert told[1:] == [None] and arrival.completed == 0 and arrival.parameter.grad is None


def test_the_class_of_a_pending_parameter_makes_ordinary_ones() -> None:
    arrival = Arrival()
    made = type(arrival.parameter)(torch.ones(2), requires_grad=False)
    assert type(made) is nn.Parameter and not made.requires_grad
    assert arrival.completed == 0
    arrival.complete()


def test_copies_and_results_are_ordinary() -> None:
    arrival = Arrival()
    assert type(copy.deepcopy(arrival.parameter)) is nn.Parameter
    arrival = Arrival()
    assert type(arrival.parameter * 2) is torch.Tensor
    arrival = Arrival()
    assert type(pickle.loads(pickle.dumps(arrival.parameter))) is nn.Parameter


def test_autograd_reaches_the_parameter_through_what_was_computed_from_it() -> None:
    arrival = Arrival()
    (arrival.parameter * 3).sum().backward()
    assert torch.equal(arrival.parameter.grad, torch.full((3, 4), 5.0))


def test_a_parameter_whose_owner_is_gone_becomes_ordinary() -> None:
    arrival = Arrival()
    pending._accesses.pop(id(arrival.parameter))
    assert type(arrival.parameter) is PendingParameter
    assert arrival.parameter.sum() == 0 and type(arrival.parameter) is nn.Parameter


def test_only_plain_parameters_may_pend() -> None:
    class Own(nn.Parameter):
        pass

    assert can_pend(nn.Parameter(torch.zeros(2)))
    assert not can_pend(Own(torch.zeros(2)))
    assert not can_pend(torch.zeros(2))


def test_aliases_are_noticed() -> None:
    parameter = nn.Parameter(torch.zeros(4))
    assert not storages_held([parameter], [1])
    alias: Any = parameter.detach()
    assert storages_held([parameter], [1])
    del alias
    assert not storages_held([parameter], [1])
    for make in (lambda p: p.data, lambda p: p.detach().numpy(), lambda p: p.view(2, 2)):
        alias = make(parameter)
        assert storages_held([parameter], [1]), make
        del alias
        assert not storages_held([parameter], [1])
