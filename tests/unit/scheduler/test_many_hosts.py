"""The table of ``python -m scheduler.many_hosts``, and the copy of it in the documentation."""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path

import pytest

from scheduler import profiles
from scheduler.ir.profile import Layer, Profile
from scheduler.many_hosts import COLUMNS, HOSTS, LINKS, PER_HOST, main, row_of

RESULTS = Path(__file__).resolve().parents[3] / "docs" / "results" / "many-hosts.csv"


def documented() -> dict[tuple[str, ...], list[str]]:
    lines = [line for line in RESULTS.read_text().splitlines() if not line.startswith("#")]
    return {tuple(row[:4]): row for row in csv.reader(lines[1:])}


def test_the_document_holds_every_cluster() -> None:
    expected = {
        (link, model, str(per_host), str(hosts))
        for link in LINKS
        for model in profiles.names()
        for per_host in PER_HOST
        for hosts in HOSTS
    }
    rows = documented()
    assert set(rows) == expected
    for row in rows.values():
        *times, bound = map(float, row[4:])
        assert bound <= min(times), row


@pytest.mark.parametrize(
    "cluster",
    [("10gbe", "vgg16", 1, 1024), pytest.param(("100gbe", "resnet50", 8, 16), marks=pytest.mark.thorough)],
)
def test_the_document_is_up_to_date(cluster: tuple[str, str, int, int]) -> None:
    link, model, *counts = cluster
    row = row_of(profiles.shipped(model), link, *counts)
    assert row == documented()[tuple(map(str, cluster))]


def test_a_step_without_compute_by_hand() -> None:
    """8 MB in one layer that can be one bucket, 4 hosts of 2 ranks at 10 Gbit/s: 0.8 s for a GB on a card.

    One layer of 64 bytes' compute: nothing overlaps, so a step is an RS and an AG.
    """
    profile = Profile("one layer", (Layer("all", 0.0, 0.0, 8_000_000),))
    *_, direct, ring, tiers, halving, bound = row_of(profile, "10gbe", 2, 4)
    card, inside, start = 8e-10, 1e-10, 2e-4
    # Direct: both ranks of a host send 6 of 8 shares over its card, 7 messages each.
    assert float(direct) == pytest.approx(2e3 * (start + 6e-5 + 8e6 * card * 2 * 6 / 8), abs=0.06)
    # Ring: 7 rounds, 7/8 of the bytes.
    assert float(ring) == pytest.approx(2e3 * (7 * (start + 1e-5) + 8e6 * card * 7 / 8), abs=0.06)
    # Tiers: 3/4 of the bytes between hosts; the first segment, 1 MiB of the bucket, is inside alone.
    alone = inside / 2 * 8 * (128 << 10)
    assert float(tiers) == pytest.approx(2e3 * (2e-5 + start + 2e-5 + alone + 8e6 * card * 3 / 4), abs=0.06)
    # Halving: 1 message inside, 2 between hosts, both tiers one after the other.
    between = 2 * (start + 1e-5) + 8e6 * card * 3 / 4
    assert float(halving) == pytest.approx(2e3 * (2e-5 + 8e6 * inside / 2 + between), abs=0.06)
    assert float(bound) == pytest.approx(2e3 * 8e6 * card * 3 / 4, abs=0.06)


def test_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text("# title: kept\nreplaced\n")
    few = ["--links", "25gbe", "--per-host", "2", "--hosts", "4", "8"]
    assert main(["vgg16", *few, "--csv", str(table)]) == 0
    head, names, first, second = table.read_text().splitlines()
    assert head == "# title: kept" and names == ",".join(COLUMNS)
    assert first.startswith("25gbe,vgg16,2,4,") and second.startswith("25gbe,vgg16,2,8,")
    assert capsys.readouterr().out.splitlines() == [names, first, second]
    assert main(["no_such_model"]) == 2
    assert "no_such_model" in capsys.readouterr().err


def test_what_the_page_says() -> None:
    """docs/scheduler.md names these figures."""
    ratios: dict[str, list[float]] = defaultdict(list)
    for _, _, per_host, hosts, *figures in documented().values():
        direct, ring, tiers, halving, bound = map(float, figures)
        ratios["tiers up to 64" if int(hosts) <= 64 else f"tiers {hosts}"].append(tiers / bound)
        ratios[f"halving gains {hosts}"].append(tiers / halving)
        ratios["halving loses"].append(halving / tiers)
        if (per_host, hosts) == ("8", "1024"):
            ratios["flat"].append(min(direct, ring) / tiers)
    assert max(ratios["tiers up to 64"]) == pytest.approx(1.12, abs=0.005)
    assert max(ratios["tiers 1024"]) == pytest.approx(1.43, abs=0.005)
    assert max(ratios["halving gains 64"]) < 1 < max(ratios["halving gains 128"])
    assert max(ratios["halving gains 1024"]) == pytest.approx(1.34, abs=0.01)
    assert max(ratios["halving loses"]) == pytest.approx(1.12, abs=0.005)
    assert (min(ratios["flat"]), max(ratios["flat"])) == pytest.approx((1.4, 6.0), abs=0.05)
