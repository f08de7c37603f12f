"""Train a model: in one process, or in stages and replicas that a plan, AshPipe's files or options describe.

Start it on every rank with a launcher, or rank by rank with --rank.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from commsched.cli.options import add_job


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    add_job(parser)
    _add_stages(parser)
    _add_training(parser)
    _add_ranks(parser)


def run_train(arguments: argparse.Namespace) -> None:
    from commsched.cli.training import run as train  # imports torch

    train(arguments)


def _add_stages(parser: argparse.ArgumentParser) -> None:
    stages = parser.add_argument_group("stages: a plan, AshPipe's files, or a schedule by name")
    source = stages.add_mutually_exclusive_group()
    source.add_argument("--plan", metavar="FILE", help="plan of `commsched partition`")
    source.add_argument("--conf", metavar="FILE", help="hybrid_conf.json of PipeDream or AshPipe")
    source.add_argument("--schedule", default="1f1b", help="order of the micro-batches")
    add = stages.add_argument
    text = "with --conf: partitioned graph, gpus=N.txt (default: the model's layers)"
    add("--graph", metavar="FILE", help=text)
    add("--stages", type=int, metavar="S", help="ranks of one replica (default: all ranks, one replica)")
    add("--replicas", metavar="R", help="replicas (default: 1), or one number for each stage: 4,3,1")
    add("--microbatches", type=int, metavar="M", help="micro-batches of a step (default: 1)")
    text = "layers with which the later stages begin: numbers, or names of modules (default: even)"
    add("--cuts", metavar="A,B,...", help=text)
    text = "bundle: fronts on the first half of the hosts, rears on the rest"
    add("--across", action="store_true", help=text)


def _add_training(parser: argparse.ArgumentParser) -> None:
    training = parser.add_argument_group("training")
    add = training.add_argument
    add("--rows", type=int, required=True, metavar="N", help="rows of one optimizer step, over all replicas")
    add("--epochs", type=int, default=1, metavar="N", help="epochs, of jobs with data sets")
    add("--steps", type=int, default=20, metavar="N", help="optimizer steps, of jobs without data sets")
    text = "data-parallel steps before the pipeline starts"
    add("--warmup-steps", type=int, default=0, metavar="N", help=text)
    add("--optimizer", choices=("sgd", "adam", "adamw"), help="optimizer (default: the job's: sgd)")
    add("--lr", type=float, help="with --optimizer: learning rate (default: 0.01)")
    add("--momentum", type=float, help="with --optimizer sgd: momentum (default: 0.9)")
    add("--weight-decay", type=float, help="with --optimizer: weight decay (default: 0)")
    add("--decay", choices=("linear", "cosine"), help="let the learning rate fall to 0 (default: constant)")
    add("--load", metavar="FILE", help="start from the state_dict in FILE, as far as it fits")
    add("--eval", action="store_true", help="score the test data after every epoch")
    add("--workers", type=int, default=0, metavar="N", help="processes that read data")
    text = "write checkpoints into DIR, and continue from the latest one there"
    add("--checkpoint", type=Path, metavar="DIR", help=text)
    add("--checkpoint-every", type=int, default=0, metavar="STEPS", help="besides one after every epoch")
    add("--results", type=Path, metavar="DIR", help="write results.json and curves.svg into DIR")
    add("--save", metavar="FILE", help="write the trained model's state_dict to FILE")


def _add_ranks(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("ranks started one by one, without a launcher").add_argument
    add("--rank", type=int, metavar="N", help="this process's rank")
    text = "its number on its machine (default: --rank)"
    add("--local-rank", "--local_rank", type=int, metavar="N", help=text)
    text = "address of rank 0's machine"
    add("--master-addr", "--master_addr", default="127.0.0.1", metavar="A", help=text)
    add("--master-port", type=int, default=29500, metavar="N", help="a free port of it")
    text = "number of ranks (default: as the plan, or the stages, say)"
    add("--world-size", type=int, metavar="N", help=text)
