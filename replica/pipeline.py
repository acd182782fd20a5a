"""Steps one behind the other: the next one is scheduled and launched while the running one computes.

Without overlap a step is scheduled, run and collected before the next one. With it, the next step starts from
tokens that have been drawn on the device and are not known here yet; what turns out to have ended wastes a
row, which whoever collects the step drops. The next step waits for the running one where it must: if that has
rows whose draw is up to the host (see `replica.sampler.Row.plain`), or choices that fork off, if drafts are
guessed, or if somebody would have to give blocks back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from replica.plan import Plan
from replica.runner import Draw, Launched, Runner
from replica.scheduler import Scheduler


@dataclass(frozen=True)
class Landing:
    """A step that is over: what was drawn, or why it failed, and the seconds it took."""

    plan: Plan
    draws: list[Draw]
    error: Exception | None
    seconds: float


@dataclass(frozen=True)
class _Flight:
    """A step that has been launched, or has failed to be."""

    plan: Plan
    started: float
    launched: Launched | None
    error: Exception | None = None


class Pipeline:
    """Schedules, launches and collects steps, at most two at a time.

    Args:
        lock: held while the scheduler is used, and never while the model computes.
        overlap: whether to go ahead of a running step.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        lock: threading.Lock,
        overlap: bool,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._lock = lock
        self._overlap = overlap
        self._clock = clock
        self._flying: _Flight | None = None
        self._landed = float("-inf")

    @property
    def flying(self) -> bool:
        """Whether a step is launched that is not collected yet."""
        return self._flying is not None

    def turn(self) -> Landing | None:
        """Wait for the oldest step, with the one after it launched if it may be; None if there is none.

        Whoever calls takes what was drawn before the next turn.
        """
        flight = self._flying or self._launch(None)
        self._flying = None
        if flight is None:
            return None
        if flight.launched is not None and self._may_go_ahead(flight.launched):
            self._flying = self._launch(flight.launched)
        return self._collect(flight)

    def _may_go_ahead(self, launched: Launched) -> bool:
        return self._overlap and launched.can_go_on and self._scheduler.can_go_ahead()

    def _launch(self, before: Launched | None) -> _Flight | None:
        with self._lock:
            plan = self._scheduler.schedule(ahead=before is not None)
        if not plan.chunks:
            return None
        started = self._clock()
        try:
            return _Flight(plan, started, self._runner.launch(plan, before))
        except Exception as error:  # whatever the model raises, the others' requests must go on
            return _Flight(plan, started, None, error)

    def _collect(self, flight: _Flight) -> Landing:
        draws, error = list[Draw](), flight.error
        if flight.launched is not None:
            try:
                draws = self._runner.collect(flight.launched)
            except Exception as failure:  # as above: a GPU tells of errors when it is asked for results
                error = failure
        # A step that was launched behind another one began when that was over.
        started = max(flight.started, self._landed)
        self._landed = self._clock()
        return Landing(flight.plan, draws, error, self._landed - started)
