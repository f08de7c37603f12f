"""Builds the page: the reports as JSON beside the style and the script, all in one file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

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


def render(reports: Sequence[dict[str, Any]]) -> str:
    """One page for one or several comparisons; several of one model also give its scaling curves."""
    if not reports:
        raise ValueError("a page needs at least one report")
    here = files("dnn_bench.report")
    script = "\n".join(
        (here / name).read_text() for name in ("draw.js", "charts.js", "timeline.js", "page.js")
    )
    models = ", ".join(dict.fromkeys(report["job"]["model"] for report in reports))
    # In a script element only "</" could end the data early.
    data = json.dumps(list(reports)).replace("</", "<\\/")
    return PAGE.format(
        title=f"dnn_bench: {models}", style=(here / "page.css").read_text(), data=data, script=script
    )
