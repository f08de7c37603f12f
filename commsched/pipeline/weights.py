"""Weights in files, read tensor by tensor, and written stage by stage."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_WHOLE = ("model.safetensors", "pytorch_model.bin", "model.pt")
_MAPPED = (
    256 << 20
)  # bytes read from a mapped file before it is mapped anew: the pages count as this process's


class Weights:
    """A model's tensors by name: a mapping; a file of safetensors or of ``torch.save``; or a folder with one,
    or with several and their index, as Hugging Face writes it. Nothing is read before it is asked for.
    """

    def __init__(self, source: str | Path | Mapping[str, Tensor]) -> None:
        self.source = source if isinstance(source, Mapping) else str(source)
        self._open: dict[Path, Any] = {}
        self._read = 0  # bytes, since the files were opened
        if isinstance(source, Mapping):
            self._open[Path()] = source
            self._files = dict.fromkeys(source, Path())
        else:
            self._files = self._files_of(Path(source))

    def _files_of(self, path: Path) -> dict[str, Path]:
        if path.is_dir():
            for index in filter(Path.exists, (path / name for name in _INDEXES)):
                return {
                    name: path / file for name, file in json.loads(index.read_text())["weight_map"].items()
                }
            whole = next((path / name for name in _WHOLE if (path / name).exists()), None)
            if whole is None:
                raise ValueError(
                    f"weights={str(path)!r}: the folder has none of {', '.join((*_INDEXES, *_WHOLE))}"
                )
            path = whole
        if not path.exists():
            raise ValueError(f"weights={str(path)!r}: no such file or folder")
        return dict.fromkeys(self._opened(path).keys(), path)

    def _opened(self, path: Path) -> Any:
        """The file's tensors by name; ``keys()`` and items are read as they are asked for."""
        if path not in self._open:
            if path.suffix != ".safetensors":
                self._open[path] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
            else:
                self._open[path] = _safetensors().safe_open(str(path), framework="pt")
        return self._open[path]

    def name_of(self, names: Iterable[str], prefix: str) -> str | None:
        """The name that a tensor has here, of those that it has in the model. ``prefix``: the name of the
        part of the model that files may hold alone, or may call so where the model is that part.
        """
        own = f"{prefix}." if prefix else ""
        for name in names:
            for candidate in (name, name.removeprefix(own), own + name):
                if candidate in self._files:
                    return candidate
        return None

    def __getitem__(self, name: str) -> Tensor:
        opened = self._opened(self._files[name])
        tensor: Tensor = opened[name] if isinstance(opened, Mapping) else opened.get_tensor(name)
        self._read += tensor.numel() * tensor.element_size()
        if self._read > _MAPPED and not isinstance(self.source, Mapping):
            self._open.clear()
            self._read = 0
        return tensor

    def __str__(self) -> str:
        is_mapping = isinstance(self.source, Mapping)
        return f"weights= (a mapping of {len(self._files)})" if is_mapping else f"weights={self.source!r}"


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise ValueError(
            "weights in safetensors files need the package safetensors: pip install safetensors"
        ) from error
    return safetensors


def save_shard(
    folder: Path, tensors: Mapping[str, Tensor], number: int, count: int
) -> tuple[str, dict[str, int]]:
    """Writes one of ``count`` files: its name, and the bytes of each tensor in it. A tensor with several
    names is written once.
    """
    name = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
    folder.mkdir(parents=True, exist_ok=True)
    names: dict[int, str] = {}
    for key, tensor in tensors.items():
        names.setdefault(tensor.data_ptr() or id(tensor), key)
    whole = {key: tensors[key].detach().to("cpu").contiguous() for key in names.values()}
    _safetensors().torch.save_file(whole, str(folder / name), metadata={"format": "pt"})
    return name, {key: tensor.numel() * tensor.element_size() for key, tensor in whole.items()}


def save_index(folder: Path, shards: Iterable[tuple[str, Mapping[str, int]]]) -> None:
    """Writes which tensor stands in which file."""
    files = {key: name for name, sizes in shards for key in sizes}
    total = sum(sum(sizes.values()) for _, sizes in shards)
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (folder / _INDEXES[0]).write_text(json.dumps(index, indent=2) + "\n")
