"""Options that subcommands share, the jobs that options name, and tables and numbers for the terminal."""

from __future__ import annotations

import argparse
import ast
import math
import os
import re
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from scheduler import profiles
from scheduler.ir.inputs import LARGEST, InputError, whole
from scheduler.ir.link import ALGORITHMS, Level, Link, TwoTierLink, network_link
from scheduler.ir.program import Program
from scheduler.simulate.simulator import Result

if TYPE_CHECKING:
    import torch

    from commsched.pipeline.job import Job

# -- options that several subcommands share ------------------------------------------------------------------

DEFAULT_RANKS = 2
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def add_profile_and_link(parser: argparse.ArgumentParser, required: bool = True) -> None:
    add_profile(parser, "", required)
    text = (
        "cost of one RS or AG (with --ranks: of one message on a rank's own link), as"
        " alpha=SECONDS,beta=SECONDS_PER_BYTE, a speed such as 10gbit, or FILE.json"
    )
    add = parser.add_argument
    add("--link", required=required, metavar="L", help=text)
    text = "with --ranks: algorithm of the collectives (default: ring)"
    add("--algorithm", choices=ALGORITHMS, help=text)
    add_hosts(parser, "ranks")


def add_profile(parser: argparse.ArgumentParser, of: str, required: bool = True) -> None:
    text = f"profile{of}: a file (.json or graph.txt) or one of {', '.join(profiles.names())}"
    parser.add_argument("--profile", required=required, metavar="P", help=text)


def add_hosts(parser: argparse.ArgumentParser, members: str) -> None:
    add = parser.add_argument
    add("--per-host", type=int, metavar="N", help=f"{members} that share one host's --link (default: 1)")
    add("--inside", metavar="L", help=f"with --per-host: link between the {members} of one host")


def add_ranks(parser: argparse.ArgumentParser) -> None:
    text = (
        f"number of ranks; --link is then one rank's own link (default: {DEFAULT_RANKS}, with --link"
        " as the cost of a whole RS or AG)"
    )
    parser.add_argument("--ranks", type=int, metavar="N", help=text)


