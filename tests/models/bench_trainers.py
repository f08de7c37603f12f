"""Compares jobs of libraries with their DDP as shipped and with commsched, on two emulated hosts, as root.

python tests/models/bench_trainers.py --repeats 5
python tests/models/bench_trainers.py --jobs bert,gpt2,resnet50 --ways commsched,commsched-compiled

The link of each job is as fast as its gradients need to cross it in the time of its compute. The ways
alternate. A row holds medians in milliseconds: of a step, of exposed communication, and the first way's step
over this one's, beside the lowest and the highest ratio within a repetition.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median

from dnn_bench.cluster import Cluster
from dnn_bench.rank_environment import environment, rank_variables

PROGRAM = str(Path(__file__).with_name("programs") / "timed_jobs.py")
JOBS = "text_classification,causal_language_model,supervised_fine_tuning,image_classifier,gan"


def run(cluster: Cluster, job: str, way: str, alone: bool = False) -> dict[str, float]:
    """Run a job on every host, as one job or each alone; return what rank 0 prints."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, PROGRAM, job, way]
    torchrun = {"TORCHELASTIC_RUN_ID": "job"}  # Lightning takes the ranks from the variables then
    env = {**environment(), **torchrun, **(rank_variables(0, 1, 0, 1, "127.0.0.1", 29400) if alone else {})}
    processes = cluster.launch(command, env=env, **pipes)
    outputs = [process.communicate(timeout=600) for process in processes]
    failed = [error for process, (_, error) in zip(processes, outputs, strict=True) if process.returncode]
    if failed:
        raise SystemExit("\n".join(failed))
    found: dict[str, float] = json.loads(outputs[0][0].splitlines()[-1])
    return found


def compare(job: str, ways: list[str], repeats: int) -> None:
    with Cluster(2, "10gbit") as cluster:
        alone = run(cluster, job, ways[0], alone=True)
    megabits = round(8e-6 * alone["bytes"] / alone["step"])
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    with Cluster(2, f"{megabits}mbit") as cluster:
        for _ in range(repeats):
            for way in ways:
                found[way].append(run(cluster, job, way))
                print(job, way, found[way][-1], file=sys.stderr, flush=True)
    for way, rows in found.items():
        pairs = zip(found[ways[0]], rows, strict=True)
        ratios = [first["step"] / row["step"] for first, row in pairs]
        figures = [f"{1e3 * median(row['step'] for row in rows):.0f}"]
        figures += [f"{1e3 * median(row['exposed'] for row in rows):.0f}" if rows[0]["exposed"] else ""]
        figures += [f"{value:.2f}" for value in (median(ratios), min(ratios), max(ratios))]
        print(",".join([job, f"{megabits}mbit", f"{1e3 * alone['step']:.0f}", way, *figures]), flush=True)


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("--jobs", default=JOBS, help="with commas")
    given.add_argument("--ways", default="ddp,commsched", help="the first is the one to compare with")
    given.add_argument("--repeats", type=int, default=5)
    options = given.parse_args()
    print("job,link,compute,way,step,exposed,ratio,lowest,highest")
    for job in options.jobs.split(","):
        compare(job, options.ways.split(","), options.repeats)


if __name__ == "__main__":
    main()
