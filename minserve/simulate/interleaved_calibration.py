"""InterleavedCalibration: measures steps between the steps of a run, while the run's clock stands still."""

from __future__ import annotations

import time
from collections.abc import Callable

from minserve.engine.llm_engine import LLMEngine
from minserve.request import RequestOutput
from minserve.simulate.calibration import Observation
from minserve.simulate.step_measurer import Progress, StepMeasurer


class InterleavedCalibration:
    """A calibration that meets the very machine that a run meets.

    A machine that others use too is a different one a minute later, by a third and more, and a calibration before or
    behind a run is then of another machine. This one takes turns with the run: after a step of it, as long as the run
    has taken more time so far than the measuring beside it.

    clock: give it to the run's engine. It stands still while steps are measured. observations: all steps that were
    measured; during: those of them that were measured between two steps of a run.
    """

    def __init__(self, measurer: StepMeasurer, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.observations: list[Observation] = []
        self.during: list[Observation] = []
        self._scenarios = measurer.scenarios()
        self._num_scenarios = measurer.num_scenarios
        self._num_measured = 0  # scenarios, each time again
        self._real_clock = clock
        self._spent = 0.0  # seconds of measuring

    def clock(self) -> float:
        """Seconds, without those that measuring took."""
        return self._real_clock() - self._spent

    def measure(self, seconds: float, progress: Progress | None = None) -> None:
        """Measure on, until that many seconds went into it in all and each scenario was measured."""
        least = self._num_scenarios
        while self._num_measured < least or self._spent < seconds:
            self._measure_one()
            if progress is not None:
                progress(self._spent, max(seconds, self._spent * max(1.0, least / self._num_measured)))

    def attach(self, engine: LLMEngine) -> None:
        """Measure between the steps of this engine, whose clock is `clock`, from now on; changes its `step`."""
        step, started, spent_before = engine.step, self.clock(), self._spent

        def step_and_measure() -> list[RequestOutput]:
            outputs = step()
            while self._spent - spent_before < self.clock() - started:
                self.during += self._measure_one()
            return outputs

        engine.step = step_and_measure  # type: ignore[method-assign]

    def _measure_one(self) -> list[Observation]:
        begun = self._real_clock()
        try:
            steps = next(self._scenarios)
            self.observations += steps
            self._num_measured += 1
            return steps
        finally:
            self._spent += self._real_clock() - begun
