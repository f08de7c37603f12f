"""Forecast a step: simulate one profile over several links and with fewer bytes, and report the times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from typing import Any

from scheduler import policies
from scheduler.ir.link import Link
from scheduler.ir.profile import Profile
from scheduler.policies.prediction import simulate_ddp
from scheduler.render import Panel, compare_svg
from scheduler.simulate.simulator import Result, simulate

BANDWIDTHS = (2, 10)


@dataclass(frozen=True)
class Times:
    """Seconds of a step; ``exposed``: those of them in which the compute waits for communication."""

    step: float
    exposed: float

    @classmethod
    def of(cls, result: Result, compute: float) -> Times:
        return cls(result.period, max(0.0, result.period - compute))


@dataclass(frozen=True)
class SettingTimes:
    """One setting with DDP and with commsched, both simulated."""

    setting: str
    ddp: Times
    commsched: Times


@dataclass(frozen=True)
class Measurement:
    """Measurements of a script. ``profile``: compute without traffic. ``itemsizes``: bytes of one element, by
    layer. ``slowdown``: compute takes ``1 + slowdown`` times as long while the link is busy. ``now``: DDP's
    own times.
    """

    script: str
    ranks: int
    steps: int
    profile: Profile
    itemsizes: tuple[int, ...]
    link: Link
    slowdown: float
    now: Times

    def on_the_wire(self, itemsize: int) -> Profile:
        """Return the profile with elements of at most ``itemsize`` bytes."""
        layers = (
            replace(layer, bytes=layer.bytes // own * min(own, itemsize)) if layer.bytes else layer
            for layer, own in zip(self.profile.layers, self.itemsizes, strict=True)
        )
        return replace(self.profile, layers=tuple(layers))


@dataclass(frozen=True)
class Forecast:
    """The measurement and its rows; ``pictures`` holds the two simulated steps of the first row."""

    measured: Measurement
    rows: tuple[SettingTimes, ...]
    pictures: tuple[Result, Result]

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the pictures, for JSON; times in seconds."""
        measured = self.measured
        return {
            "script": measured.script,
            "ranks": measured.ranks,
            "steps": measured.steps,
            "bytes": measured.profile.total_bytes,
            "compute": measured.profile.compute,
            "link": measured.link.to_dict(),
            "slowdown": measured.slowdown,
            "now": asdict(measured.now),
            "rows": [asdict(row) for row in self.rows],
        }


def forecast(measured: Measurement) -> Forecast:
    """Simulate DDP and commsched on the measured link, with fewer bytes, and on faster links."""
    link = measured.link
    settings: list[tuple[str, Profile, Link]] = [
        ("this link", measured.profile, link),
        ("bf16 on the wire", measured.on_the_wire(2), link),
        ("int8 or fp8 on the wire", measured.on_the_wire(1), link),
    ]
    settings += [
        (f"{factor} times the bandwidth", measured.profile, link.widened(factor)) for factor in BANDWIDTHS
    ]
    rows, pictures, compute = [], [], measured.profile.compute
    for setting, profile, link in settings:
        program = policies.plan(profile, link, "optimal", ranks=measured.ranks)
        ddp = simulate_ddp(profile, link, measured.ranks, measured.slowdown)
        ours = simulate(program, profile, link, slowdown=measured.slowdown)
        rows.append(SettingTimes(setting, Times.of(ddp, compute), Times.of(ours, compute)))
        pictures.append((ddp, ours))
    return Forecast(measured, tuple(rows), pictures[0])


def slowdown_of(busy: Sequence[float], free_cores: bool) -> float:
    """Return the slowdown from each rank's processor time per second of communication.

    Without a free core, communication and compute share one: compute gets what communication leaves.
    """
    share = 0.0 if free_cores else min(0.9, sum(busy) / len(busy))
    return share / (1 - share)


# -- a forecast as a table with bars for the terminal, and as one HTML page with the simulated steps ---------

