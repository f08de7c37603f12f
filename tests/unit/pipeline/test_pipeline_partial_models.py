"""Models that no rank holds whole: from a factory, or on the meta device with weights in files."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from commsched.pipeline import Pipeline
from commsched.pipeline.factory import Factory, Weights
from tests.support.pipeline_runs import on_threads, sgd
from tests.unit.pipeline.test_pipeline_partial_forward import Blocks, loss_of, tokens


class Rejection(nn.Linear):
    """Draws until all values are small: how many numbers depends on the values."""

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.normal_()
            while (far := self.weight.abs() > 1).any():
                self.weight.copy_(torch.where(far, torch.randn_like(self.weight), self.weight))
            self.bias.uniform_()


class Late(nn.Module):
    """Initialises all parts once more after they are made, as transformers does."""

    def __init__(self, part: type[nn.Linear] = Rejection) -> None:
        super().__init__()
        self.parts = nn.ModuleList(part(6, 6) for _ in range(4))
        self.register_buffer("noise", torch.rand(6))
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 6))
        for part in self.parts:
            nn.init.xavier_uniform_(part.weight)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = torch.tanh(part(x)) + self.noise
        return x * self.scale


def cloned() -> nn.Module:
    """Layers copied from one, as nn.TransformerEncoder does."""
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 8, batch_first=True, dropout=0.0), 3)


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 6))
    model[3].weight = model[0].weight
    return model


def half() -> nn.Module:
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))).to(torch.float64)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "blocks": Blocks,
    "rejection, initialised twice": Late,
    "copied layers": cloned,
    "tied": tied,
    "another type": half,
}


@pytest.mark.few
@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=20, deadline=None)
@given(chosen=st.data())
def test_kept_parameters_start_as_in_one_process(name: str, chosen: st.DataObject) -> None:
    torch.manual_seed(7)
    start = torch.get_rng_state()
    whole = MODELS[name]()
    end = torch.get_rng_state()
    names = [key for key, _ in whole.named_parameters()]
    kept = chosen.draw(st.sets(st.sampled_from(names)))
    factory = Factory(MODELS[name])
    outline = factory.outline()
    assert all(parameter.is_meta for parameter in outline.parameters())
    assert torch.equal(torch.get_rng_state(), end)
    made = dict(factory.partial(kept, start).named_parameters())
    assert torch.equal(torch.get_rng_state(), end)
    for key, parameter in whole.named_parameters():
        if key in kept:
            assert torch.equal(parameter, made[key]), key
    with_memory = {key for key, parameter in made.items() if parameter.untyped_storage().nbytes()}
    most = 2 if name == "copied layers" else 1  # the one that was made last; what copies were made of
    assert len(with_memory - kept) <= most * (12 if most > 1 else 1)


def trained(model: Any, **options: Any) -> list[Any]:
    """By rank: losses of three steps, the numbers of parameters that its model has memory for, the state."""
    torch.manual_seed(5)
    data = [(tokens(), torch.zeros(3)) for _ in range(3)]
    torch.manual_seed(7)  # for factories

    def work(fabric: Any) -> Any:
        pipeline = Pipeline(
            copy.deepcopy(model),
            "1f1b",
            3,
            loss=lambda out, _: loss_of(out),
            optimizer=sgd,
            fabric=fabric,
            **options,
        )
        held = sum(p.numel() for p in {id(p): p for p in pipeline.parameters()}.values())
        return [pipeline.step(batch) for batch in data], held, pipeline.state_dict()

    return on_threads(3, work)


def whole_model(make: Callable[[], nn.Module] = Late) -> nn.Module:
    torch.manual_seed(7)
    return make()


def assert_alike(ones: list[Any], others: list[Any]) -> None:
    for (losses, _, state), (other_losses, _, other_state) in zip(ones, others, strict=True):
        assert losses == other_losses
        assert state.keys() == other_state.keys()
        assert all(torch.equal(state[key], other_state[key]) for key in state)


@pytest.mark.parametrize("make", [Late, Blocks, tied])
def test_a_pipeline_of_a_factory_trains_as_one_of_the_model(make: Callable[[], nn.Module]) -> None:
    assert_alike(trained(make), trained(whole_model(make)))


def as_file(state: dict[str, Tensor], folder: Path) -> Path:
    save_file({key: value.contiguous() for key, value in state.items()}, str(folder / "own.safetensors"))
    return folder / "own.safetensors"


def as_torch_file(state: dict[str, Tensor], folder: Path) -> Path:
    torch.save(state, folder / "pytorch_model.bin")
    return folder


def as_shards(state: dict[str, Tensor], folder: Path) -> Path:
    """Two files and their index, as Hugging Face writes them."""
    names: dict[str, str] = {}
    for number in range(2):
        file = f"model-{number}.safetensors"
        part = {key: state[key] for place, key in enumerate(state) if place % 2 == number}
        save_file(part, str(folder / file))
        names |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return folder


def as_it_is(state: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    return state


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Late(nn.Linear)


@pytest.mark.few
@pytest.mark.parametrize("write", [as_file, as_torch_file, as_shards, as_it_is])
@pytest.mark.parametrize("model", [Late, on_meta])
def test_weights_are_read_by_name(model: Any, write: Any, tmp_path: Path) -> None:
    torch.manual_seed(11)
    oracle = Late()
    weights = write(oracle.state_dict(), tmp_path)
    given = model if model is Late else None
    torch.manual_seed(5)
    data = [(tokens(), torch.zeros(3)) for _ in range(3)]

    def work(fabric: Any) -> Any:
        mine = given or on_meta()
        options = {"loss": lambda out, _: loss_of(out), "optimizer": sgd, "fabric": fabric}
        pipeline = Pipeline(mine, "1f1b", 3, weights=weights, **options)
        return [pipeline.step(batch) for batch in data], 0, pipeline.state_dict()

    assert_alike(on_threads(3, work), trained(oracle))


def test_a_rank_makes_and_reads_its_own_parameters_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = whole_model(Blocks)
    weights = as_shards(model.state_dict(), tmp_path)
    sizes = {key: value.numel() for key, value in model.named_parameters()}
    asked: list[str] = []
    read = Weights.__getitem__
    monkeypatch.setattr(Weights, "__getitem__", lambda self, name: (asked.append(name), read(self, name))[1])
    results = trained(Blocks, weights=weights)
    assert sorted(asked) == sorted(sizes)  # three ranks, each parameter once
    held = [held for _, held, _ in results]
    assert sum(held) == sum(sizes.values()) and max(held) < sum(held)
    assert_alike(results, trained(model))


def test_what_the_weights_do_not_have_starts_as_in_one_process() -> None:
    """Fine-tuning: the checkpoint is of the body, the head is new."""
    oracle, other = whole_model(), Late()
    state = {f"body.{key}": value for key, value in other.state_dict().items() if key.startswith("parts")}

    class WithBody(Late):
        base_model_prefix = "body"

    with torch.no_grad():
        for key, value in oracle.state_dict().items():
            if key.startswith("parts"):
                value.copy_(other.state_dict()[key])
    with pytest.warns(UserWarning, match="weights= .a mapping of 8. has no .*scale.*start as the model"):
        results = trained(WithBody, weights=state)
    assert_alike(results, trained(oracle))


def test_saved_files_are_read_again_by_any_number_of_ranks(tmp_path: Path) -> None:
    model, data = whole_model(tied), [(tokens(), torch.zeros(3))]

    def save(fabric: Any) -> Any:
        options = {"loss": lambda out, _: loss_of(out), "optimizer": sgd, "fabric": fabric}
        pipeline = Pipeline(copy.deepcopy(model), "1f1b", 3, **options)
        pipeline.step(data[0])
        pipeline.save(tmp_path / "weights")
        return pipeline.state_dict()

    state = on_threads(3, save)[0]
    folder = tmp_path / "weights"
    assert sorted(path.name for path in folder.iterdir()) == [
        *(f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)),
        "model.safetensors.index.json",
    ]
    files = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    for name, file in files.items():
        assert torch.equal(load_file(folder / file)[name], state[name])

    def read(fabric: Any) -> Any:
        options = {"loss": lambda out, _: loss_of(out), "optimizer": sgd, "fabric": fabric}
        return Pipeline(tied, "1f1b", 3, weights=folder, **options).state_dict()

    for again in on_threads(2, read):
        assert again.keys() == state.keys()
        assert not [key for key in state if not torch.equal(again[key], state[key])]


class ReadsItself(nn.Module):
    """Initialises its first layer from the values of its last."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))
        with torch.no_grad():
            self.parts[0].weight.mul_(float(self.parts[1].weight.abs().max()))

    def forward(self, x: Tensor) -> Tensor:
        return self.parts(x)  # type: ignore[no-any-return]


