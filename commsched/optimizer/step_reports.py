"""What an optimizer reports while it trains: a line every N steps, and its figures for Prometheus."""

from __future__ import annotations

import os
import threading
import time

from commsched.backends.ranks import Ranks
from commsched.env import Settings
from commsched.optimizer import prometheus
from commsched.optimizer.measuring import StepTimes
from commsched.optimizer.metrics import metrics_of
from commsched.optimizer.planning import Plan

_REFRESH = 1.0  # seconds between two sets of figures for Prometheus


class StepReports:
    """Reports of one optimizer. A report measures nothing and asks no other rank."""

    def __init__(self, settings: Settings, ranks: Ranks, local_rank: int, times: StepTimes) -> None:
        self._ranks, self._times = ranks, times
        self._every = settings.log_every if ranks.rank == 0 else 0
        self._steps, self._shown = 0, 0.0
        self._endpoint: prometheus.Endpoint | None = None
        if settings.metrics_port:
            self._endpoint, self._number = prometheus.endpoint(settings.metrics_port + local_rank, ranks.rank)
        self._predicting: threading.Thread | None = None
        self._owner = os.getpid()

    def step(self, plan: Plan) -> None:
        """Report the step that has just ended, if a report is due."""
        self._steps += 1
        now = time.monotonic()
        line = self._every > 0 and self._steps % self._every == 0
        show = self._endpoint is not None and now - self._shown > _REFRESH
        if not (line or show):
            return
        self._predict(plan)
        found = metrics_of(self._times, plan, self._ranks, simulated=plan.is_predicted)
        if line and found.steps:
            print(found.line, flush=True)
        if show and self._endpoint is not None:
            self._shown = now
            self._endpoint.show(self._number, found.to_scalars())

    def _predict(self, plan: Plan) -> None:
        """Let a child process simulate the plan while training goes on; rank 0's figures serve all."""
        if self._ranks.rank == 0 and not plan.is_predicted and self._predicting is None:
            self._predicting = threading.Thread(target=self._predict_now, args=(plan,), daemon=True)
            self._predicting.start()

    def _predict_now(self, plan: Plan) -> None:
        _ = plan.prediction  # the access simulates
        self._predicting = None

    def close(self) -> None:
        if self._endpoint is not None and os.getpid() == self._owner:
            self._endpoint.remove(self._number)
