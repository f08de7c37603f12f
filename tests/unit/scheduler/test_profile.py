"""Profiles: what may stand in one, files, and those that are shipped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scheduler import profiles
from scheduler.ir.profile import Layer, Profile


def example() -> Profile:
    return Profile("small", (Layer("a", 1.0, 2.0, 8, 4, 0.5), Layer("b", 0.5, 1.5, 0)), 1e-9, "made up")


def test_files_round_trip(tmp_path: Path) -> None:
    example().save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == example()
    assert profiles.find(str(tmp_path / "p.json")) == example()


def test_sums() -> None:
    assert example().compute == 5.0
    assert example().total_bytes == 8


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("forward", -1.0),
        ("forward", float("nan")),
        ("backward", float("inf")),
        ("backward", "1"),
        ("bytes", -4),
        ("bytes", 1.5),
        ("bytes", True),
        ("activation_bytes", -1),
        ("weight_backward", 3.0),
    ],
)
def test_bad_number_names_file_field_and_value(tmp_path: Path, field: str, value: Any) -> None:
    path = tmp_path / "p.json"
    data = example().to_dict()
    data["layers"][0][field] = value
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError) as error:
        Profile.load(path)
    for part in (str(path), field, repr(value) if isinstance(value, str) else str(value)):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": []}, "has no layers"),
        ({"layers": "x"}, "layers: must be a list, got 'x'"),
        ({"layers": [3]}, r"layers\[0\]: must be an object, got 3"),
        (
            {"layers": [{"name": "a", "forward": 1, "backward": 1}]},
            r"layers\[0\]: missing fields \['bytes'\]",
        ),
        (
            {"layers": [{"name": "a", "forward": 1, "backward": 1, "bytes": 1, "size": 2}]},
            r"unknown fields \['size'\]",
        ),
        ({"format": 0}, "field 'format' is 0"),
        (
            {"layers": [{"name": "a", "forward": 1, "backward": 1, "bytes": 1, "fixed": 1.5}]},
            "layer 'a': fixed is a part, 0 to 1, got 1.5",
        ),
        ({"update_per_byte": -1}, "update_per_byte must be a finite number of at least 0"),
        ({"traffic_per_byte": -1}, "traffic_per_byte must be a finite number of at least 0"),
    ],
)
def test_bad_file(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps({**example().to_dict(), **change}))
    with pytest.raises(ValueError, match=message) as error:
        Profile.load(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("content", [b"", b'{"format": 1, "layers": [', b"\xff\xfe\x00"])
def test_damaged_json_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{path}: is not valid JSON"):
        Profile.load(path)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing.json: cannot be read"):
        Profile.load(tmp_path / "nothing.json")


# Parameters of the published models (torchvision's resnet50, vgg16, densenet201; BERT base without a head;
# GPT-2 small).
PUBLISHED = {
    "resnet50": 25_557_032,
    "vgg16": 138_357_544,
    "densenet201": 20_013_928,
    "bert_base": 109_482_240,
    "gpt2": 124_439_808,
}


def test_shipped_profiles_are_complete() -> None:
    assert profiles.names() == sorted(PUBLISHED)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_shipped_profile(name: str) -> None:
    """The real parameter count."""
    profile = profiles.shipped(name)
    assert profile.total_bytes == 4 * PUBLISHED[name]
    assert "FLOP model" in profile.source


def test_flop_model_by_hand() -> None:
    """1 image, 3 -> 4 channels, 2 x 2 kernel, 5 x 5 outputs, at 1 flop/s and endless bandwidth."""
    table = profiles.LayerTable(profiles.Device("slow", 1.0, 1e30, 0.0))
    table.linear("before", 1, 1, 1)
    table.conv("conv", 3, 4, 2, side=5, batch=1)
    layer = table.layers[1]
    assert layer.bytes == 4 * 3 * 4 * 2 * 2
    assert layer.forward == 2 * 3 * 4 * 2 * 2 * 25
    assert (layer.backward, layer.weight_backward) == (2 * layer.forward, layer.forward)


def test_unknown_name_lists_the_shipped() -> None:
    with pytest.raises(ValueError, match="no profile 'alexnet'; the shipped profiles are bert_base"):
        profiles.find("alexnet")
