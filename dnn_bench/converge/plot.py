"""The loss curves on one plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dnn_bench.converge.results import Run


def draw(runs: Sequence[Run], path: Path) -> None:
    """One panel per task; runs that coincide lie on top of each other."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tasks = list(dict.fromkeys(run.task for run in runs))
    figure, axes = pyplot.subplots(1, len(tasks), figsize=(7 * len(tasks), 5), squeeze=False)
    for axis, task in zip(axes[0], tasks, strict=True):
        for index, run in enumerate(run for run in runs if run.task == task):
            label = f"{run.baseline}, {run.workers} ({run.accuracy:.3f})"
            plain = run.baseline == "plain"
            style = {"linewidth": 4, "alpha": 0.3, "color": "black"} if plain else {"linewidth": 1}
            dashes = {} if plain else {"linestyle": ("-", "--", ":", "-.")[index % 4]}
            axis.plot(run.losses, label=label, **style, **dashes)
        axis.set(title=task, xlabel="step", ylabel="loss of the global batch", yscale="log")
        axis.legend(fontsize=7, title="baseline, workers (accuracy)", title_fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