_BAR = 30  # characters
_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 sans-serif; max-width: 77rem; margin: 1rem auto; padding: 0 1rem; color: #222 }}
h1 {{ font-size: 1.5rem; overflow-wrap: anywhere }}
table {{ border-collapse: collapse; width: 100% }}
td, th {{ padding: .25rem .5rem; text-align: right; border-bottom: 1px solid #ddd; vertical-align: top }}
td, th {{ white-space: nowrap }}
td:first-child, th:first-child {{ text-align: left; padding-left: 0; white-space: normal }}
.bar {{ display: flex; height: 1rem; width: 100%; min-width: 6rem; margin-top: .2rem }}
.bar b {{ background: #4c78a8 }} .bar i {{ background: #e45756 }}
.steps {{ overflow-x: auto }} .steps svg {{ display: block }}
.key b, .key i {{ display: inline-block; width: .8rem; height: .8rem; margin: 0 .3rem 0 .8rem }}
.key b {{ background: #4c78a8; margin-left: 0 }} .key i {{ background: #e45756 }}
@media (max-width: 40rem) {{ .wide {{ display: none }} }}
</style>
<h1>{title}</h1>
<p>{facts}</p>
<p class="key"><b></b>compute <i></i>exposed communication</p>
<table>
<tr><th>setting<th>step<th class="wide">exposed<th class="wide">of now<th style="width: 40%"></tr>
{rows}
</table>
<h2>One step on this link, simulated</h2>
<div class="steps">{picture}</div>
</html>
"""


def lines(forecast: Forecast) -> Iterator[tuple[str, Times]]:
    """Yield the table's rows: DDP as measured, then commsched in each setting, then DDP in each."""
    yield "now: DDP, measured", forecast.measured.now
    for row in forecast.rows:
        yield f"commsched, {row.setting}", row.commsched
    for row in forecast.rows:
        yield f"DDP, {row.setting}, simulated", row.ddp


def facts(forecast: Forecast) -> str:
    """Describe what was measured, in one paragraph."""
    measured, link = forecast.measured, forecast.measured.link
    rate = f"{1 / link.beta / 1e6:.1f} MB per second" if link.beta else "any number of bytes at once"
    return (
        f"{measured.script} on {measured.ranks} ranks: {measured.profile.total_bytes / 1e6:.1f} MB of"
        f" gradients, compute {measured.profile.compute * 1e3:.1f} ms. A reduce-scatter or all-gather starts"
        f" in {link.alpha * 1e3:.2f} ms and then works through {rate} of its bucket. All times but DDP's own"
        " are simulated from this; int8 and fp8 count one byte for each element."
    )


def text_rows(forecast: Forecast) -> list[list[str]]:
    """Return the table's cells: setting, step, exposed communication, share of the step now, bar."""
    longest, now = max(times.step for _, times in lines(forecast)), forecast.measured.now.step
    rows = []
    for name, times in lines(forecast):
        whole, exposed = (round(_BAR * part / longest) for part in (times.step, times.exposed))
        bar = ("#" * (whole - exposed) + "." * exposed).ljust(_BAR) + "|"
        rows.append([name, _ms(times.step), _ms(times.exposed), f"{times.step / now:.0%}", bar])
    return rows


def page(forecast: Forecast) -> str:
    """Return the HTML page."""
    longest = max(times.step for _, times in lines(forecast))
    rows = []
    for (_, times), (name, step, exposed, share, _) in zip(lines(forecast), text_rows(forecast), strict=True):
        blue, red = (100 * part / longest for part in (times.step - times.exposed, times.exposed))
        rows.append(
            f"<tr><td>{escape(name)}<td>{step}<td class=wide>{exposed}<td class=wide>{share}<td>"
            f'<div class="bar"><b style="width: {blue:.2f}%"></b><i style="width: {red:.2f}%"></i></div></tr>'
        )
    title = f"commsched advise: {forecast.measured.script}"
    return _PAGE.format(
        title=escape(title), facts=escape(facts(forecast)), rows="\n".join(rows), picture=picture(forecast)
    )


def picture(forecast: Forecast) -> str:
    """Return the simulated steps with DDP and with commsched as SVG."""
    names = ("DDP", "commsched")
    panels = [
        Panel(f"{name}: {result.period * 1e3:.0f} ms", result.timeline, result.period)
        for name, result in zip(names, forecast.pictures, strict=True)
    ]
    return compare_svg(panels, f"{forecast.measured.script}: one step, simulated")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
