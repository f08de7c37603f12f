"""Models for very large images as lists of cells, and their training on image files.

Each cell takes and returns a tensor or a tuple.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from commsched.pipeline.job import Data
from commsched.training import data_jobs, images
from dnn_bench.models.convolutional import DEPTHS, ResNet, conv_norm_relu
from dnn_bench.spatial.options import StagePlan
from scheduler.ir.inputs import InputError, reading

Values = tuple[Tensor, ...]
# What pickles of arrays name.
ARRAYS = {("numpy.core.multiarray", "_reconstruct"), ("numpy", "ndarray"), ("numpy", "dtype")}


class Head(nn.Module):
    """Classes, from the newest of the values."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, classes)

    def forward(self, values: Tensor | Values) -> Tensor:
        x = values if isinstance(values, Tensor) else values[-1]
        return self.linear(F.adaptive_avg_pool2d(x, 1).flatten(1))


def resnet(layers: int, filters: int, classes: int) -> list[nn.Module]:
    """He et al. 2015: a stem, a cell for each residual block, a head."""
    if layers not in DEPTHS:
        raise ValueError(f"a ResNet has {', '.join(map(str, DEPTHS))} layers, not {layers}; set --num-layers")
    whole = ResNet(layers, classes, filters)
    stem = nn.Sequential(whole.stem, nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
    return [stem, *whole.blocks, Head(whole.head.in_features, classes)]


class AmoebaStem(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = conv_norm_relu(3, channels, 3, 2)

    def forward(self, image: Tensor) -> Values:
        x = self.conv(image)
        return x, x


class AmoebaCell(nn.Module):
    """A cell of AmoebaNet-D (Real et al. 2019): five pairs of operations, the unused sums concatenated.

    A reduction cell halves the image; the older input is then reduced by two shifted 1x1 convolutions. Takes
    the last two values and returns the newer of them and its own.
    """

    def __init__(
        self, c_older: int, c_newer: int, channels: int, reduction: bool, older_is_larger: bool
    ) -> None:
        super().__init__()
        stride = 2 if reduction else 1
        self.older_is_larger = older_is_larger
        if older_is_larger:
            halves = (channels // 2, channels - channels // 2)
            self.shrink = nn.ModuleList([nn.Conv2d(c_older, half, 1, 2) for half in halves])
        else:
            self.older = conv_norm_relu(c_older, channels, 1)
        self.newer = conv_norm_relu(c_newer, channels, 1)
        self.ops = nn.ModuleList(
            [
                nn.AvgPool2d(3, stride, 1, count_include_pad=False),
                nn.MaxPool2d(3, stride, 1),
                conv_norm_relu(channels, channels, 3, stride),
                nn.Sequential(
                    conv_norm_relu(channels, channels, (1, 7), stride),
                    conv_norm_relu(channels, channels, (7, 1)),
                ),
                nn.MaxPool2d(2, stride, ceil_mode=True) if reduction else nn.Identity(),
            ]
        )

    def forward(self, values: Values) -> Values:
        older, newer = values
        if self.older_is_larger:
            shifted = F.pad(older, (0, 1, 0, 1))[:, :, 1:, 1:]
            x = torch.cat([self.shrink[0](older), self.shrink[1](shifted)], 1)
        else:
            x = self.older(older)
        y = self.newer(newer)
        average, maximum, square, cross, last = self.ops
        a = average(x) + maximum(y)
        b = square(y) + cross(x)
        return newer, torch.cat([a, b, last(y) + square(x)], 1)


def amoebanet(layers: int, filters: int, classes: int) -> list[nn.Module]:
    """A stem, three runs of normal cells with a reduction cell between them, a head."""
    if layers < 3:
        raise ValueError(f"an AmoebaNet has at least 3 layers (normal cells), not {layers}")
    cells: list[nn.Module] = [AmoebaStem(filters)]
    older, newer, larger, channels = filters, filters, False, filters
    for run in range(3):
        kinds = ([True] if run else []) + [False] * (layers // 3 + (run < layers % 3))
        for reduction in kinds:
            channels *= 2 if reduction else 1
            cells.append(AmoebaCell(older, newer, channels, reduction, larger))
            older, newer, larger = newer, 3 * channels, reduction
    return [*cells, Head(newer, classes)]


def two(c_in: int, c_out: int) -> nn.Sequential:
    return nn.Sequential(conv_norm_relu(c_in, c_out, 3), conv_norm_relu(c_out, c_out, 3))


class Down(nn.Module):
    """One level of a U-Net's way down: halves the image, unless it is the last, and remembers what it was."""

    def __init__(self, c_in: int, c_out: int, last: bool = False) -> None:
        super().__init__()
        self.block, self.last = two(c_in, c_out), last

    def forward(self, values: Tensor | Values) -> Values:
        x, skips = _split(values)
        y = self.block(x)
        return (y, *skips) if self.last else (F.max_pool2d(y, 2), *skips, y)


class Up(nn.Module):
    """One level of the way up: doubles the image and joins what was remembered, padded to fit odd sizes."""

    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(c_in, c_out, 2, 2)
        self.block = two(2 * c_out, c_out)

    def forward(self, values: Values) -> Tensor | Values:
        x, skips = _split(values)
        x, skip = self.up(x), skips[-1]
        rows, columns = skip.size(2) - x.size(2), skip.size(3) - x.size(3)
        x = F.pad(x, [columns // 2, columns - columns // 2, rows // 2, rows - rows // 2])
        x = self.block(torch.cat([skip, x], dim=1))
        return (x, *skips[:-1]) if len(skips) > 1 else x


def unet(layers: int, filters: int, classes: int) -> list[nn.Module]:
    """Ronneberger et al. 2015, padded: ``layers`` levels down and up; a class for every pixel."""
    if layers < 1:
        raise ValueError(f"a U-Net has at least 1 level, not {layers}")
    widths = [filters << level for level in range(layers + 1)]
    downs = [Down(c_in, c_out) for c_in, c_out in zip([3, *widths], widths[:-1])]
    ups = [Up(c_in, c_out) for c_in, c_out in zip(widths[:0:-1], widths[-2::-1])]
    return [*downs, Down(widths[-2], widths[-1], last=True), *ups, nn.Conv2d(filters, classes, 1)]


def _split(values: Tensor | Values) -> tuple[Tensor, Values]:
    return (values, ()) if isinstance(values, Tensor) else (values[0], values[1:])


MODELS: dict[str, Callable[[int, int, int], list[nn.Module]]] = {
    "resnet": resnet,
    "amoebanet": amoebanet,
    "unet": unet,
}


def target_of(model: str, images: tuple[int, ...], classes: int, generator: torch.Generator) -> Tensor:
    """Random labels: one per image, or one per pixel for a U-Net."""
    shape = (images[0], *images[2:]) if model == "unet" else images[:1]
    return torch.randint(0, classes, shape, generator=generator)


def cut_stages(cells: list[nn.Module], balance: list[int]) -> list[nn.Module]:
    if sum(balance) != len(cells) or min(balance) < 1:
        raise ValueError(
            f"--balance {','.join(map(str, balance))} must share out the {len(cells)} cells of the model,"
            " at least one for each stage"
        )
    starts = [sum(balance[:number]) for number in range(len(balance))]
    return [nn.Sequential(*cells[start : start + count]) for start, count in zip(starts, balance)]


def even_balance(cells: int, stages: int) -> list[int]:
    if not 1 <= stages <= cells:
        raise ValueError(f"a model of {cells} cells has 1 to {cells} stages, not {stages}; set --split-size")
    return [cells * (number + 1) // stages - cells * number // stages for number in range(stages)]


# -- training on image files, by epochs: MPI4DL's --app 1 and 2 with --datapath ------------------------------

MEDICAL, CIFAR, SYNTHETIC = 1, 2, 3


def data_of(plan: StagePlan) -> Data:
    """Of --app and --datapath: folders of classes, or masks for a U-Net; or CIFAR-10's files."""
    o, root = plan.options, Path(plan.options.datapath)
    if o.app == CIFAR:
        train, test = (cifar(root, part, o.image_size) for part in ("train", "test"))
        return Data(train, test, data_jobs.classes(F.cross_entropy))
    if o.model == "unet":
        parts = [images.ImagesWithMasks(root / part, o.image_size) for part in ("train", "val")]
        classes = parts[0].classes()
        scored = data_jobs.masks(F.cross_entropy, o.num_classes, images.IGNORED)
    else:
        first = images.ClassFolders(root / "train", o.image_size)
        parts = [first, images.ClassFolders(root / "val", o.image_size, first.names)]  # type: ignore[list-item]
        classes, scored = len(first.names), data_jobs.classes(F.cross_entropy)
    if classes > o.num_classes:
        raise ValueError(
            f"{root} has {classes} classes, and the model {o.num_classes}; use --num-classes {classes}"
        )
    return Data(parts[0], parts[1], scored)


class _Arrays(pickle.Unpickler):
    """Reads arrays and plain values only: what else a pickle names would run."""

    def find_class(self, module: str, name: str) -> Any:
        if (module.replace("._core", ".core"), name) not in ARRAYS:
            raise InputError(f"it names {module}.{name}; a batch of CIFAR-10 has arrays and lists")
        return super().find_class(module, name)


def cifar(root: Path, part: str, size: int) -> TensorDataset:
    """CIFAR-10 as its page has it for Python: data_batch_1 to 5, test_batch; scaled to ``size`` pixels."""
    pattern = "data_batch_*" if part == "train" else "test_batch"
    folders = [root, root / "cifar-10-batches-py"]
    files = [path for folder in folders for path in sorted(folder.glob(pattern))]
    if not files:
        raise ValueError(f"{root} has no {pattern} of CIFAR-10 (cifar-10-python.tar.gz, unpacked)")
    pixels, labels = [], []
    for path in files:
        with reading(path), path.open("rb") as file:
            try:
                content: Any = _Arrays(file, encoding="bytes").load()
                pixels.append(torch.as_tensor(content[b"data"]).view(-1, 3, 32, 32))
                labels += content[b"labels"]
            except (pickle.UnpicklingError, EOFError, RuntimeError) as error:
                raise InputError(f"{path}: is no batch of CIFAR-10 ({error})") from None
    whole: Tensor = torch.cat(pixels).float() / 255
    mean, deviation = (torch.tensor(values).view(3, 1, 1) for values in (images.MEAN, images.DEVIATION))
    whole = (whole - mean) / deviation
    if size != whole.shape[-1]:
        whole = F.interpolate(whole, size=(size, size), mode="bilinear", antialias=True)
    return TensorDataset(whole, torch.tensor(labels))


def train(plan: StagePlan, stages: list[Any], placements: list[Any]) -> dict[str, Any]:
    """Train for --num-epochs; the figures of all epochs."""
    from commsched.pipeline import Chain, Pipeline
    from commsched.training.loop import Training, TrainingSettings

    o = plan.options
    data = data_of(plan)
    pipeline = Pipeline(
        Chain(stages, elements=True),
        "1f1b",
        plan.microbatches,
        (len(placements), o.replicas),
        loss=F.cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=o.learning_rate, momentum=0.9),
        cuts=range(len(placements)),
        placements=placements,
        mirrored=plan.mirrored,
        tile_options={"overlap": o.overlap},
    )
    settings = TrainingSettings(
        rows=plan.images,
        epochs=o.num_epochs,
        evaluate=o.enable_evaluation,
        workers=o.num_workers,
        seed=o.seed,
        checkpoint=Path(o.checkpoint) if o.checkpoint else None,
        every=o.checkpoint_every,
    )
    epochs = Training(pipeline, data, settings).run()
    state = pipeline.state_dict()
    if o.save and pipeline.rank == 0:
        torch.save(state, o.save)
    pipeline.close()
    return {"ranks": plan.ranks, "epochs": epochs}
