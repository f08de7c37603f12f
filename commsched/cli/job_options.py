"""Options that name a job: a function of the user's, or one of the ready jobs on files."""

from __future__ import annotations

import argparse
import ast
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from commsched.pipeline.job import Job

READY = ("images", "text", "masks")


def add_job(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--job",
        required=True,
        metavar="JOB",
        help="MODULE:FUNCTION, which returns (model, loss, batches[, optimizer[, data]]) and batches(rows)"
        " yields batches; or images (classes of images), text (classes of sentences), masks (classes of"
        " pixels), which need --data and --model",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and of the order of rows")
    parser.add_argument(
        "--device",
        default="cpu",
        metavar="DEVICE",
        help="where the model computes: cpu, cuda (each rank of a host its own GPU), or one such as cuda:1",
    )
    parser.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="threads of a rank on the CPU (default: OMP_NUM_THREADS, else the cores divided by the ranks of"
        " the host)",
    )
    ready = parser.add_argument_group("ready jobs")
    add = ready.add_argument
    add(
        "--data",
        type=Path,
        metavar="PATH",
        help="images: folder with train/CLASS/*.png and val/CLASS/*.png; text: .tsv or .csv file with a"
        " header, or folder with train.tsv and dev.tsv; masks: folder with images/NAME.png and"
        " masks/NAME.png, or such folders in train and val",
    )
    add(
        "--model",
        metavar="MODULE:FUNCTION",
        help="function that makes the model; it gets num_classes and, for text, vocab_size if it takes them",
    )
    add("--model-args", default="", metavar="NAME=VALUE,...", help="further arguments of the function")
    add("--image-size", type=int, default=224, metavar="N", help="pixels a side")
    add("--classes", type=int, metavar="N", help="masks: classes (default: as in the masks)")
    add("--length", type=int, default=64, metavar="N", help="text: words of a row")
    add("--vocabulary", type=int, default=8000, metavar="N", help="text: most frequent words to know")
    add(
        "--columns",
        default="",
        metavar="A,B,LABEL",
        help="text: columns of one or two texts and of the label (default: as QQP, MNLI, SST-2, ...)",
    )


def job_of(arguments: argparse.Namespace) -> Job:
    """The job that the options name; its model has random weights of --seed, and is on --device."""
    _set_threads(arguments)
    job = _job_of(arguments)
    job.model.to(device_of(arguments))
    return job


def device_of(arguments: argparse.Namespace) -> torch.device:
    """The device of this rank."""
    import torch

    device = torch.device(arguments.device)
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise ValueError(f"--device {arguments.device}: torch {torch.__version__} sees no GPU here")
    return device if device.index is not None else torch.device("cuda", _place(arguments)[0])


def _set_threads(arguments: argparse.Namespace) -> None:
    import torch

    wanted = arguments.threads
    if wanted is not None and wanted < 1:
        raise ValueError(f"--threads must be at least 1, got {wanted}")
    if wanted is not None or "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(wanted or max(1, len(os.sched_getaffinity(0)) // _place(arguments)[1]))


def _place(arguments: argparse.Namespace) -> tuple[int, int]:
    """This rank among those of its host, and how many they are."""
    from commsched.process.launch import detect_launch

    if (
        getattr(arguments, "rank", None) is not None
    ):  # without a launcher: each host's ranks are its own affair
        return (arguments.rank if arguments.local_rank is None else arguments.local_rank), 1
    launch = detect_launch(os.environ, os.environ.get("COMMSCHED_LAUNCHER", ""))
    return launch.local_rank, launch.local_size


def _job_of(arguments: argparse.Namespace) -> Job:
    from commsched.pipeline.job import load_function, load_job

    if arguments.job not in READY:
        if arguments.data or arguments.model:
            raise ValueError(
                f"--data and --model belong to the jobs {', '.join(READY)}; --job {arguments.job} brings its"
                " own"
            )
        return load_job(arguments.job)
    if not arguments.data or not arguments.model:
        raise ValueError(f"--job {arguments.job} needs --data PATH and --model MODULE:FUNCTION")
    from commsched.training import data_jobs

    model = partial(load_function(arguments.model, "--model"), **_model_arguments(arguments.model_args))
    if arguments.job == "images":
        return data_jobs.image_classes(arguments.data, model, arguments.image_size)
    if arguments.job == "masks":
        return data_jobs.image_masks(arguments.data, model, arguments.image_size, arguments.classes)
    columns = [name.strip() for name in arguments.columns.split(",") if name]
    return data_jobs.sentence_classes(arguments.data, model, arguments.length, arguments.vocabulary, columns)


def _model_arguments(text: str) -> dict[str, Any]:
    """``width=16,name=resnet_tiny``: numbers and other literals of Python, else text."""
    found: dict[str, Any] = {}
    for pair in filter(None, text.split(",")):
        name, sign, value = pair.partition("=")
        if not sign or not name.strip().isidentifier():
            raise ValueError(f"--model-args must look like width=16,name=small, got {text!r}")
        try:
            found[name.strip()] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[name.strip()] = value
    return found


def name_of(arguments: argparse.Namespace) -> str:
    """The job's name for profiles and results."""
    return str(arguments.job).rpartition(":")[2]
