"""`python -m dnn_bench results`: one plot for each table of measurements in docs/results.

A table is a CSV file. Lines `# key: value` above it say how it was measured (`title`, `command`, `unit`, and
often `machine`) and what to draw:

label   the columns that name a row
bars    the columns that are drawn
axis    the label of the y axis
where   optional: column=value pairs that a row must have
from    optional: where the y axis starts (default 0)
line    optional: a level to mark
over    optional: a column of numbers; then each label is a panel of lines over it, the largest values of its
        rows, with the smallest ones as the other edge of a band; both axes are logarithmic
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any

from dnn_bench.command_line import one_line_errors, parser
from scheduler.ir.inputs import LARGEST, InputError, read_text, reading

REQUIRED = ("title", "command", "unit", "label", "bars", "axis")


@dataclass(frozen=True)
class ResultTable:
    path: Path
    about: dict[str, str]
    rows: list[dict[str, str]]

    @property
    def drawn(self) -> list[dict[str, str]]:
        wanted = dict(pair.split("=") for pair in self.about.get("where", "").split())
        return [row for row in self.rows if all(row[name] == value for name, value in wanted.items())]


@one_line_errors(ValueError, OSError)
def main(arguments: list[str]) -> int:
    command = parser("results", "Draws every CSV file of a folder as an SVG beside it. Needs matplotlib.")
    command.add_argument("folder", nargs="?", type=Path, default=Path("docs/results"), metavar="FOLDER")
    options = command.parse_args(arguments)
    tables = [read(path) for path in sorted(options.folder.glob("*.csv"))]
    if not tables:
        raise ValueError(f"{options.folder} holds no CSV file")
    for table in tables:
        draw(table, table.path.with_suffix(".svg"))
        print(f"wrote {table.path.with_suffix('.svg')}")
    return 0


def read(path: Path) -> ResultTable:
    """A table, with every column and number that its plot needs."""
    lines = read_text(path).splitlines()
    with reading(path):
        marks = (line[2:].partition(": ") for line in lines if line.startswith("# "))
        about = {key: value for key, _, value in marks}
        if missing := [key for key in REQUIRED if key not in about]:
            raise InputError(f"{path} lacks the lines {', '.join(f'# {key}: ...' for key in missing)}")
        reader = csv.DictReader(line for line in lines if not line.startswith("#"))
        table = ResultTable(path, about, list(reader))
        filters = [pair.split("=")[0] for pair in about.get("where", "").split()]
        numeric = [name for key in ("bars", "over") for name in about.get(key, "").split()]
        needed = [*about["label"].split(), *numeric, *filters]
        if unknown := [name for name in needed if name not in (reader.fieldnames or [])]:
            raise InputError(f"{path} has no column {', '.join(unknown)}, which its plot needs")
        if not table.drawn:
            raise InputError(f"{path} has no row to draw: where is {about.get('where', 'not given')!r}")
        for number, row in enumerate(table.drawn, 1):
            for name in numeric:
                with reading(f"drawn row {number}, column {name}"):
                    number_in(row, name)
        for key in ("line", "from"):
            with reading(f"# {key}"):
                float(about.get(key, 0))
    return table


def number_in(row: dict[str, str], column: str) -> float:
    """Return a number of a row, not a number where the row has none."""
    value = float(row[column] or "nan")
    if abs(value) > LARGEST:
        raise InputError(f"must be at most {LARGEST:,}, got {value:g}")
    return value


def draw(table: ResultTable, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context({"svg.fonttype": "none", "svg.hashsalt": "commsched", "font.size": 9}):
        figure = draw_lines(table) if "over" in table.about else draw_bars(table)
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)


def draw_lines(table: ResultTable) -> Any:
    """A panel for each label, and a row of panels for each value of the label's first column."""
    from matplotlib import pyplot

    about, over, label = table.about, table.about["over"], table.about["label"].split()
    panels: dict[str, list[dict[str, str]]] = {}
    for row in table.drawn:
        panels.setdefault(" ".join(row[column] for column in label), []).append(row)
    high = len({row[label[0]] for row in table.drawn})
    wide = -(-len(panels) // high)
    size = (2.4 * wide + 1, 2 * high + 1)
    figure, axes = pyplot.subplots(high, wide, sharex=True, squeeze=False, figsize=size, layout="constrained")
    for axis, (name, rows) in zip(axes.flat, panels.items(), strict=False):
        places = sorted({number_in(row, over) for row in rows})
        for bar in about["bars"].split():
            values = [
                [number_in(row, bar) for row in rows if number_in(row, over) == place] for place in places
            ]
            lowest, highest = [min(these) for these in values], [max(these) for these in values]
            (line,) = axis.loglog(places, highest, base=2, label=bar)
            axis.fill_between(places, lowest, highest, color=line.get_color(), alpha=0.15)
        axis.set_title(name)
        for scale in (axis.xaxis, axis.yaxis):
            scale.set_major_formatter("{x:g}")
    axes[-1, 0].set(xlabel=over, ylabel=about["axis"])
    figure.suptitle(about["title"], fontsize=10)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right upper")
    return figure


def draw_bars(table: ResultTable) -> Any:
    """Grouped bars, one group for each row; a value that is missing leaves a gap."""
    from matplotlib import pyplot

    about, bars, groups = table.about, table.about["bars"].split(), table.drawn
    width = max(8, 0.3 * len(groups) * len(bars) ** 0.5 + 3)
    figure, axis = pyplot.subplots(figsize=(width, 4), layout="constrained")
    for number, name in enumerate(bars):
        values = [number_in(row, name) for row in groups]
        places = [at + (number - (len(bars) - 1) / 2) * 0.8 / len(bars) for at in range(len(groups))]
        axis.bar(places, values, 0.8 / len(bars), label=name.replace("_", " "))
    names = [" ".join(row[column] for column in about["label"].split()) for row in groups]
    turned = 60 if max(map(len, names)) * len(groups) > 60 else 0
    axis.set_xticks(range(len(groups)), names, rotation=turned, ha="right" if turned else "center")
    axis.set_ylabel(about["axis"])
    figure.suptitle("\n".join(wrap(about["title"], int(10 * width))), fontsize=10)
    if "line" in about:
        axis.axhline(float(about["line"]), color="black", linewidth=0.8)
    axis.set_ylim(bottom=float(about.get("from", 0)))
    figure.legend(loc="outside right upper", fontsize=8)
    return figure
