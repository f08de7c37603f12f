"""What ranks compare: settings as they are meant, bits of parameters, and how differences are told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from commsched.errors import SettingsError
from commsched.optimizer.agreement import Agreement, _plain, bits_of, settings_of
from commsched.optimizer.gradient import Gradient


def gradients_of(model: nn.Module) -> list[Gradient]:
    return [Gradient(i, p, name) for i, (name, p) in enumerate(model.named_parameters())]


def sgd(groups: Any, **options: Any) -> Any:
    optimizer: Any = torch.optim.SGD(groups, **options)
    optimizer._base = torch.optim.SGD
    optimizer._names = lambda: {p: f"p{i}" for i, p in enumerate(p for g in groups for p in g["params"])}
    return optimizer


def test_settings_are_equal_by_value() -> None:
    same = [1, 1.0, True, torch.tensor(1.0), torch.tensor(1)]
    assert len({_plain(value) for value in same}) == 1
    assert _plain(float("nan")) == _plain(torch.tensor(float("nan")))
    assert _plain([0.9, None, "a"]) == _plain((0.9, None, "a")) != _plain((0.9, None, "b"))
    assert _plain(print) == _plain(max) == _plain(torch.ones(99)) == _plain(None)


def test_frozen_groups_and_further_keys_may_differ() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    frozen = {"params": [nn.Parameter(torch.ones(2), requires_grad=False)], "lr": 9.0}
    groups = [{"params": list(layer.parameters()), "tag": i} for i, layer in enumerate(model)]
    gradients = gradients_of(model)
    plain, other = sgd(groups, lr=0.1), sgd([frozen, *groups], lr=0.1)
    assert settings_of(plain, gradients) == settings_of(other, gradients)
    params = list(model.parameters())
    rules = {Agreement(one, SimpleNamespace()).rule(params) for one in (plain, other)}  # type: ignore[arg-type]
    assert rules == {"SGD with groups of 2, 2 parameters, compared every 100 rounds"}
    assert {key for _, key in settings_of(plain, gradients)} == set(plain.defaults)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
def test_every_bit_of_a_parameter_counts(dtype: torch.dtype) -> None:
    weight = torch.randn(3, 4, 5, 6).to(dtype)
    (model := nn.Module()).weight = nn.Parameter(weight)  # type: ignore[assignment]
    before = bits_of(gradients_of(model))
    model.weight.data = weight.to(memory_format=torch.channels_last)
    assert bits_of(gradients_of(model)) == before, "another memory format has the same elements"
    real = torch.view_as_real(model.weight.data) if dtype.is_complex else model.weight.data
    real[(0,) * real.dim()] = real[(0,) * real.dim()] * (1 + torch.finfo(real.dtype).eps)
    assert bits_of(gradients_of(model)) != before


def test_numbers_that_are_none_count_alike() -> None:
    model = nn.Linear(2, 2)
    sums = []
    for payload in (0x7FC00000, -0x400000, 0x7FC00001):
        model.weight.data.view(torch.int32)[0, 0] = payload
        assert model.weight.data[0, 0].isnan()
        sums.append(bits_of(gradients_of(model)))
    assert sums[0] == sums[1] == sums[2]


def test_a_digest_reads_few_elements_and_others_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("commsched.optimizer.agreement._FEW", 4)
    model = nn.Linear(8, 4, bias=False)
    first = [bits_of(gradients_of(model), turn)[0] for turn in range(8)]
    model.weight.data[3, 7] += 1.0
    changed = [bits_of(gradients_of(model), turn)[0] for turn in range(8)]
    assert sum(a != b for a, b in zip(first, changed, strict=True)) == 1
    assert (
        sum(first) + sum(b - a for a, b in zip(first, changed, strict=True))
        == bits_of(gradients_of(model))[0]
    )


def test_a_digest_is_not_zero_and_has_40_bits() -> None:
    model = nn.Linear(2, 2)
    agreement = Agreement(sgd([{"params": list(model.parameters())}], lr=0.1), SimpleNamespace())  # type: ignore[arg-type]
    first, again, later = (agreement.digest(number, gradients_of(model)) for number in (1, 1, 101))
    assert first == again == later and 0 < first <= 1 << 40, "of a small model all elements are read"


def test_differences_that_are_gone_are_not_told() -> None:
    model = nn.Linear(2, 2)
    ranks: Any = SimpleNamespace(rank=0, all_values=lambda mine: [mine, mine, mine])
    agreement = Agreement(sgd([{"params": list(model.parameters())}], lr=0.1), ranks)
    agreement.compare(1, gradients_of(model), early=False)
    ranks.all_values = lambda mine: [mine, mine, (mine[0] | {(0, "lr"): 0.2}, mine[1])]
    with pytest.raises(
        SettingsError, match=r"lr of group 0 \(that of p0\) is 0.1 on ranks 0, 1 and 0.2 on rank 2"
    ):
        agreement.compare(1, gradients_of(model), early=False)
