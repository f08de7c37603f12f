"""Where the parameters of a stage come from: a whole model, a factory of it, or files."""

from __future__ import annotations

import ctypes
import json
import os
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from commsched.pipeline.random_state import ONE_AT_A_TIME
from scheduler.ir.inputs import read_json, reading

# -- origins: a model that is there, or parameters that a rank makes or reads --------------------------------

WeightSource = str | Path | Mapping[str, Tensor]


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model inside of what calls it as a whole."""
    inner = getattr(model, "_orig_mod", None)
    if isinstance(inner, nn.Module):
        text = (
            "a graph of the whole model cannot be cut: its stages run as they are; compile its blocks instead"
        )
        warnings.warn(text, stacklevel=2)
        return inner
    if isinstance(model, nn.DataParallel):
        inner = model.module
        assert isinstance(inner, nn.Module)
        return inner
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError(
            "a pipeline sums the gradients of its replicas itself; pass the model without"
            " DistributedDataParallel, and mesh=(stages, replicas)"
        )
    return model


class Origin:
    """``model`` has shapes for parameters where a factory makes it, and where it came on the meta device."""

    def __init__(
        self, model: nn.Module | Sequence[nn.Module] | Make, weights: WeightSource | None = None
    ) -> None:
        self._factory: Factory | None = None
        self._weights = None if weights is None else Weights(weights)
        if isinstance(model, (nn.Module, Sequence)):
            self.model = _unwrapped(as_module(model))
        else:
            self._factory = Factory(model)
            self.model = self._factory.outline()

    @property
    def complete(self) -> bool:
        """Whether nothing is left to fill."""
        return self._weights is None and not any(t.is_meta for t in named_tensors(self.model).values())

    def fill(self, names: Collection[str], random: Tensor, device: torch.device | str | None = None) -> None:
        """Gives these parameters and buffers their values, on ``device`` (None: where they are made).
        ``random``: the state of torch's generator with which a factory begins.
        """
        tensors = named_tensors(self.model)
        read = self._names_in_weights({id(tensors[name]) for name in names})
        missing = [name for name in names if tensors[name].is_meta and id(tensors[name]) not in read]
        self._check_weights(names, tensors, read)
        made: dict[int, Tensor] = {}
        if self._factory and (missing or any(buffer.is_meta for buffer in self.model.buffers())):
            if self._weights and missing:
                text = f"{self._weights} has no {_some(missing)}: they start as the model initialises them"
                warnings.warn(text, stacklevel=2)
            made = self._made(self._factory, missing, random)
        self._put(read, made, device)
        tensors = named_tensors(self.model)
        kept = set(self.model.state_dict())
        missing = [name for name in tensors if tensors[name].is_meta and (name in names or name not in kept)]
        if missing:
            raise ValueError(
                f"the model is on the meta device and {_some(missing)} have no values"
                + (f", nor has {self._weights}" if self._weights else "")
                + "; pass a function that makes the model instead of the model"
                + ("" if self._weights else ", or weights=")
            )

    def _check_weights(
        self, names: Collection[str], tensors: Mapping[str, Tensor], read: Mapping[int, str]
    ) -> None:
        if self._weights is None:
            return
        if not self._names_in_weights({id(tensor) for tensor in tensors.values()}):
            raise ValueError(
                f"{self._weights}: none of its tensors is one of the model, whose first is"
                f" {next(iter(tensors))}"
            )
        kept = set(self.model.state_dict()).intersection(names)
        own = [name for name in kept if not tensors[name].is_meta and id(tensors[name]) not in read]
        if own:
            text = f"{self._weights} has no {_some(sorted(own))}: they keep the values that the model has"
            warnings.warn(text, stacklevel=3)

    def _names_in_weights(self, wanted: Collection[int]) -> dict[int, str]:
        """By id of a tensor its name in the weights, for those that are there."""
        if self._weights is None:
            return {}
        names: dict[int, list[str]] = {}
        for name, tensor in named_tensors(self.model).items():
            names.setdefault(id(tensor), []).append(name)
        prefix = getattr(self.model, "base_model_prefix", "")
        found = {key: self._weights.name_of(names[key], prefix) for key in wanted}
        return {key: name for key, name in found.items() if name is not None}

    def _made(self, factory: Factory, names: Collection[str], random: Tensor) -> dict[int, Tensor]:
        """By id, these parameters and all buffers as the factory makes them."""
        made, outline = named_tensors(factory.partial(names, random)), named_tensors(self.model)
        buffers = {name for name, _ in self.model.named_buffers(remove_duplicate=False)}
        return {id(outline[name]): made[name] for name in {*names, *buffers}}

    @torch.no_grad()
    def _put(
        self, read: Mapping[int, str], made: Mapping[int, Tensor], device: torch.device | str | None
    ) -> None:
        new: dict[int, Tensor] = {}
        for owned in [d for m in self.model.modules() for d in (m._parameters, m._buffers)]:
            for key, old in owned.items():
                if old is None or (id(old) not in new and id(old) not in read and id(old) not in made):
                    continue
                if id(old) not in new:
                    value = self._value(old, read[id(old)]) if id(old) in read else made[id(old)]
                    new[id(old)] = _filled(old, value, device)
                owned[key] = new[id(old)]  # type: ignore[assignment]

    def _value(self, old: Tensor, name: str) -> Tensor:
        assert self._weights is not None
        value = self._weights[name]
        if value.shape != old.shape:
            raise ValueError(
                f"{self._weights}: {name} has the shape {tuple(value.shape)}, the model's {tuple(old.shape)}"
            )
        return torch.empty_like(old, device="cpu" if old.is_meta else old.device).copy_(value)


def _filled(old: Tensor, value: Tensor, device: torch.device | str | None) -> Tensor:
    """A tensor that is there gets the value; a shape is replaced by it."""
    if not old.is_meta:
        return old.copy_(value)
    value = value.detach().to(device or value.device)
    if not isinstance(old, nn.Parameter):
        return value
    parameter = nn.Parameter(value, old.requires_grad)
    parameter.__dict__.update(old.__dict__)
    return parameter


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers; those with several names under each of them."""
    parameters = model.named_parameters(remove_duplicate=False)
    return dict([*parameters, *model.named_buffers(remove_duplicate=False)])


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


