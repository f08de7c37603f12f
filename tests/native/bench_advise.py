"""Compares what `commsched advise` predicts with what the same script takes once it uses commsched.

python tests/native/bench_advise.py --link 250mbit --jobs mlp:128,gpt2_tiny:1,resnet_tiny:4 --repeats 5

Two emulated hosts. Prediction and measurement alternate. Every line holds medians over the repetitions, in
milliseconds. The error, in percent, is the median of the repetitions' own, beside the lowest and the highest.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from dnn_bench.cluster import Cluster
from dnn_bench.rank_environment import environment

SCRIPT = str(Path(__file__).with_name("advised_training.py"))


def rank_0(cluster: Cluster, command: Sequence[str], timeout: float = 300) -> str:
    """Run a command on every host; return what rank 0 prints."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = cluster.launch([sys.executable, *command], env=environment(), **pipes)
    outputs = [process.communicate(timeout=timeout) for process in processes]
    failed = [error for process, (_, error) in zip(processes, outputs, strict=True) if process.returncode]
    if failed:
        raise SystemExit("\n".join(failed))
    return outputs[0][0]


def compare(cluster: Cluster, job: str) -> list[float]:
    """Return milliseconds of a step with DDP, predicted and measured with commsched, and of both computes."""
    model, batch = job.split(":")
    script = [SCRIPT, "--model", model, "--batch-size", batch]
    told = json.loads(rank_0(cluster, ["-m", "commsched", "advise", "--json", "--steps", "5", *script]))
    step, compute = map(float, rank_0(cluster, [*script, "--commsched"]).split()[-2:])
    predicted = told["rows"][0]["commsched"]["step"]
    return [1e3 * seconds for seconds in (told["now"]["step"], predicted, step, told["compute"], compute)]


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("--link", default="250mbit")
    given.add_argument("--jobs", default="mlp:128,gpt2_tiny:1,resnet_tiny:4", help="MODEL:BATCH, with commas")
    given.add_argument("--repeats", type=int, default=5)
    options = given.parse_args()
    rows: dict[str, list[list[float]]] = {job: [] for job in options.jobs.split(",")}
    with Cluster(2, options.link) as cluster:
        for _ in range(options.repeats):
            for job, mine in rows.items():
                mine.append(compare(cluster, job))
                print(job, *(f"{value:.0f}" for value in mine[-1]), file=sys.stderr, flush=True)
    print("model,ddp,predicted,measured,compute_predicted,compute_measured,error,lowest,highest")
    for job, mine in rows.items():
        medians = [f"{median(column):.0f}" for column in zip(*mine, strict=True)]
        errors = [100 * (row[1] / row[2] - 1) for row in mine]
        spread = [f"{error:+.1f}" for error in (median(errors), min(errors), max(errors))]
        print(",".join([job.split(":")[0], *medians, *spread]), flush=True)


if __name__ == "__main__":
    main()
