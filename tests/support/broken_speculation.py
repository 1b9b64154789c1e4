"""Engines whose speculation is spoilt on purpose, as broken_engines.py does it for schedulers and block managers.

BROKEN[name](engine) spoils an engine that drafts with a draft model, before its first request.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np

from minserve.engine.llm_engine import LLMEngine
from minserve.engine.sampler import SampledToken
from minserve.engine.sampling_row import SamplingRow
from minserve.engine.speculative.speculation import Speculation
from minserve.request import Sequence

from .broken_engines import Break, replace

BROKEN: dict[str, Break] = {}


def fault(function: Break) -> Break:
    """Adds it to BROKEN."""
    BROKEN[function.__name__] = function
    return function


def speculation_of(eng: LLMEngine) -> Speculation:
    assert eng.speculation is not None
    return eng.speculation


def _on_verify(eng: LLMEngine, change: Callable[[Any, list, list], Any]) -> None:
    """change(logits, rows, drafts): what is verified instead."""
    verifier = speculation_of(eng).verifier
    replace(verifier, "verify", lambda real: lambda logits, rows, drafts: real(*change(logits, rows, drafts)))


@fault
def first_guess_is_accepted_without_a_check(eng: LLMEngine) -> None:
    """(ohdearquant/lattice#243)"""

    def make(real: Callable) -> Callable:
        def verify(logits: Any, rows: list, drafts: list) -> list:
            verdicts = real(logits, rows, drafts)
            for verdict, draft in zip(verdicts, drafts, strict=True):
                if draft is not None and isinstance(verdict[0], SampledToken):
                    verdict[0] = verdict[0]._replace(token_id=draft.token_ids[0])
            return verdicts

        return verify

    replace(speculation_of(eng).verifier, "verify", make)


@fault
def bonus_token_from_the_row_before(eng: LLMEngine) -> None:
    """The row that predicted the last guess is used once more."""

    def change(logits: np.ndarray, rows: list, drafts: list) -> tuple:
        logits, end = logits.copy(), 0
        for draft in drafts:
            end += 1 + len(draft or ())
            if draft is not None:
                logits[end - 1] = logits[end - 2]
        return logits, rows, drafts

    _on_verify(eng, change)


class _Forgetful(SamplingRow):
    def after(self, more: array[int]) -> SamplingRow:
        row = super().after(more)
        if row is not self:
            row.token_ids = self.token_ids + array("i", [self.token_ids[0]] * len(more))
        return row


@fault
def penalties_do_not_know_the_guesses_before(eng: LLMEngine) -> None:
    """Each guess is judged with the history as it was before the first one."""

    def forgetful(row: SamplingRow) -> SamplingRow:
        made = object.__new__(_Forgetful)
        made.__dict__.update(row.__dict__)
        return made

    _on_verify(eng, lambda logits, rows, drafts: (logits, [forgetful(row) for row in rows], drafts))


def _run_with_others(runner: Any, other: Callable[[Sequence], tuple[int, int] | None]) -> None:
    """Let the model compute another token in a place of a sequence. other: the place and the token, if there is one."""

    def make(real: Callable) -> Callable:
        def run(batch: list) -> Any:
            kept = []
            for item in batch:
                if (changed := other(item.seq)) is not None and changed[0] < len(item.seq.token_ids):
                    kept.append((item.seq.token_ids, changed[0], item.seq.token_ids[changed[0]]))
                    item.seq.token_ids[changed[0]] = changed[1]
            try:
                return real(batch)
            finally:
                for token_ids, place, token_id in kept:
                    token_ids[place] = token_id

        return run

    replace(runner, "run", make)


@fault
def kv_of_a_rejected_guess_stays(eng: LLMEngine) -> None:
    """The token that came in its place counts as computed by it: its keys and values are the guess's."""
    rejected: dict[Sequence, int] = {}

    def sampled(real: Callable) -> Callable:
        def broken(drawing: Any, verdicts: Any, report: Any) -> Any:
            for draw, verdict in zip(drawing, verdicts, strict=True):
                if draw.draft is not None and len(verdict) <= len(draw.draft):
                    rejected[draw.answer.seq] = draw.draft.token_ids[len(verdict) - 1]
            return real(drawing, verdicts, report)

        return broken

    replace(eng.outputs, "sampled", sampled)
    _run_with_others(eng.runner, lambda seq: (seq.num_computed_tokens, rejected.pop(seq)) if seq in rejected else None)


def guesses_are_registered_in_the_prefix_cache(eng: LLMEngine) -> None:
    """Blocks count as computed with what was only guessed of them, and keep the hashes that they got so.

    No drawn load shows it: that takes a prompt which goes on as somebody's wrong guess.
    """

    def make(real: Callable) -> Callable:
        def computed(batch: Any, logits: Any, report: Any) -> Any:
            for item in batch.items:
                if item.draft is not None:
                    seq, known, done = item.seq, len(item.seq.token_ids), item.seq.num_computed_tokens
                    seq.token_ids.extend(item.draft.token_ids)
                    seq.num_computed_tokens += item.num_tokens
                    eng.blocks.commit(seq)
                    del seq.token_ids[known:]
                    seq.num_computed_tokens = done
            return real(batch, logits, report)

        return computed

    replace(eng.outputs, "computed", make)


@fault
def blocks_of_rejected_guesses_are_kept(eng: LLMEngine) -> None:
    """They are used sooner or later, but until then nobody else has them."""
    replace(eng.blocks, "rewind", lambda _: lambda seq, num_tokens: None)


@fault
def kv_of_a_rejected_guess_stays_in_the_draft_model(eng: LLMEngine) -> None:
    """The draft model goes on from keys and values of a guess of its own that was wrong."""
    proposer: Any = speculation_of(eng).proposer
    wrong: dict[Sequence, tuple[int, int]] = {}  # of a shadow: place and token

    def follow(real: Callable) -> Callable:
        def broken(answer: Any, most: int) -> Any:
            known = proposer._shadows.get(answer.seq)
            before = array("i") if known is None else known.seq.token_ids[:]
            shadow = real(answer, most)
            for i, (guess, right) in enumerate(zip(before, shadow.seq.token_ids, strict=False)):
                if guess != right:
                    wrong[shadow.seq] = i, guess
            return shadow

        return broken

    replace(proposer, "_follow", follow)
    _run_with_others(proposer.runner, lambda seq: wrong.pop(seq, None))


@fault
def draft_model_is_not_asked_where_its_pool_is_full(eng: LLMEngine) -> None:
    """What is guessed for a sequence depends on the neighbours that take its memory."""
    proposer: Any = speculation_of(eng).proposer
    available = proposer.blocks.pool.num_blocks // 2
    replace(
        proposer.blocks,
        "allocate",
        lambda real: lambda seq, n: real(seq, n) if proposer.blocks.pool.num_used < available else None,
    )
    replace(proposer, "_alone", lambda _: lambda shadow: None)


@fault
def a_seeded_request_loses_its_draft_where_blocks_are_scarce(eng: LLMEngine) -> None:
    """A dropped draft means other random numbers, and with that another answer."""

    def make(real: Callable) -> Callable:
        def drafts(answers: Any) -> Any:
            return {seq: dataclasses.replace(draft, optional=True) for seq, draft in real(answers).items()}

        return drafts

    replace(speculation_of(eng), "drafts", make)


@fault
def a_preempted_request_resumes_without_its_draft(eng: LLMEngine) -> None:
    """All its tokens are computed in one go, so the next one is not verified but drawn."""
    eng.scheduler._resumes_with_a_draft = lambda seq: False  # type: ignore[method-assign]


@fault
def guesses_do_not_count_in_the_budget(eng: LLMEngine) -> None:
    """Only what is certain does, so a prompt's chunk takes the room that they need."""

    def make(real: Callable) -> Callable:
        def give(seq: Sequence, num_tokens: int, batch: Any, draft: Any = None) -> None:
            real(seq, num_tokens, batch, draft)
            if batch.items and batch.items[-1].seq is seq:
                batch.budget += batch.items[-1].num_drafted

        return give

    replace(eng.scheduler, "_give", make)


@fault
def everybody_is_judged_with_the_same_numbers(eng: LLMEngine) -> None:
    """The answers of one request share what accepts their guesses."""

    def one_index(row: SamplingRow) -> SamplingRow:
        made = object.__new__(SamplingRow)
        made.__dict__.update(row.__dict__, index=0)
        return made

    _on_verify(eng, lambda logits, rows, drafts: (logits, [one_index(row) for row in rows], drafts))
