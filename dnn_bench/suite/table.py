"""The cells as Markdown, ready for a document."""

from __future__ import annotations

from collections.abc import Sequence

from dnn_bench.baselines.registry import AS_THEY_COME
from dnn_bench.command_line import markdown as table
from dnn_bench.suite.figures import BY_THE_SIMULATOR, Cell, accuracy, means, order_line, slowest

POLICIES = ("dear", "pipedap", "wfbp")


def markdown(cells: Sequence[Cell]) -> str:
    """Times, ratios, means, and what the simulator's predictions are worth."""
    if not cells:
        return "no cell has been measured yet"
    name = cells[0].schedule
    parts = [
        "Milliseconds per iteration (in brackets: as the simulator predicts):\n\n" + times(cells),
        f"Ratios (above 1, `{name}` is faster than the peer; limit: the larger of floor and lower bound):\n\n"
        + ratios(cells),
        "Geometric means over the models:\n\n" + mean_table(cells),
    ]
    lines = [line for line in [slowest(cells)] if line]
    lines += [order_line(cells, *pair) for pair in BY_THE_SIMULATOR]
    lines += accuracy(cells)
    lines += [f"{cell}: {doubt}" for cell in cells for doubt in cell.doubts]
    return "\n\n".join([*parts, "\n".join(f"- {line}" for line in lines)])


def times(cells: Sequence[Cell]) -> str:
    policies = [name for name in POLICIES if name != cells[0].schedule]
    header = [*PLACE, "local", "floor", "bound, compute alone", "bound, beside traffic"]
    header += [f"`{name}`" for name in (cells[0].schedule, *policies)]
    header += ["best tuned peer", *(f"`{name}`" for name in AS_THEY_COME)]
    rows = []
    for cell in cells:
        row = [*place(cell), ms(cell.time("local")), ms(cell.time("floor")), ms(cell.bound)]
        row += [ms(cell.bound_beside), *(predicted(cell, name) for name in (cell.schedule, *policies))]
        best = cell.best_peer
        row.append(f"{ms(cell.time(best))} `{best}`" if best else "")
        rows.append(row + [ms(cell.time(name)) for name in AS_THEY_COME])
    return table(header, rows)


def ratios(cells: Sequence[Cell]) -> str:
    ours = cells[0].schedule
    header = [*PLACE, "communication / compute, measured", f"`{ours}` / limit, compute alone"]
    header += [f"`{ours}` / limit, beside traffic", f"best peer / `{ours}`"]
    header += [f"`{name}` / `{ours}`" for name in AS_THEY_COME]
    rows = []
    for cell in cells:
        found = [cell.ratio_measured, cell.to_limit(cell.bounds), cell.to_limit(cell.bounds_beside)]
        found += [cell.over(name) for name in (cell.best_peer, *AS_THEY_COME)]
        rows.append(place(cell) + [two(value) for value in found])
    return table(header, rows)


def mean_table(cells: Sequence[Cell]) -> str:
    ours = cells[0].schedule
    header = [
        "hosts",
        "ratio",
        "models",
        f"best peer / `{ours}`",
        *(f"`{n}` / `{ours}`" for n in AS_THEY_COME),
    ]
    rows = [
        [str(hosts), f"{ratio:g}", str(models), *(two(mean) for mean in over.values())]
        for hosts, ratio, models, over in means(cells)
    ]
    return table(header, rows)


PLACE = ["model", "hosts", "ratio", "link"]


def place(cell: Cell) -> list[str]:
    return [cell.model, str(cell.hosts), f"{cell.ratio:g}", cell.link]


def predicted(cell: Cell, name: str) -> str:
    told = ms(cell.rows.get(name, {}).get("predicted"))
    return ms(cell.time(name)) + (f" ({told})" if told else "")


def ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.0f}"


def two(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
