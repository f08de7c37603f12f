"""Training of spatial models on image files, by epochs: MPI4DL's --app 1 and 2 with --datapath."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import TensorDataset

from commsched.pipeline.job import Data
from commsched.training import images, measures
from dnn_bench.spatial.options import Plan

MEDICAL, CIFAR, SYNTHETIC = 1, 2, 3


def data_of(plan: Plan) -> Data:
    """Of --app and --datapath: folders of classes, or masks for a U-Net; or CIFAR-10's files."""
    o, root = plan.options, Path(plan.options.datapath)
    if o.app == CIFAR:
        train, test = (cifar(root, part, o.image_size) for part in ("train", "test"))
        return Data(train, test, measures.classes(F.cross_entropy))
    if o.model == "unet":
        parts = [images.ImagesWithMasks(root / part, o.image_size) for part in ("train", "val")]
        found = parts[0].classes()
        scored = measures.masks(F.cross_entropy, o.num_classes, images.IGNORED)
    else:
        first = images.ClassFolders(root / "train", o.image_size)
        parts = [first, images.ClassFolders(root / "val", o.image_size, first.names)]  # type: ignore[list-item]
        found, scored = len(first.names), measures.classes(F.cross_entropy)
    if found > o.num_classes:
        raise ValueError(
            f"{root} has {found} classes, and the model {o.num_classes}; use --num-classes {found}"
        )
    return Data(parts[0], parts[1], scored)


def cifar(root: Path, part: str, size: int) -> TensorDataset:
    """CIFAR-10 as its page has it for Python: data_batch_1 to 5, test_batch; scaled to ``size`` pixels."""
    pattern = "data_batch_*" if part == "train" else "test_batch"
    folders = [root, root / "cifar-10-batches-py"]
    files = [path for folder in folders for path in sorted(folder.glob(pattern))]
    if not files:
        raise ValueError(f"{root} has no {pattern} of CIFAR-10 (cifar-10-python.tar.gz, unpacked)")
    pixels, labels = [], []
    for path in files:
        with path.open("rb") as file:
            found: dict[bytes, Any] = pickle.load(file, encoding="bytes")
        pixels.append(torch.as_tensor(found[b"data"]).view(-1, 3, 32, 32))
        labels += found[b"labels"]
    whole: Tensor = torch.cat(pixels).float() / 255
    mean, deviation = (torch.tensor(values).view(3, 1, 1) for values in (images.MEAN, images.DEVIATION))
    whole = (whole - mean) / deviation
    if size != whole.shape[-1]:
        whole = F.interpolate(whole, size=(size, size), mode="bilinear", antialias=True)
    return TensorDataset(whole, torch.tensor(labels))


def train(plan: Plan, stages: list[Any], placements: list[Any]) -> dict[str, Any]:
    """Train for --num-epochs; the figures of all epochs."""
    from commsched.pipeline import Chain, Pipeline
    from commsched.training.loop import Settings, Training

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
        tile_options={"overlap": o.overlap, "fuse_halo": o.fused_layers if o.halo_D2 else "off"},
    )
    settings = Settings(
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
