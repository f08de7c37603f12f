"""`python -m dnn_bench report`: a page from saved comparisons, all in one file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from dnn_bench.command_line import one_line_errors, parser, save

SCRIPTS = ("draw.js", "charts.js", "timeline.js", "page.js")
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>
{style}</style>
</head>
<body>
<main id="page"></main>
<script type="application/json" id="data">{data}</script>
<script>
{script}</script>
</body>
</html>
"""


@one_line_errors(ValueError, OSError)
def main(arguments: list[str]) -> int:
    text = "Makes one HTML page of the JSON files that compare wrote. "
    text += "Files of the same model with different numbers of ranks give scaling curves."
    given = parser("report", text)
    given.add_argument("reports", nargs="+", type=Path, metavar="JSON")
    given.add_argument("--html", type=Path, required=True, metavar="FILE", help="the page to write")
    options = given.parse_args(arguments)
    save(render([load(path) for path in options.reports]), options.html)
    return 0


def load(path: Path) -> dict[str, Any]:
    """A report, checked to be one."""
    try:
        report = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(report, dict) or report.get("kind") != "compare":
        raise ValueError(f"{path} is no report of dnn_bench compare: it has no kind 'compare'")
    return report


def render(reports: Sequence[dict[str, Any]]) -> str:
    """One page for one or several comparisons; several of one model also give its scaling curves."""
    if not reports:
        raise ValueError("a page needs at least one report")
    here = files("dnn_bench.report")
    script = "\n".join((here / name).read_text() for name in SCRIPTS)
    models = ", ".join(dict.fromkeys(report["job"]["model"] for report in reports))
    # In a script element only "</" could end the data early.
    data = json.dumps(list(reports)).replace("</", "<\\/")
    style = (here / "page.css").read_text()
    return PAGE.format(title=f"dnn_bench: {models}", style=style, data=data, script=script)
