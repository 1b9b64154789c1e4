"""StepMeasurer: times steps of a real engine with real batches, without waiting for the prompts before them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from minserve.engine.engine_config import EngineConfig
from minserve.engine.interfaces import Runner, TokenSampler
from minserve.engine.llm_engine import LLMEngine
from minserve.engine.scheduled_batch import ScheduledSequence
from minserve.errors import ParameterError
from minserve.request import FinishReason, Request, RequestIds, RequestOutput
from minserve.sampling_params import SamplingParams
from minserve.simulate.calibration import Observation
from minserve.simulate.cost_model import StepWork
from minserve.simulate.scenario import DECODE_STEPS, Scenario, scenarios

Progress = Callable[[float, float], None]  # (seconds so far, seconds in all)


class _SkippingRunner:
    """A runner that computes only while `computing`; else a step takes no time and its logits are all 0.

    So a sequence with a thousand tokens behind it is there at once: its blocks hold whatever they held, and how long
    attention over them takes does not depend on what that is.
    """

    def __init__(self, runner: Runner, vocab_size: int) -> None:
        self.runner = runner
        self.vocab_size = vocab_size
        self.computing = False
        self.work = StepWork(0, 0, 0, 0, 0)  # of the last batch

    def run(self, batch: Sequence[ScheduledSequence]) -> np.ndarray:
        """Logits float32 (L, V)."""
        self.work = StepWork.of(batch)
        if self.computing:
            return self.runner.run(batch)
        return np.zeros((int(self.work.rows), self.vocab_size), np.float32)


class StepMeasurer:
    """Runs scenarios through an LLMEngine of its own and times whole steps of it.

    runner, sampler, tokenizer: of the model to be measured. The runner's KV cache is written to, so no sequence may
    live in it. config: of the engine that is to be simulated. params: how tokens are chosen; their cost is part of a
    step's. clock: seconds. Raises ParameterError if the engine is so small that nothing fits.
    """

    def __init__(
        self,
        runner: Runner,
        sampler: TokenSampler,
        tokenizer: Any,
        config: EngineConfig,
        *,
        params: SamplingParams | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._runner = _SkippingRunner(runner, tokenizer.vocab_size)
        self._clock = clock
        self._scenarios = scenarios(config)
        self.num_scenarios = len(self._scenarios)
        self.interrupted = False  # did Ctrl-C end `measure`?
        if not self._scenarios:
            raise ParameterError(
                f"no step can be measured in {config.num_kv_blocks} KV blocks of {config.block_size} tokens and a "
                f"max_model_len of {config.max_model_len}; allow more"
            )
        # Not what is measured: blocks whose content was never computed may not be found by anybody's prefix, and the
        # scenarios say themselves how a prompt is cut.
        config = replace(
            config,
            enable_prefix_caching=False,
            enable_chunked_prefill=True,
            static_batching=False,
            scheduling_policy="fcfs",
        )
        self._engine = LLMEngine(self._runner, sampler, tokenizer, config, clock=clock)
        self._params = replace(
            params or SamplingParams(temperature=0.0),
            max_tokens=None,
            min_tokens=2**20 if params is not None and params.min_tokens else 0,  # it costs a look at each row
            ignore_eos=True,
            stop_token_ids=None,
            stop=None,
            detokenize=False,
        )
        self._vocab_size = tokenizer.vocab_size
        self._new_id = RequestIds()
        self._random = random.Random(0)

    def scenarios(self) -> Iterator[list[Observation]]:
        """The measured steps of one scenario after another, without end.

        First all of them, in a random order. Then always one that the least time was spent on so far, so that short
        steps are measured many times: on a shared machine they vary the most. Raises what a step raises;
        ParameterError if a request fails.
        """
        self._fill()
        order = self._random.sample(self._scenarios, len(self._scenarios))
        spent = dict.fromkeys(order, 0.0)  # seconds
        while True:
            scenario = min(order, key=spent.__getitem__)
            begun = self._clock()
            yield list(self._steps(scenario))
            spent[scenario] += self._clock() - begun
            order.append(order.pop(order.index(scenario)))  # of those with the same time, the others go first

    def measure(self, seconds: float, progress: Progress | None = None) -> list[Observation]:
        """Steps of all scenarios, for about so many seconds. Raises as `scenarios` does.

        Ctrl-C ends it early, and sets `interrupted`; raises KeyboardInterrupt if a scenario is still missing then.
        """
        started = self._clock()
        observations: list[Observation] = []
        done = 0
        try:
            for steps in self.scenarios():
                observations += steps
                done += 1
                spent = self._clock() - started
                if progress is not None:
                    progress(spent, max(seconds, spent * max(1.0, self.num_scenarios / done)))
                if done >= self.num_scenarios and spent >= seconds:
                    break
        except KeyboardInterrupt:
            self.interrupted = True
            if done < self.num_scenarios:
                raise
        return observations

    def _steps(self, scenario: Scenario) -> Iterator[Observation]:
        """The measured steps of one scenario; none of its requests is left behind."""
        outputs = [self._add(scenario.context) for _ in range(scenario.residents)]
        try:
            if scenario.residents:  # all their prompts in one step
                self._step(scenario.residents * scenario.context)
            outputs += [self._add(scenario.start + tokens + scenario.rest) for tokens in scenario.newcomers]
            if scenario.start:
                self._step(scenario.residents + scenario.start)
            self._runner.computing = True
            for _ in range(1 if scenario.newcomers else DECODE_STEPS):
                begun = self._clock()
                self._step(scenario.residents + sum(scenario.newcomers))
                yield Observation(str(scenario), self._runner.work, self._clock() - begun)
        finally:
            self._runner.computing = False
            for output in outputs:
                self._engine.abort(output.request_id)

    def _fill(self) -> None:
        """Give every block the keys and values of a real prompt; memory that was never written is no memory yet."""
        kv_cache = getattr(self._runner.runner, "kv_cache", None)
        config = self._engine.config
        if kv_cache is None or config.longest_sequence < 2:
            return
        output = self._add(min(512, config.longest_sequence - 1))
        self._runner.computing = True
        try:
            while not output.metrics.num_output_tokens and not output.finished:
                self._step(self._engine.config.token_budget)
            written = self._engine.scheduler.running[0].block_table if self._engine.scheduler.running else []
            others = [block for block in range(config.num_kv_blocks) if block not in set(written)]
            if written:
                kv_cache.copy_blocks([written[i % len(written)] for i in range(len(others))], others)
        finally:
            self._runner.computing = False
            self._engine.abort(output.request_id)

    def _add(self, num_tokens: int) -> RequestOutput:
        prompt = self._random.choices(range(self._vocab_size), k=num_tokens)
        return self._engine.add_request(Request(self._new_id(), prompt, self._params))

    def _step(self, token_budget: int) -> None:
        """One step, with that budget: what is beyond it waits."""
        self._engine.scheduler.token_budget = token_budget
        for output in self._engine.step():
            answer = output.outputs[0]
            if answer.finish_reason == FinishReason.ERROR.value:
                raise ParameterError(f"the model cannot be measured: {answer.error}")