# -- factories of models that no rank holds whole ------------------------------------------------------------

# A rank keeps the parameters of its own stages.
#
# The factory runs twice. The first time every parameter becomes a shape (a tensor on the meta device) as soon
# as a module registers it; that is enough to cut the model. The second time everything is computed as in one
# process, but the memory of other stages' parameters is given back as soon as the next one is made. So a kept
# parameter starts with the values that it has in one process, whatever random numbers were drawn before.

Make = Callable[[], nn.Module | Sequence[nn.Module]]

_COPIES = (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default)
_FILLS = (
    "bernoulli_ cauchy_ copy_ exponential_ fill_ geometric_ log_normal_ normal_ random_ uniform_ zero_"
).split()


def as_module(model: nn.Module | Sequence[nn.Module]) -> nn.Module:
    """A list of modules as one that calls them one after the other."""
    return model if isinstance(model, nn.Module) else nn.Sequential(*model)


class Factory:
    """A function without arguments that makes a model, the same at every call but for random numbers."""

    def __init__(self, make: Make) -> None:
        self._make = make
        self._first: _Construction | None = None
        self._numbers: dict[str, int] = {}

    def outline(self) -> nn.Module:
        """The model with shapes for parameters. Random generators stay where they are."""
        try:
            model, self._first = self._run(_Outline())
        except (NotImplementedError, RuntimeError):  # the factory computes with a parameter's values
            model, self._first = self._run(_Partial(frozenset()))
            _empty(model, self._first)
        self._numbers = {
            name: number
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if (number := self._first.number(parameter)) is not None
        }
        return model

    def partial(self, names: Collection[str], random: Tensor) -> nn.Module:
        """The model in which the parameters of these names have values; ``random``: the state of torch's
        generator at its start.
        """
        assert self._first is not None, "outline() comes first"
        wanted = {self._numbers[name] for name in names if name in self._numbers}
        for copy in sorted(self._first.sources, reverse=True):
            wanted |= {self._first.sources[copy]} if copy in wanted else set()
        model, second = self._run(_Partial(frozenset(wanted)), random)
        if second.shapes != self._first.shapes:
            raise ValueError(
                f"the factory of {type(model).__name__} made {len(self._first.shapes)} parameters at its"
                f" first call and {len(second.shapes)}, or others, at the second; it must make the same model"
                " at every call"
            )
        return model

    def _run(
        self, construction: _Construction, random: Tensor | None = None
    ) -> tuple[nn.Module, _Construction]:
        # nn.Module.register_parameter is exchanged for the whole process, too.
        with ONE_AT_A_TIME, giving_back_large_blocks():
            before = torch.get_rng_state()
            if random is not None:
                torch.set_rng_state(random)
            try:
                with construction.registering():
                    return as_module(self._make()), construction
            finally:
                if random is None:
                    torch.set_rng_state(before)