def add_step(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--gather", choices=("gradients", "parameters"), default="gradients", help="what all-gathers move")
    add("--early-step", action="store_true", help="with --gather parameters: update during the backward")


def load_link(text: str, of_one: str = "") -> Link:
    """Return the link that a file or a text names; ``of_one``: whose own it must be, no collective's."""
    link: Link = Link.load(text) if text.endswith(".json") else Link.parse(text)
    if of_one and isinstance(link, TwoTierLink):
        raise InputError(
            f"{text}: holds the cost of collectives in two tiers, no link of one of the {of_one}"
        )
    return link


def cluster(arguments: argparse.Namespace, ranks: int | None) -> tuple[Link, int]:
    """Return the cost of one RS or AG and the number of ranks.

    Without `ranks` --link is that cost; otherwise it is computed for a cluster of `ranks` such links.
    """
    if ranks is None:
        if arguments.inside is not None or (arguments.per_host or 1) != 1:
            raise ValueError("several ranks on a host need all of --ranks, --per-host and --inside")
        if arguments.algorithm:
            raise ValueError("--algorithm needs --ranks: without it, --link is the cost of a whole RS or AG")
        return load_link(arguments.link), DEFAULT_RANKS
    return network_link(levels(arguments, ranks, "ranks"), arguments.algorithm or "ring"), ranks


def levels(arguments: argparse.Namespace, count: int, members: str) -> tuple[Level, ...]:
    """Return the levels of a cluster of `count` members as --link, --per-host and --inside describe it."""
    link, per_host = load_link(arguments.link, members), arguments.per_host
    if arguments.inside is None and (per_host or 1) == 1:
        return (Level(count, link.alpha, link.beta),)
    if per_host is None or arguments.inside is None:
        raise ValueError(f"several {members} on a host need both --per-host and --inside")
    per_host = min(per_host, count)  # fewer members than one host holds
    if per_host < 1 or count % per_host:
        raise ValueError(f"--per-host: {count} {members} do not fill hosts of {per_host}")
    inside = load_link(arguments.inside, members)
    return Level(per_host, inside.alpha, inside.beta), Level(count // per_host, link.alpha, link.beta)


def step_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of policies and bounds that say how a step is done."""
    return {"gather": arguments.gather, "early_step": arguments.early_step}


def bytes_of(option: str, text: str) -> int:
    """The bytes of a size such as 64k or 1.5g."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt]?)(?:i?b)?", text.strip().lower())
    size = float(match[1]) * 1024.0 ** _POWERS[match[2]] if match else math.inf
    if size > LARGEST:
        raise InputError(
            f"{option}: cannot read {text!r}; write bytes, or a number with k, m, g or t (x 1024), at most"
            " 8192t"
        )
    return int(size)


def cuts_of(text: str | None) -> list[int | str] | None:
    """Return the layers with which stages begin: numbers or modules' names; the first may be left out."""
    if not text:
        return None
    words = [word.strip() for word in text.split(",")]
    cuts: list[int | str] = [whole(word, "--cuts: a layer") if word.isdigit() else word for word in words]
    return cuts if cuts[0] == 0 or isinstance(cuts[0], str) else [0, *cuts]


# -- options that name a job: a function of the user's, or one of the ready jobs on files --------------------

READY = ("images", "text", "masks")


def add_job(parser: argparse.ArgumentParser) -> None:
    text = (
        "MODULE:FUNCTION, which returns (model, loss, batches[, optimizer[, data[, count]]]) and"
        " batches(rows) yields batches; or images (classes of images), text (classes of sentences), masks"
        " (classes of pixels), which need --data and --model"
    )
    parser.add_argument("--job", required=True, metavar="JOB", help=text)
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and of the order of rows")
    text = "where the model computes: cpu, cuda (each rank of a host its own GPU), or one such as cuda:1"
    parser.add_argument("--device", default="cpu", metavar="DEVICE", help=text)
    text = (
        "threads of a rank on the CPU (default: OMP_NUM_THREADS, else the cores divided by the ranks of"
        " the host)"
    )
    parser.add_argument("--threads", type=int, metavar="N", help=text)
    ready = parser.add_argument_group("ready jobs")
    add = ready.add_argument
    text = (
        "images: folder with train/CLASS/*.png and val/CLASS/*.png; text: .tsv or .csv file with a"
        " header, or folder with train.tsv and dev.tsv; masks: folder with images/NAME.png and"
        " masks/NAME.png, or such folders in train and val"
    )
    add("--data", type=Path, metavar="PATH", help=text)
    text = "function that makes the model; it gets num_classes and, for text, vocab_size if it takes them"
    add("--model", metavar="MODULE:FUNCTION", help=text)
    add("--model-args", default="", metavar="NAME=VALUE,...", help="further arguments of the function")
    add("--image-size", type=int, default=224, metavar="N", help="pixels a side")
    add("--classes", type=int, metavar="N", help="masks: classes (default: as in the masks)")
    add("--length", type=int, default=64, metavar="N", help="text: words of a row")
    add("--vocabulary", type=int, default=8000, metavar="N", help="text: most frequent words to know")
    text = "text: columns of one or two texts and of the label (default: as QQP, MNLI, SST-2, ...)"
    add("--columns", default="", metavar="A,B,LABEL", help=text)


def job_of(arguments: argparse.Namespace) -> Job:
    """The job that the options name; its model has random weights of --seed, and is on --device."""
    _set_threads(arguments)
    job = _job_of(arguments)
    job.model.to(device_of(arguments))
    return job


def device_of(arguments: argparse.Namespace) -> torch.device:
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
    """This rank's number among the ranks of its host, and how many they are."""
    from commsched.process.launch import detect_launch

    rank = getattr(arguments, "rank", None)
    if rank is not None:  # started without a launcher: how many ranks the host has is not known
        return (rank if arguments.local_rank is None else arguments.local_rank), 1
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
    values: dict[str, Any] = {}
    for pair in filter(None, text.split(",")):
        name, sign, value = pair.partition("=")
        if not sign or not name.strip().isidentifier():
            raise InputError(f"--model-args must look like width=16,name=small, got {text!r}")
        try:
            values[name.strip()] = ast.literal_eval(value)
        except (ValueError, SyntaxError, RecursionError, MemoryError):  # the last two: too many brackets
            values[name.strip()] = value
    return values


def job_name(arguments: argparse.Namespace) -> str:
    """The job's name for profiles and results."""
    return str(arguments.job).rpartition(":")[2]


# -- tables and numbers for the terminal ---------------------------------------------------------------------

_PIPE_WIDTH = 160


def console() -> Console:
    # A pipe has no width, and the 80 columns that Rich assumes would cut numbers off.
    return Console(soft_wrap=True, width=None if sys.stdout.isatty() else _PIPE_WIDTH)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table whose first column is text, and whose other columns are numbers."""
    result = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        result.add_column(column, justify="right" if number else "left")
    for row in rows:
        result.add_row(*row)
    return result


def figures(result: Result, bound: float) -> dict[str, float | None]:
    """Return a simulated step beside its lower bound, for JSON; the ratio to a bound of 0 is None."""
    ratio = result.period / bound if bound else None if result.period else 1.0
    return {"period": result.period, "ratio_to_bound": ratio, "exposed": result.exposed}


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"


def plan_table(program: Program) -> Table:
    rows = []
    for number, bucket in enumerate(program.buckets):
        first, last = bucket.layers[0], bucket.layers[-1]
        layers = str(first) if first == last else f"{first}..{last}"
        rows.append([str(number), f"{bucket.bytes:,}", layers, str(len(bucket.pieces)), str(bucket.group)])
    title = (
        f"{program.policy}: {program.layers} layers, {program.ranks} ranks, gathers {program.gather}"
        f"{', early step' if program.early_step else ''}, hash {program.hash}"
    )
    return table(title, ["bucket", "bytes", "layers", "pieces", "group"], rows)
