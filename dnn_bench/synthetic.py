"""Training throughput, printed as Horovod's synthetic benchmark prints it.

horovodrun -np 2 python -m dnn_bench synthetic --model resnet_tiny --baseline pipedap
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import time
from collections.abc import Callable

import torch

from commsched.process.launch import by_host, detect_launch
from dnn_bench import baselines, models
from dnn_bench.baselines import require
from dnn_bench.baselines.trainer import Job, Trainer, check_fit
from dnn_bench.command_line import add_data_dir, add_job, one_line_errors, parser, shape_of
from dnn_bench.runner.measure import settle


def parse(arguments: list[str]) -> argparse.Namespace:
    command = parser("synthetic", __doc__)
    add_job(command, model="resnet_tiny", baseline="horovod")
    add_data_dir(command)
    command.add_argument("--num-warmup-batches", type=int, default=10, help="least batches before measuring")
    command.add_argument("--num-batches-per-iter", type=int, default=1, help="batches of a measurement")
    command.add_argument("--num-iters", type=int, default=10, help="measurements")
    return command.parse_args(arguments)


def job_of(options: argparse.Namespace) -> Job:
    """The job of this rank; a `ValueError` for one that it cannot train, before anything is started."""
    launch = detect_launch(os.environ, os.environ.get("COMMSCHED_LAUNCHER", ""))
    device = "cpu"
    if torch.cuda.is_available():
        torch.cuda.set_device(launch.local_rank)
        device = f"cuda:{launch.local_rank}"
    more = {"threads": torch.get_num_threads(), "device": device, "data_dir": options.data_dir}
    job = Job(options.model, options.batch_size, shape_of(options), **more)
    models.spec(job.model)
    if job.data_dir:
        job.sample(1, 0)
    if device == "cpu":
        check_fit(job, launch.local_size)
    return job


def timed(trainer: Trainer, batch: tuple[torch.Tensor, torch.Tensor], count: int) -> float:
    """Seconds for `count` training steps."""
    begin = time.perf_counter()
    for _ in range(count):
        trainer.iteration(*batch)
    trainer.finish()
    return time.perf_counter() - begin


def benchmark(trainer: Trainer, options: argparse.Namespace, log: Callable[[str], None]) -> None:
    job = trainer.job
    unit = f"{models.unit(job.model)}/sec"
    kind = "GPU" if job.device.startswith("cuda") else "CPU"
    log(f"Model: {job.model}\nBatch size: {job.rank_batch}\nNumber of {kind}s: {trainer.size}")
    log(f"Ranks: {by_host(trainer.ranks.allgather_object(socket.gethostname()))}")
    batch = job.local_batch(trainer.rank)
    log("Running warmup...")
    if not settle(trainer, options.num_warmup_batches):
        log("Its plan is still searched or tried: the rates below are those of steps that pay for this")
    log("Running benchmark...")
    rates = []
    for iteration in range(options.num_iters):
        seconds = timed(trainer, batch, options.num_batches_per_iter)
        rates.append(job.rank_batch * options.num_batches_per_iter / seconds)
        log(f"Iter #{iteration}: {rates[-1]:.1f} {unit} per {kind}")
    # As Horovod's benchmark has them.
    mean, margin = statistics.fmean(rates), 1.96 * statistics.pstdev(rates)
    log(f"{unit[0].upper()}{unit[1:]} per {kind}: {mean:.1f} +-{margin:.1f}")
    log(f"Total {unit} on {trainer.size} {kind}(s): {trainer.size * mean:.1f} +-{trainer.size * margin:.1f}")


@one_line_errors(ValueError)
def main(arguments: list[str]) -> int:
    options = parse(arguments)
    require(baselines.get(options.baseline))
    trainer = baselines.start(options.baseline, job_of(options))

    def log(text: str) -> None:
        if trainer.rank == 0:
            print(text, flush=True)

    benchmark(trainer, options, log)
    trainer.barrier()
    trainer.close()
    return 0
