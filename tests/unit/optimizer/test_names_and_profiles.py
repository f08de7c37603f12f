"""Names of parameters, groups of them, and profiles that must fit the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from commsched.optimizer.distributed import checked_names, group_indices
from commsched.optimizer.measuring import Sample
from commsched.optimizer.planner import Model, Plan
from scheduler.ir.buckets import Bucket, Piece
from scheduler.ir.link import Link
from scheduler.ir.profile import Profile
from scheduler.policies import plan

LINK = Link(alpha=1e-4, beta=1e-8)


def groups_of(*models: nn.Module) -> list[dict[str, Any]]:
    return [{"params": list(model.parameters())} for model in models]


def test_names_go_by_the_parameter() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    names = checked_names(groups_of(model), list(model.named_parameters()))
    assert [names[p] for p in model.parameters()] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert len(set(checked_names(groups_of(model), None).values())) == 4


def test_names_that_cannot_be_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    named: list[Any] = list(model.named_parameters())
    with pytest.raises(ValueError, match="1 of 4 have no name.*\\(1,\\)"):
        checked_names(groups_of(model), named[:3])
    with pytest.raises(ValueError, match="repeats 0.bias"):
        checked_names(groups_of(model), [*named, named[1]])
    with pytest.raises(ValueError, match="pairs of a name and a parameter"):
        checked_names(groups_of(model), [p for _, p in named])


def test_groups_by_number_and_by_list() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    groups = groups_of(model)
    a, b, c, d = model.parameters()
    assert group_indices(groups, None, 0) is None
    assert group_indices(groups, 2, 0) == [[0, 1], [2, 3]] == group_indices(groups, None, 2)
    assert group_indices(groups, 99, 0) == [[0], [1], [2], [3]]
    assert group_indices(groups, [[d, a], [c]], 0) == [[3, 0], [2]]
    b.requires_grad_(False)
    assert group_indices(groups, [[d, b, a]], 0) == [[2, 0]]
    with pytest.raises(ValueError, match="share a tensor"):
        group_indices(groups, [[a, c], [c]], 0)
    with pytest.raises(ValueError, match="negative"):
        group_indices(groups, -1, 0)


MODEL = Model(("a", "b", "c"), (10, 7, 33), (torch.float32, torch.bfloat16, torch.float32))


def test_fingerprints_differ_where_models_differ() -> None:
    others = [
        Model(("a", "b"), (10, 7), (torch.float32, torch.bfloat16)),
        Model(("a", "b", "c"), (10, 8, 33), MODEL.dtypes),
        Model(("a", "b", "c"), (10, 33, 7), MODEL.dtypes),
        Model(("a", "b", "c"), MODEL.numels, (torch.float32,) * 3),
    ]
    prints = {model.fingerprint for model in [MODEL, *others]}
    assert len(prints) == 5
    assert Model(("x", "y", "z"), MODEL.numels, MODEL.dtypes).fingerprint == MODEL.fingerprint


def test_a_profile_of_this_model_fits_in_any_order() -> None:
    order = [2, 0, 1]
    times = Sample([1.0, 2.0, 3.0], [4.0, 5.0, 6.0], 0.5)
    profile = MODEL.profile(order, times, "a test")
    assert [layer.name for layer in profile.layers[1:]] == ["c", "a", "b"]
    assert [layer.bytes for layer in profile.layers] == [0, 132, 40, 14]
    assert [(layer.forward, layer.backward) for layer in profile.layers[1:]] == [(3, 6), (1, 4), (2, 5)]
    fitted, layers = MODEL.fitted(profile, [0, 1, 2])
    assert layers == order and fitted.layers[0].forward == 0.5
    bare = replace(profile, layers=profile.layers[1:])
    fitted, layers = MODEL.fitted(bare, [0, 1, 2])
    assert layers == order and fitted.layers[0].bytes == 0 and len(fitted.layers) == 4


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda layers: layers[:-1], "without a layer: \\['c'\\]"),
        (lambda layers: (*layers, replace(layers[1], name="d")), "without a parameter: \\['d'\\]"),
        (lambda layers: (*layers[:-1], replace(layers[-1], bytes=99)), "c has 99 bytes there and 132 here"),
    ],
)
def test_a_profile_of_another_model_is_refused(change: Any, words: str) -> None:
    profile = MODEL.profile([0, 1, 2], Sample([1.0] * 3, [1.0] * 3, 0.0), "a test")
    other = Profile("other", tuple(change(profile.layers)), source="a test")
    with pytest.raises(ValueError, match=words):
        MODEL.fitted(other, [0, 1, 2])


def test_buckets_are_cut_between_elements() -> None:
    profile = MODEL.guess([0, 1, 2], LINK)
    program = plan(profile, LINK, "wfbp", ranks=2)
    cut = (
        Bucket((Piece(3, 0, 66),), 0),
        Bucket((Piece(3, 66, 132), Piece(1, 0, 40)), 0),
        Bucket((Piece(2, 0, 14),), 1),
    )
    buckets = Plan(replace(program, buckets=cut), profile, LINK, (-1, 0, 1, 2)).buckets(MODEL)
    assert buckets[0].pieces == (Piece(2, 0, 64),)
    assert buckets[1].pieces == (Piece(2, 64, 132), Piece(0, 0, 40))
    assert buckets[2].pieces == (Piece(1, 0, 14),)


@pytest.mark.parametrize("wire", [torch.int8, torch.float8_e4m3fn])
def test_large_float32_matrices_are_quantised_and_kept_apart(wire: torch.dtype) -> None:
    shapes = [(64, 32), (2048,), (64, 31), (40, 64), (64, 64)]
    params = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    params[4] = nn.Parameter(torch.zeros(64, 64, dtype=torch.float64))
    names = [str(i) for i in range(5)]
    model = Model.of(params, names, wire)
    assert model.quantised == {0, 3} and model.groups == [0, 1, 1, 0, 2]
    assert [model.quantises(group) for group in (0, 1, 2)] == [True, False, False]
    assert not Model.of(params, names, torch.float16).quantised
    layout = model.layout([Bucket((Piece(3, 0, 10240), Piece(0, 0, 8192)), 0)], 2)
    assert [layout.slots[i].offset for i in (3, 0)] == [0, 2560] and layout.slices[0].numel == 4608
    sizes = [4 * 2048, 4 * 2048, 4 * 1984, 4 * 2560, 8 * 4096]
    apart = sizes[1] + sizes[2] + sizes[4]
    assert model.wire_share(wire) == pytest.approx(((sizes[0] + sizes[3]) * 260 / 1024 + apart) / sum(sizes))
    halves = sum(sizes[:4]) / 2 + sizes[4] / 4
    assert Model.of(params, names).wire_share(torch.float16) == pytest.approx(halves / sum(sizes))
    assert Model.of(params, names).wire_share(None) == 1.0