def test_a_made_model_keeps_what_the_weights_do_not_have_and_says_so() -> None:
    """It was silent, also where no name fitted, as in a file of ``DistributedDataParallel``'s."""
    state = whole_model().state_dict()
    with pytest.warns(UserWarning, match="weights= .a mapping of 1. has no .*keep the values that the model"):
        trained(Late(), weights={"scale": state["scale"]})
    wrapped = {f"module.{key}": value for key, value in state.items()}
    for model in (Late(), Late):
        with pytest.raises(ValueError, match="none of its tensors is one of the model, whose first is"):
            trained(model, weights=wrapped)


class EachTimeOther(nn.Sequential):
    calls = 0

    def __init__(self) -> None:
        type(self).calls += 1
        super().__init__(*(nn.Linear(6, 6) for _ in range(3 + type(self).calls % 2)))


@pytest.mark.parametrize(
    ("model", "weights", "message"),
    [
        (on_meta(), None, r"on the meta device and parts.*have no values; pass a function.* or weights="),
        (
            on_meta(),
            {"parts.0.weight": torch.zeros(6, 6)},
            r"have no values, nor has weights= .*pass a function",
        ),
        (on_meta(), {"scale": torch.zeros(7)}, r"weights=.*scale has the shape \(7,\), the model's \(6,\)"),
        (on_meta(), "/no/such/file", r"weights='/no/such/file': no such file or folder"),
        (
            ReadsItself,
            None,
            r"factory reads \(in aten._local_scalar_dense.* after others were made",
        ),
    ],
)
def test_what_cannot_be_filled_is_said(model: Any, weights: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trained(model, weights=weights)


def test_a_factory_that_makes_another_model_at_every_call() -> None:
    factory = Factory(EachTimeOther)
    factory.outline()
    with pytest.raises(ValueError, match=r"EachTimeOther made \d parameters at its first call"):
        factory.partial((), torch.get_rng_state())


def test_weights_in_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the folder has none of model.safetensors.index.json"):
        Weights(tmp_path)
