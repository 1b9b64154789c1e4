"""measure_speculation: the same requests with guesses and without, in turns, a batch size after another."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from minserve.bench.speculation_figures import SpeculationFigures
from minserve.bench.speculative_workload import SpeculativeWorkload
from minserve.engine.speculative.pace import Pace
from minserve.errors import MinserveError
from minserve.request import Request, RequestOutput

if TYPE_CHECKING:
    from minserve.engine.llm_engine import LLMEngine
    from minserve.llm import LLM

# plain: without guesses. drafts: guesses in every step. adaptive: guesses while measurement says that they pay.
WAYS = ("plain", "drafts", "adaptive")


@dataclass(frozen=True)
class Turn:
    """All requests of a workload, served once. seconds, num_tokens: of everything, with the prompts."""

    figures: SpeculationFigures
    seconds: float
    num_tokens: int
    answers: list[array[int]]

    @property
    def seconds_a_decode(self) -> float:
        """Of steps that computed decodes alone: what they took for each sequence in them."""
        sums = self.figures.decodes
        return sums.seconds / sums.decodes

    @property
    def draft_seconds_a_decode(self) -> float:
        """The part of it that went into guessing."""
        sums = self.figures.decodes
        return sums.draft_seconds / sums.decodes

    @property
    def decode_rate(self) -> float:
        """Tokens a second, in steps that computed decodes alone."""
        sums = self.figures.decodes
        return sums.tokens / sums.seconds

    @property
    def whole_rate(self) -> float:
        """Tokens a second, with the prompts' steps and what lies between steps."""
        return self.num_tokens / self.seconds


@dataclass(frozen=True)
class SpeculationGain:
    """What guesses brought at one batch size: medians over turns; gains are ratios of medians.

    plain_rate, drafts_rate, adaptive_rate: tokens a second in steps without prompts. gain: drafts_rate / plain_rate.
    whole_gain: the same for everything, prompts and what lies between steps too.
    figures: of one turn with guesses. (The same ones are right in each.)
    seconds_a_decode: of a plain step, for each sequence in it; the unit of the next three, which are of steps with
    guesses. draft_share: guessing, a decode. draft_cost: guessing, a guess: the paper's c; None if none was made.
    verify_cost: all else, a decode; the paper takes it for 1.
    same_answers: did each request get the same tokens with guesses as without? None where answers are drawn, whose
    distribution alone is the same.
    """

    batch_size: int
    plain_rate: float
    drafts_rate: float
    adaptive_rate: float
    gain: float
    adaptive_gain: float
    whole_gain: float
    figures: SpeculationFigures
    seconds_a_decode: float
    draft_share: float
    draft_cost: float | None
    verify_cost: float
    same_answers: bool | None

    @classmethod
    def of(cls, load: SpeculativeWorkload, turns: dict[str, list[Turn]]) -> SpeculationGain:
        """From at least one turn of each of WAYS."""
        rates = {way: median(turn.decode_rate for turn in turns[way]) for way in WAYS}
        whole = {way: median(turn.whole_rate for turn in turns[way]) for way in WAYS}
        plain = median(turn.seconds_a_decode for turn in turns["plain"])
        draft_share = median(turn.draft_seconds_a_decode for turn in turns["drafts"]) / plain
        rest = median(turn.seconds_a_decode - turn.draft_seconds_a_decode for turn in turns["drafts"])
        figures = turns["drafts"][-1].figures
        guesses = figures.guesses_a_decode
        same = turns["plain"][-1].answers == turns["drafts"][-1].answers
        return cls(
            load.batch_size,
            rates["plain"],
            rates["drafts"],
            rates["adaptive"],
            rates["drafts"] / rates["plain"],
            rates["adaptive"] / rates["plain"],
            whole["drafts"] / whole["plain"],
            figures,
            plain,
            draft_share,
            draft_share / guesses if guesses else None,
            rest / plain,
            same if load.temperature == 0 else None,
        )

    def predicted_gain(self, verify_cost: float) -> float:
        """tokens / (gamma c + verify_cost), all a decode, with tokens by the paper's formula.

        That is acceptance.wall_time_gain, and with a verify_cost of 1 the paper's theorem 3.8, if each decode has
        gamma guesses; here some have fewer or none, and the means over them stand in it.
        """
        return (self.figures.predicted_tokens_a_decode or 1.0) / (self.draft_share + verify_cost)

    @property
    def paper_gain(self) -> float:
        """What the paper's formula says: verifying gamma guesses takes as long as computing one token."""
        return self.predicted_gain(1.0)

    @property
    def formula_gain(self) -> float:
        """What it says with the verify_cost that was measured."""
        return self.predicted_gain(self.verify_cost)

    def document(self) -> dict[str, Any]:
        """Every figure, for JSON."""
        shown = dict(vars(self))
        figures = shown.pop("figures").document()
        return {
            **shown,
            "paper_gain": self.paper_gain,
            "formula_gain": self.formula_gain,
            "formula_error": self.gain / self.formula_gain - 1.0,
            **figures,
        }


