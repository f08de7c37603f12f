"""Options of `commsched train`: the stages and the training."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_stages(parser: argparse.ArgumentParser) -> None:
    stages = parser.add_argument_group("stages: a plan, AshPipe's files, or a schedule by name")
    source = stages.add_mutually_exclusive_group()
    source.add_argument("--plan", metavar="FILE", help="plan of `commsched partition`")
    source.add_argument("--conf", metavar="FILE", help="hybrid_conf.json of PipeDream or AshPipe")
    source.add_argument("--schedule", default="1f1b", help="order of the micro-batches")
    stages.add_argument(
        "--graph",
        metavar="FILE",
        help="with --conf: partitioned graph, gpus=N.txt (default: the model's layers)",
    )
    stages.add_argument(
        "--stages", type=int, metavar="S", help="ranks of one replica (default: all ranks, one replica)"
    )
    stages.add_argument(
        "--replicas", default="1", metavar="R", help="replicas, or one number for each stage: 4,3,1"
    )
    stages.add_argument("--microbatches", type=int, default=1, metavar="M", help="micro-batches of a step")
    stages.add_argument(
        "--cuts",
        metavar="A,B,...",
        help="layers with which the later stages begin: numbers, or names of modules (default: even)",
    )
    stages.add_argument(
        "--across",
        action="store_true",
        help="bundle: fronts on the first half of the hosts, rears on the rest",
    )


def add_training(parser: argparse.ArgumentParser) -> None:
    training = parser.add_argument_group("training")
    training.add_argument(
        "--rows", type=int, required=True, metavar="N", help="rows of one optimizer step, over all replicas"
    )
    training.add_argument("--epochs", type=int, default=1, metavar="N", help="epochs, of jobs with data sets")
    training.add_argument(
        "--steps", type=int, default=20, metavar="N", help="optimizer steps, of jobs without data sets"
    )
    training.add_argument(
        "--warmup-steps",
        type=int,
        default=0,
        metavar="N",
        help="data-parallel steps before the pipeline starts",
    )
    training.add_argument(
        "--optimizer", choices=("sgd", "adam", "adamw"), help="optimizer (default: the job's: sgd)"
    )
    training.add_argument("--lr", type=float, default=0.01, help="with --optimizer: learning rate")
    training.add_argument("--momentum", type=float, default=0.9, help="with --optimizer sgd: momentum")
    training.add_argument("--weight-decay", type=float, default=0.0, help="with --optimizer: weight decay")
    training.add_argument(
        "--decay", choices=("linear", "cosine"), help="let the learning rate fall to 0 (default: constant)"
    )
    training.add_argument(
        "--load", metavar="FILE", help="start from the state_dict in FILE, as far as it fits"
    )
    training.add_argument("--eval", action="store_true", help="score the test data after every epoch")
    training.add_argument("--workers", type=int, default=0, metavar="N", help="processes that read data")
    training.add_argument(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help="write checkpoints into DIR, and continue from the latest one there",
    )
    training.add_argument(
        "--checkpoint-every", type=int, default=0, metavar="STEPS", help="besides one after every epoch"
    )
    training.add_argument(
        "--results", type=Path, metavar="DIR", help="write results.json and curves.svg into DIR"
    )
    training.add_argument("--save", metavar="FILE", help="write the trained model's state_dict to FILE")


def replicas_of(arguments: argparse.Namespace) -> int | list[int]:
    words = arguments.replicas.split(",")
    if not all(word.strip().isdigit() for word in words):
        raise ValueError(
            f"--replicas is a number, or one for each stage such as 4,3,1, not {arguments.replicas!r}"
        )
    counts = [int(word) for word in words]
    return counts if len(counts) > 1 else counts[0]


def world_of(arguments: argparse.Namespace) -> int | None:
    """The ranks that --stages and --replicas need."""
    replicas = replicas_of(arguments)
    if isinstance(replicas, list):
        return sum(replicas)
    return arguments.stages * replicas if arguments.stages else None
