"""Compares steps after undisturbed measurements with steps after another process took a processor meanwhile.

python tests/native/bench_disturbed.py --model gpt2_tiny --batch-size 4 --link 500mbit --seeds 20

Two emulated hosts. The disturbance lasts two seconds and begins at one of the steps in which commsched
measures. Steps are timed from the 30th on. Every second run is undisturbed; a ratio is that to the mean of
its neighbours.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from statistics import mean, median

from dnn_bench.cluster import Cluster
from tests.native.bench_advise import rank_0

SCRIPT = str(Path(__file__).with_name("advised_training.py"))
MEASURED = 9  # steps


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("--link", default="500mbit")
    given.add_argument("--model", default="gpt2_tiny")
    given.add_argument("--batch-size", default="4")
    given.add_argument("--seeds", type=int, default=20)
    options = given.parse_args()
    job = [SCRIPT, "--model", options.model, "--batch-size", options.batch_size, "--commsched"]
    job += ["--steps", "66", "--settle", "50"]
    steps = []
    with Cluster(2, options.link) as cluster:

        def run(*more: str) -> None:
            steps.append(float(rank_0(cluster, [*job, *more]).split()[-2]))
            print(*more, f"{1e3 * steps[-1]:.0f} ms", file=sys.stderr, flush=True)

        run()
        for seed in range(options.seeds):
            dice = random.Random(seed)
            run("--disturbed-at", f"{dice.randrange(MEASURED)}:{dice.randrange(2)}")
            run()
    ratios = [steps[i] / mean((steps[i - 1], steps[i + 1])) for i in range(1, len(steps), 2)]
    print(
        f"median {median(steps[::2]) * 1e3:.0f} ms undisturbed, {median(steps[1::2]) * 1e3:.0f} ms disturbed;"
    )
    print(f"ratios: median {median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}")


if __name__ == "__main__":
    main()
