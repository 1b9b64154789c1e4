"""SpeculationFigures: from events written down by hand, and from an engine that guesses what it was told to."""

from __future__ import annotations

import pytest

from minserve import Request, SamplingParams
from minserve.bench.report import speculation_text
from minserve.bench.speculation_figures import SpeculationFigures
from minserve.engine.speculative.acceptance import expected_tokens
from minserve.engine.speculative.fixed_proposer import FixedProposer

from .support.hash_model import hash_engine
from .support.speculative_events import step

# steps -> (examined and right guesses by position, tokens of drafts, decodes and tokens in steps without prompts)
CASES = {
    "nothing": ([], [], [], 0, (0, 0)),
    "no drafts": ([step(0, (1, None))], [], [], 0, (1, 1)),
    "all right, and the bonus token": ([step(0, (4, 3))], [1, 1, 1], [1, 1, 1], 4, (1, 4)),
    "the first one wrong: the others are not looked at": ([step(0, (1, 0))], [1, 0, 0], [0, 0, 0], 1, (1, 1)),
    "the second one wrong": ([step(0, (2, 1))], [1, 1, 0], [1, 0, 0], 2, (1, 2)),
    "the answer ends at a right guess: what lies behind it is nobody's": (
        [step(0, (2, 3), ends="a")], [1, 1, 0], [1, 1, 0], 2, (1, 2),
    ),
    "the answer ends before the wrong one": ([step(0, (1, 2), ends="a")], [1, 0, 0], [1, 0, 0], 1, (1, 1)),
    "the target ends it in place of the wrong one": ([step(0, (3, 2), ends="a")], [1, 1, 1], [1, 1, 0], 3, (1, 3)),
    "two in a step, one without": (
        [step(0, (4, 3), (1, None)), step(1, (2, 1), (1, 0))], [3, 2, 1], [2, 1, 1], 7, (4, 8),
    ),
    "beside a prompt: drafts count, the step's decodes do not": (
        [step(0, (4, 3), prefill=5)], [1, 1, 1], [1, 1, 1], 4, (0, 0),
    ),
    "its request failed in the step": ([step(0, (0, 2), ends="a")], [], [], 0, (1, 0)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_table_of_events_by_hand(case: tuple) -> None:
    steps, examined, right, num_tokens, decodes = case
    figures = SpeculationFigures()
    for events in steps:
        for event in events:
            figures(event)
    assert (figures.examined, figures.right) == (examined, right)
    assert figures.num_tokens == num_tokens
    assert (figures.decodes.decodes, figures.decodes.tokens) == decodes
    assert figures.alpha == (sum(right) / sum(examined) if examined else None)


def test_rates_and_seconds() -> None:
    """Two answers, three steps; the third one has no drafts."""
    figures = SpeculationFigures()
    for events in (
        step(0, (4, 3), (2, 1)),
        step(1, (1, 0), (3, 2)),
        step(2, (1, None), (1, None), ends="ab"),
    ):
        for event in events:
            figures(event)
    assert (figures.num_right, figures.num_examined) == (6, 9)
    assert figures.alphas == [3 / 4, 2 / 3, 1 / 2]
    assert (figures.num_drafts, figures.num_guesses, figures.guesses_a_draft) == (4, 12, 3.0)
    assert (figures.tokens_a_draft, figures.tokens_a_decode) == (10 / 4, 12 / 6)
    assert figures.guesses_a_decode == 2.0
    assert (figures.step_seconds, figures.draft_seconds, figures.verify_seconds) == (3.0, 0.5, 1.0)
    assert figures.seconds_a_guess == 0.5 / 12
    # Of answer a (6 tokens) the second draft could bring 1 token more than its own, of b (6 tokens) likewise 3.
    predicted = (
        expected_tokens(2 / 3, 3) + expected_tokens(2 / 3, 3) + expected_tokens(2 / 3, 1) + expected_tokens(2 / 3, 3)
    ) / 4
    assert figures.predicted_tokens_a_draft == pytest.approx(predicted)
    assert figures.predicted_tokens_a_decode == pytest.approx((4 * predicted + 2) / 6)
    document = figures.document()
    assert (document["alpha"], document["alpha_at"], document["num_accepted_tokens"]) == (6 / 9, figures.alphas, 6)
    text = speculation_text(figures)
    assert "6 of 9 guesses right (alpha 0.67)" in text
    assert f"4 of 6 decodes had some, 2.50 tokens each (predicted {predicted:.2f})" in text
    assert "draft 500 ms, verify 1.00 s" in text


def test_a_step_that_was_interrupted_counts_nothing() -> None:
    figures = SpeculationFigures()
    for event in step(0, (2, 1))[:2]:  # it drafted, then Ctrl-C came
        figures(event)
    for event in step(1, (2, 1)):
        figures(event)
    assert (figures.num_drafts, figures.decodes.drafts, figures.num_examined, figures.num_right) == (1, 1, 2, 1)


def test_of_an_answer_that_is_not_over_every_guess_could_still_be_used() -> None:
    figures = SpeculationFigures()
    for event in step(0, (3, 2)):
        figures(event)
    assert figures.predicted_tokens_a_draft == pytest.approx(expected_tokens(2 / 3, 3))


@pytest.mark.parametrize("wrong", [(), (3,), (0, 1, 2, 5, 11), tuple(range(24))], ids=str)
def test_of_an_engine_that_guesses_what_it_is_told(wrong: tuple[int, ...]) -> None:
    """The right answer is known; of the guesses, those at some places of it are made wrong."""
    options = {"max_model_len": 64, "num_kv_blocks": 16, "block_size": 4}
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    plain = hash_engine(**options)
    output = plain.add_request(Request("r", [1, 2, 3], params))
    while plain.has_unfinished:
        plain.step()
    answer = output.outputs[0].token_ids
    guesses = [(token + 1) % 256 if place in wrong else token for place, token in enumerate(answer)]
    engine = hash_engine(lambda _: FixedProposer(guesses), num_speculative_tokens=4, **options)
    figures, stop = SpeculationFigures.attach(engine)
    output = engine.add_request(Request("r", [1, 2, 3], params))
    while engine.has_unfinished:
        engine.step()
    stop()
    assert output.outputs[0].token_ids == answer
    # By hand: from place 1 on (the prompt's step gives the first token), up to 4 guesses, to the first wrong one.
    place, drafts, examined, right = 1, 0, 0, 0
    while place < 24:
        room = min(4, 24 - place - 1)
        good = next((i for i in range(room) if place + i in wrong), room)
        drafts, examined, right = drafts + (room > 0), examined + min(good + 1, room), right + good
        place += good + 1
    assert (figures.num_drafts, figures.num_examined, figures.num_right) == (drafts, examined, right)
    assert figures.decodes.tokens == 23
    assert (output.metrics.num_draft_tokens, output.metrics.num_accepted_tokens) == (figures.num_guesses, right)
    if not wrong:
        assert figures.predicted_tokens_a_draft == figures.tokens_a_draft