@dataclass(frozen=True)
class SpeculationGains:
    """By batch size. interrupted: did Ctrl-C end the measuring? What was not measured by then is missing."""

    gains: list[SpeculationGain]
    interrupted: bool


def measure_speculation(
    llm: LLM, loads: Sequence[SpeculativeWorkload], turns: int, progress: Callable[[int, int], None] | None = None
) -> SpeculationGains:
    """Serve each load `turns` times in each of WAYS, in turns, so that a slow moment of the machine falls on all.

    llm: with speculation. Prompts are computed in each turn (there is no prefix cache), all of a batch in one step, so
    that the steps behind it are decodes alone. Ctrl-C ends it: batch sizes with a turn of each way are kept.
    progress(done, total) counts turns of a way.

    Raises MinserveError if a request or the draft fails; KeyboardInterrupt, if nothing was measured by then.
    """
    gains: list[SpeculationGain] = []
    total, done = len(loads) * turns * len(WAYS), 0
    interrupted = False
    for load in loads:
        measured: dict[str, list[Turn]] = {way: [] for way in WAYS}
        try:
            engines = {way: _engine(llm, load, way) for way in WAYS}
            for number in range(turns):
                for way in WAYS if number % 2 == 0 else reversed(WAYS):
                    if progress is not None:
                        progress(done, total)
                    done += 1
                    measured[way].append(_turn(engines[way], load, seeded=way != "adaptive"))
        except KeyboardInterrupt:
            interrupted = True
        if all(measured.values()):
            gains.append(SpeculationGain.of(load, measured))
        if interrupted:
            break
    if not gains:
        raise KeyboardInterrupt
    return SpeculationGains(gains, interrupted)


def _engine(llm: LLM, load: SpeculativeWorkload, way: str) -> LLMEngine:
    """An engine in which a batch of the load runs as one."""
    config = llm.engine.config
    guesses = 0 if way == "plain" else config.num_speculative_tokens
    blocks = 1 + -(-(load.longest + guesses) // config.block_size)
    engine = llm.new_engine(
        num_speculative_tokens=guesses,
        max_num_seqs=load.batch_size,
        num_kv_blocks=load.batch_size * blocks,
        max_num_batched_tokens=max(load.most_prompt_tokens, load.batch_size * (guesses + 1)),
        enable_prefix_caching=False,
    )
    if engine.speculation is not None:
        engine.speculation.pace = Pace(enabled=way == "adaptive")
    return engine


def _turn(engine: LLMEngine, load: SpeculativeWorkload, *, seeded: bool) -> Turn:
    """Serve the load once."""
    figures, stop = SpeculationFigures.attach(engine)
    batches = load.batches(seeded=seeded)
    outputs: list[RequestOutput] = []
    started = time.perf_counter()
    try:
        for batch in batches:
            outputs += _serve(engine, batch)
    finally:
        stop()
    seconds = time.perf_counter() - started
    _check(engine, outputs, figures)
    answers = [array("i", output.outputs[0].token_ids) for output in outputs]
    return Turn(figures, seconds, sum(map(len, answers)), answers)


def _serve(engine: LLMEngine, batch: Sequence[Request]) -> list[RequestOutput]:
    outputs = [engine.add_request(request) for request in batch]
    while engine.has_unfinished:
        engine.step()
    return outputs


def _check(engine: LLMEngine, outputs: Sequence[RequestOutput], figures: SpeculationFigures) -> None:
    """Raise MinserveError if there is nothing to compare."""
    for output in outputs:
        if output.outputs[0].error is not None:
            raise MinserveError(f"{output.request_id} failed while it was measured: {output.outputs[0].error}")
    if engine.speculation is not None and engine.speculation.error is not None:
        raise MinserveError(f"the draft failed while it was measured: {engine.speculation.error}")
    if not figures.decodes.tokens:
        raise MinserveError("no answer has a second token, so there are no decodes to time; take another workload")
