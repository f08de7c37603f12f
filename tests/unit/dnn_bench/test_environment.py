"""What a report says about the machine."""

from typing import NamedTuple

import psutil
import pytest

from dnn_bench.runner.environment import Stolen


class Times(NamedTuple):
    user: float = 100.0
    system: float = 10.0
    idle: float = 50.0
    steal: float = 5.0
    guest: float = 90.0


class TimesWithoutSteal(NamedTuple):
    user: float = 100.0
    idle: float = 50.0


def share(monkeypatch: pytest.MonkeyPatch, *readings: object) -> float:
    coming = iter(readings)
    monkeypatch.setattr(psutil, "cpu_times", lambda: next(coming))
    with Stolen() as stolen:
        pass
    return stolen.share


def test_the_share_of_stolen_time(monkeypatch: pytest.MonkeyPatch) -> None:
    after = Times(user=106.0, system=11.0, idle=51.0, steal=7.0, guest=96.0)  # a guest's time is in user's
    assert share(monkeypatch, Times(), after) == pytest.approx(0.2)
    assert share(monkeypatch, Times(), Times()) == 0.0
    assert share(monkeypatch, TimesWithoutSteal(), TimesWithoutSteal(user=103.0)) == 0.0