def _empty(model: nn.Module, made: _Construction) -> None:
    """Replaces the numbered parameters by shapes."""
    shapes: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and (number := made.number(parameter)) is not None:
                if id(parameter) not in shapes:
                    shapes[id(parameter)] = as_shape(parameter)
                    made.take(shapes[id(parameter)], number)
                module._parameters[name] = shapes[id(parameter)]


def as_shape(parameter: nn.Parameter) -> nn.Parameter:
    shape = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    shape.__dict__.update(parameter.__dict__)
    return shape


class _Construction(TorchDispatchMode):
    """While it is active, the memory of every parameter that a module registers gets a number, and so does a
    copy of such memory (``sources``: of a copy's number what was copied). Numbers are alike in every run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[torch.Size, torch.dtype]] = []
        self.sources: dict[int, int] = {}
        self._numbers: dict[int, int] = {}  # by address of a storage
        self._storages: list[torch.UntypedStorage] = []  # while they are here, their addresses stay theirs

    def number(self, tensor: Tensor) -> int | None:
        return self._numbers.get(tensor.untyped_storage()._cdata)

    def take(self, tensor: Tensor, number: int) -> None:
        self._storages.append(tensor.untyped_storage())
        self._numbers[self._storages[-1]._cdata] = number

    def new(self, tensor: Tensor, source: int | None = None) -> int:
        number = len(self.shapes)
        self.shapes.append((tensor.shape, tensor.dtype))
        if source is not None:
            self.sources[number] = source
        self.take(tensor, number)
        return number

    def registered(self, parameter: nn.Parameter) -> nn.Parameter:
        """What a module gets instead of a parameter."""
        raise NotImplementedError

    @contextmanager
    def registering(self) -> Iterator[None]:
        register, thread = nn.Module.register_parameter, threading.get_ident()

        def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
            if threading.get_ident() == thread and type(parameter) is nn.Parameter:
                parameter = self.registered(parameter)
            register(module, name, parameter)

        nn.Module.register_parameter = registered  # type: ignore[method-assign, assignment]
        try:
            with self:
                yield
        finally:
            nn.Module.register_parameter = register  # type: ignore[method-assign]


class _Outline(_Construction):
    """All parameters are shapes."""

    def __init__(self) -> None:
        super().__init__()
        self._shape_of: dict[int, nn.Parameter] = {}
        self._replaced: list[nn.Parameter] = []

    def registered(self, parameter: nn.Parameter) -> nn.Parameter:
        if self.number(parameter) is not None:
            return parameter
        if id(parameter) not in self._shape_of:
            self._replaced.append(parameter)
            self._shape_of[id(parameter)] = as_shape(parameter)
            self.new(self._shape_of[id(parameter)])
        return self._shape_of[id(parameter)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        source = self.number(args[0]) if func in _COPIES else None
        if source is None:
            return func(*args, **kwargs)
        if "device" in kwargs:  # a shape stays one on every device
            kwargs = {**kwargs, "device": torch.device("meta")}
        result = func(*args, **kwargs)
        self.new(result, source)
        return result


class _Partial(_Construction):
    """All parameters are computed; those not ``kept`` have memory only from when they are used until others
    are. Then their values are lost; so is what is computed from lost values, which nothing kept may be.
    """

    def __init__(self, kept: frozenset[int]) -> None:
        super().__init__()
        self.kept = kept
        self._valid: dict[
            int, bool
        ] = {}  # of those not kept that have memory: whether they have their values
        self._sizes: dict[int, int] = {}
        self._lost_results: dict[int, StorageWeakRef] = {}

    def registered(self, parameter: nn.Parameter) -> nn.Parameter:
        if self.number(parameter) is None:
            self._use({self.new(parameter): True})
        return parameter

    @contextmanager
    def registering(self) -> Iterator[None]:
        try:
            with super().registering():
                yield
        except BaseException:
            for number, size in self._sizes.items():  # printing a tensor without memory ends the process
                self._storages[number].resize_(size)
            raise

    def _use(self, valid: dict[int, bool]) -> None:
        """Gives memory to these parameters, and takes it from all others. ``valid``: whether they have their
        values then.
        """
        valid = {number: is_valid for number, is_valid in valid.items() if number not in self.kept}
        if not valid:
            return
        for number in self._valid.keys() - valid.keys():
            self._storages[number].resize_(0)
        for number in valid:
            size = self._sizes.setdefault(number, self._storages[number].nbytes())
            if self._storages[number].nbytes() != size:  # resize_ copies even to the same size
                self._storages[number].resize_(size)
        self._valid = valid

    def _is_lost(self, tensor: Tensor) -> bool:
        number = self.number(tensor)
        if number is not None:
            return number not in self.kept and not self._valid.get(number, False)
        reference = self._lost_results.get(tensor.untyped_storage()._cdata)
        return reference is not None and not reference.expired()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        target = args[0] if _name(func) in _FILLS else kwargs.get("out")
        lost = [x for x in tensors if x is not target and self._is_lost(x)]
        self._use({n: self._valid.get(n, False) for x in tensors if (n := self.number(x)) is not None})
        result = func(*args, **kwargs)
        if func.is_view:
            return result
        for out in [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)] + [target]:
            self._made(func, out, target, lost)
        if func in _COPIES and (source := self.number(args[0])) is not None:
            self._use({source: self._valid.get(source, False), self.new(result, source): not lost})
        elif lost and not isinstance(result, (Tensor, tuple, list)):
            raise _reads_lost(func, lost[0])
        return result

    def _made(self, func: Any, out: Tensor | None, target: Tensor | None, lost: list[Tensor]) -> None:
        """Remembers whether a tensor that an operation has written has its values."""
        if out is None:
            return
        number = self.number(out)
        if number in self.kept and lost:
            raise _reads_lost(func, lost[0])
        if number in self._valid:
            whole = out.numel() * out.element_size() == self._sizes[number]
            filled = out is target and whole
            self._valid[number] = not lost and (filled or self._valid[number])
        elif number is None and lost:
            storage = out.untyped_storage()
            self._lost_results[storage._cdata] = StorageWeakRef(storage)


def _name(func: Any) -> str:
    return str(func._schema.name).removeprefix("aten::")


def _reads_lost(func: Any, tensor: Tensor) -> ValueError:
    return ValueError(
        f"the model's factory reads (in {func}) a parameter, or what was made of it, of shape"
        f" {tuple(tensor.shape)} after others were made, and this rank does not hold it; initialise each"
        " parameter at once, or pass a made model"
    )


# -- weights in files, read tensor by tensor, and written stage by stage -------------------------------------

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
                with reading(index):
                    return {name: path / file for name, file in read_json(index)["weight_map"].items()}
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
    names: dict[Any, str] = {}
    for key, tensor in tensors.items():  # a buffer may be the first rows of another
        where = tensor.data_ptr() or id(tensor)
        names.setdefault((where, tensor.shape, tensor.stride(), tensor.dtype), key)
    whole, begun = {}, set[int]()
    for (where, *_), key in names.items():
        value = tensors[key].detach().to("cpu").contiguous()
        whole[key] = value.clone() if where in begun else value  # a file has each tensor's memory once
        begun.add(where)
    _safetensors().torch.save_file(whole, str(folder / name), metadata={"format": "pt"})
    return name, {key: tensor.numel() * tensor.element_size() for key, tensor in whole.items()}


def save_index(folder: Path, shards: Iterable[tuple[str, Mapping[str, int]]]) -> None:
    """Writes which tensor stands in which file."""
    files = {key: name for name, sizes in shards for key in sizes}
    total = sum(sum(sizes.values()) for _, sizes in shards)
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (folder / _INDEXES[0]).write_text(json.dumps(index, indent=2) + "\n")


# -- freed memory: while a model is made it goes back to the system, in training it stays --------------------

# A pipeline allocates and frees the same activations for every micro-batch. glibc gives memory at the heap's
# end back to the system as soon as some megabytes of it are free, and gets it again page by page, as it does
# with every large block: thousands of page faults a step, which cost more than all of the pipeline's own
# work.

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # of mallopt(3)
_NEVER, _NONE = -1, 0  # give nothing back; map no block by itself, which is gone when it is freed
_LARGE, _MANY = 1 << 18, 1 << 16  # map blocks from this size on by themselves; this many is glibc's default
_THEIRS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES")


@cache
def keep_freed_memory() -> bool:
    """Whether the process keeps what it frees from now on: not without glibc, nor where the user's own
    variables say something else.
    """
    return _set(_TRIM_THRESHOLD, _NEVER) and _set(_MMAP_MAX, _NONE)


@contextmanager
def giving_back_large_blocks() -> Iterator[None]:
    """Meanwhile large blocks are mapped by themselves. In the heap, parameters that are kept would lie
    between freed ones, whose memory would stay.
    """
    keeps = keep_freed_memory.cache_info().currsize > 0
    _set(_MMAP_THRESHOLD, _LARGE)
    _set(_MMAP_MAX, _MANY)
    try:
        yield
    finally:
        if keeps:
            _set(_MMAP_MAX, _NONE)


def _set(option: int, value: int) -> bool:
    if any(name in os.environ for name in _THEIRS):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(option, value))
