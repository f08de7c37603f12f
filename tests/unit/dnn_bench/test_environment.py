"""What a report says about the machine."""

from typing import NamedTuple

import psutil
import pytest

from dnn_bench.runner.results import least_disturbed, stolen_share


class Times(NamedTuple):
    user: float = 100.0
    system: float = 10.0
    idle: float = 50.0
    steal: float = 5.0
    guest: float = 90.0


class TimesWithoutSteal(NamedTuple):
    user: float = 100.0
    idle: float = 50.0


def test_the_share_of_stolen_time() -> None:
    after = Times(user=106.0, system=11.0, idle=51.0, steal=7.0, guest=96.0)  # a guest's time is in user's
    assert stolen_share(Times(), after) == pytest.approx(0.2)
    assert stolen_share(Times(), Times()) == 0.0
    assert stolen_share(TimesWithoutSteal(), TimesWithoutSteal(user=103.0)) == 0.0


def tried(monkeypatch: pytest.MonkeyPatch, *shares: float, tries: int = 3) -> tuple[str, float, list[float]]:
    """Which of several measurements counts, its share, and what was said before each further one; others take
    these shares of one processor's second while each is made.
    """
    steal = idle = 0.0
    readings = []
    for stolen in shares:
        readings.append(Times(idle=idle, steal=steal))
        steal, idle = steal + stolen, idle + 1 - stolen
        readings.append(Times(idle=idle, steal=steal))
    coming, names, told = iter(readings), iter(["first", "second", "third", "fourth"]), list[float]()
    monkeypatch.setattr(psutil, "cpu_times", lambda: next(coming))
    name, share = least_disturbed(lambda: next(names), tries, told.append)
    return name, pytest.approx(share), told


def test_a_disturbed_measurement_is_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others took half of the processors for some seconds: repetitions of 3.8, 6.4 and 13.8 s came out."""
    assert tried(monkeypatch, 0.02) == ("first", 0.02, [])
    assert tried(monkeypatch, 0.5, 0.0) == ("second", 0.0, [pytest.approx(0.5)])
    assert tried(monkeypatch, 0.5, 0.2, 0.3) == ("second", 0.2, [pytest.approx(0.5), pytest.approx(0.2)])
    assert tried(monkeypatch, 0.5, tries=1) == ("first", 0.5, [])
