"""`Crew`: the ranks of many baselines, and what is known about them, from one comparison to the next."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from dnn_bench.baselines import Baseline
from dnn_bench.baselines.job import Job
from dnn_bench.launch import Place, ThisMachine
from dnn_bench.runner.sets import RankSet


class Crew:
    """Ranks for comparisons of one job on the same hosts; a context manager that ends them all.

    Ranks that stay need not be started and checked again. Baselines that plan for the link must not stay when
    the link becomes another.
    """

    def __init__(self) -> None:
        self.errors: dict[str, float | None] = {}  # of the first steps, of baselines that passed their check
        self._sets: dict[str, RankSet] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="dnn_bench-")
        self._reference: Path | None = None

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *error: object) -> None:
        self.dismiss(lambda ranks: True)
        self._folder.cleanup()

    def __contains__(self, name: str) -> bool:
        return name in self._sets

    def ranks(self, baseline: Baseline, job: Job, place: Place) -> RankSet:
        """Those that are there already, or new ones that nobody has started yet."""
        if baseline.name not in self._sets:
            self._sets[baseline.name] = RankSet(baseline, job, place, Path(self._folder.name))
        return self._sets[baseline.name]

    def dismiss(self, unwanted: Callable[[RankSet], bool]) -> None:
        """Ends ranks: all are asked first, so that they end side by side."""
        leaving = [ranks for ranks in self._sets.values() if unwanted(ranks)]
        for ranks in leaving:
            ranks.ask_to_end()
        for ranks in leaving:
            ranks.close()
            del self._sets[ranks.baseline.name]

    def reference(self, job: Job, size: int) -> Path:
        """The single-process result, by a process of its own, so that this one stays small."""
        if self._reference is None:
            path = Path(self._folder.name) / "reference.pt"
            program = ["-m", "dnn_bench.runner.worker", "--reference"]
            program += [str(path), str(size), json.dumps(asdict(job))]
            with path.with_suffix(".log").open("w+") as log:
                (process,) = ThisMachine(1).start(program, log)
                try:
                    code = process.wait()
                finally:
                    process.kill()
                log.seek(0)
                if code != 0:
                    raise ValueError(f"{job.model} cannot be trained in one process:\n{log.read()[-2000:]}")
            self._reference = path
        return self._reference
