"""Tasks put to a model: rates with their intervals, confidence, and answers that are cut, fail or never end."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from minserve import LLM, SamplingParams
from minserve.errors import ChatTemplateError, ParameterError
from minserve.quantize.rates import Z_95, Rate, area_under_curve, wilson_interval
from minserve.quantize.task_evaluation import MARGIN, evaluate_tasks
from minserve.quantize.task_report import TaskOutcome, TaskReport
from minserve.tasks.suite import held_out_tasks, suite_digest
from minserve.tasks.task import Task
from minserve.text.chat_template import ChatTemplate
from minserve.text.tokenizer import Tokenizer

from .support.scripted_model import BYTES, EOS, engine
from .support.tiny_llama import tiny_llama

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"

# --- rates ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_right", "num_tasks", "low", "high"),
    [  # the roots of (1 + z^2/n) p^2 - (2m + z^2/n) p + m^2, worked out apart with z^2 = 3.84146
        (0, 10, 0.0, 0.27753),  # z^2 / (n + z^2) = 3.84146 / 13.84146
        (10, 10, 0.72247, 1.0),
        (5, 10, 0.23659, 0.76341),
        (1, 1, 0.20655, 1.0),
        (45, 50, 0.78640, 0.95652),
        (98, 100, 0.92999, 0.99450),
        (1400, 1529, 0.90064, 0.92854),
    ],
)
def test_wilson_interval(num_right: int, num_tasks: int, low: float, high: float) -> None:
    found = wilson_interval(num_right, num_tasks)
    assert found == pytest.approx((low, high), abs=1e-5)
    assert Rate.of(num_right, num_tasks) == Rate(num_right / num_tasks, *found, num_right, num_tasks)


@pytest.mark.parametrize("num_tasks", [1, 7, 50])
def test_the_bounds_are_the_shares_that_the_measured_one_is_just_not_too_far_from(num_tasks: int) -> None:
    """The definition: |measured - p| = z sqrt(p (1 - p) / n) at both ends."""
    for num_right in range(num_tasks + 1):
        measured = num_right / num_tasks
        for p in wilson_interval(num_right, num_tasks):
            assert abs(measured - p) == pytest.approx(Z_95 * math.sqrt(p * (1 - p) / num_tasks), abs=1e-9)


@pytest.mark.parametrize(("num_right", "num_tasks"), [(0, 0), (-1, 4), (5, 4), (1, -1)])
def test_a_rate_of_nothing(num_right: int, num_tasks: int) -> None:
    with pytest.raises(ParameterError, match="a rate needs"):
        Rate.of(num_right, num_tasks)


def test_the_mean_of_cells_of_one_size_is_their_common_rate() -> None:
    cells = [Rate.of(9, 10), Rate.of(4, 10), Rate.of(10, 10)]
    found, whole = Rate.mean(cells), Rate.of(23, 30)
    assert dataclasses.astuple(found) == pytest.approx(dataclasses.astuple(whole))
    assert dataclasses.astuple(Rate.mean(cells[:1])) == pytest.approx(dataclasses.astuple(cells[0]))


def test_a_small_cell_counts_as_much_and_makes_the_mean_less_sure() -> None:
    """Two cells of 2 and 50 tasks are worth 2^2 / (1/2 + 1/50) = 100/13 tasks together."""
    found = Rate.mean([Rate.of(1, 2), Rate.of(50, 50)])
    assert (found.rate, found.num_right, found.num_tasks) == (0.75, 51, 52)
    assert (found.low, found.high) == pytest.approx(wilson_interval(75 / 13, 100 / 13))
    with pytest.raises(ParameterError, match="at least one cell"):
        Rate.mean([])


@pytest.mark.parametrize(
    ("right", "wrong", "area"),
    [
        ([0.9, 0.8], [0.1], 1.0),
        ([0.1], [0.9, 0.8], 0.0),
        ([0.5], [0.5], 0.5),
        ([0.3, 0.7], [0.5], 0.5),
        ([0.9, 0.5, 0.5], [0.5, 0.1], 5 / 6),  # of six pairs four, and two ties: (4 + 2/2) / 6
        ([0.2, 0.2], [0.2, 0.2, 0.2], 0.5),
        ([0.9], [], None),
        ([], [0.9], None),
        ([], [], None),
    ],
)
def test_area_under_the_curve(right: list[float], wrong: list[float], area: float | None) -> None:
    assert area_under_curve(right, wrong) == (None if area is None else pytest.approx(area))


def test_area_under_the_curve_pair_by_pair() -> None:
    rng = random.Random(0)
    for _ in range(50):
        right, wrong = ([rng.randint(0, 12) / 12 for _ in range(rng.randint(1, 30))] for _ in range(2))
        pairs = [(a > b) + (a == b) / 2 for a in right for b in wrong]
        assert area_under_curve(right, wrong) == pytest.approx(sum(pairs) / len(pairs))


# --- a report ------------------------------------------------------------------------------------------------------


def outcome(
    family: str, level: int, right: bool, confidence: float | None = 0.5, error: str | None = None
) -> TaskOutcome:
    task = Task(family, level, f"{family} ?", "!")
    return TaskOutcome(task, "!" if right else "?", right, confidence, 3, 2, error)


def report(*outcomes: TaskOutcome) -> TaskReport:
    return TaskReport(outcomes, tuple(o.task for o in outcomes), 2.0)


def test_a_report_counts_cells_families_and_levels() -> None:
    found = report(
        outcome("add", 1, True, 0.9),
        outcome("sort", 1, False, 0.2),
        outcome("add", 2, True, 0.6),
        outcome("sort", 2, True, 0.4),
        outcome("add", 2, False, 0.7),
        outcome("add", 2, False, None, error="NonFiniteLogitsError"),
    )
    rates = {cell: (rate.num_right, rate.num_tasks) for cell, rate in found.cells.items()}
    assert rates == {("add", 1): (1, 1), ("sort", 1): (0, 1), ("add", 2): (1, 3), ("sort", 2): (1, 1)}
    assert {name: rate.rate for name, rate in found.families.items()} == pytest.approx({"add": 2 / 3, "sort": 0.5})
    assert {level: rate.rate for level, rate in found.levels.items()} == pytest.approx({1: 0.5, 2: 2 / 3})
    assert found.overall.rate == pytest.approx((1 + 0 + 1 / 3 + 1) / 4)  # not 3 of 6
    assert (found.overall.num_right, found.overall.num_tasks) == (3, 6)
    assert found.auc == pytest.approx(4 / 6)  # right 0.9 0.6 0.4, wrong 0.2 0.7; the failed one says nothing
    assert found.family_aucs == {"add": pytest.approx(1 / 2), "sort": pytest.approx(1.0)}
    assert [o.task.family for o in found.wrong] == ["sort", "add", "add"]
    assert len(found.failed) == 1
    assert (found.num_prompt_tokens, found.num_output_tokens) == (18, 12)


def test_a_report_as_json() -> None:
    found = report(outcome("add", 1, True, 0.9), outcome("sort", 1, False, 0.2))
    document = json.loads(json.dumps(found.document(), allow_nan=False))
    assert document["suite"] == suite_digest(found.tasks)
    assert document["cells"]["add 1"] == {"rate": 1.0, "low": pytest.approx(0.20655, abs=1e-5), "high": 1.0} | {
        "num_right": 1,
        "num_tasks": 1,
    }
    assert document["families"]["sort"]["auc"] is None
    assert document["levels"]["1"]["rate"] == document["overall"]["rate"] == 0.5
    assert (document["auc"], document["num_answered"], document["interrupted"]) == (1.0, 2, False)
    empty = TaskReport((), found.tasks, 0.0, interrupted=True).document()
    assert (empty["overall"], empty["auc"], empty["num_answered"], empty["num_tasks"]) == (None, None, 0, 2)


# --- an evaluation over a scripted model ---------------------------------------------------------------------------


def logits(token: int, probability: float) -> np.ndarray:
    """float32 (257,): that token has that probability, the others the same."""
    row = np.zeros(257, np.float32)
    row[token] = math.log(256 * probability / (1 - probability))
    return row


def scripted_llm(answers: list[Callable[[int], object]], template: str | None = TEMPLATE, **options: object) -> LLM:
    """answers[i](n): what comes after n tokens of the answer to task i."""
    tokenizer = Tokenizer(dataclasses.replace(BYTES.vocabulary, chat_template=template))
    eng = engine(lambda request_id, output: answers[int(request_id.split("-")[1])](len(output)), **options)
    return SimpleNamespace(  # type: ignore[return-value]
        engine=eng,
        tokenizer=tokenizer,
        chat_template=None if template is None else ChatTemplate(template),
        model_file=SimpleNamespace(name="scripted"),
    )


def saying(text: str, *probabilities: float) -> Callable[[int], object]:
    """The text and its end; probabilities of its tokens in order, the last one for all that follow."""
    data = [*text.encode(), EOS]

    def answer(n: int) -> object:
        return logits(data[min(n, len(data) - 1)], probabilities[min(n, len(probabilities) - 1)])

    return answer


def never_ending(text: str) -> Callable[[int], object]:
    """The text, then spaces without end."""
    return lambda n: logits(text.encode()[n] if n < len(text) else 32, 0.9)


def raising(error: BaseException) -> Callable[[int], object]:
    def answer(n: int) -> object:
        raise error

    return answer


TASKS = [
    Task("add", 1, "add 1+2=", "3"),
    Task("add", 1, "add 4+4=", "8"),
    Task("add", 2, "add 50+60=", "110"),
    Task("sort", 1, "sort 312", "123"),
    Task("sort", 1, "sort 645", "456"),
]


def test_right_and_wrong_answers_and_the_confidence_in_them() -> None:
    answers = [
        saying("3", 0.9, 0.8),  # less sure of the end than of the digit
        saying(" 8\n", 0.99),
        saying("111", 0.9, 0.3, 0.6),
        saying("123", 0.7),
        saying("45", 0.65),
    ]
    llm = scripted_llm(answers)
    seen: list[tuple[int, int]] = []
    found = evaluate_tasks(llm, TASKS, progress=lambda done, total: seen.append((done, total)))
    assert [o.task for o in found.outcomes] == list(found.tasks) == TASKS
    assert [o.right for o in found.outcomes] == [True, True, False, True, False]
    assert [o.text for o in found.outcomes] == ["3", " 8\n", "111", "123", "45"]
    assert [o.confidence for o in found.outcomes] == pytest.approx([0.8, 0.99, 0.3, 0.7, 0.65], rel=1e-5)
    assert [o.num_output_tokens for o in found.outcomes] == [2, 4, 4, 4, 3]  # with the end token
    assert [o.num_prompt_tokens for o in found.outcomes] == [len(task.prompt) + 1 for task in TASKS]
    assert found.auc == 1.0
    assert (found.interrupted, found.failed, llm.engine.has_unfinished) == (False, [], False)
    assert seen == sorted(seen)
    assert seen[-1] == (5, 5)
    assert max(llm.engine.runner.batches) == 5  # all of them at once


def test_an_answer_that_does_not_end_is_wrong_and_is_cut_a_margin_after_the_right_length() -> None:
    found = evaluate_tasks(scripted_llm([never_ending("3"), never_ending("no")]), TASKS[:2])
    assert [o.right for o in found.outcomes] == [False, False]  # the first one says 3, but goes on
    assert [o.num_output_tokens for o in found.outcomes] == [1 + MARGIN, 1 + MARGIN]


def test_an_answer_as_long_as_it_may_be_is_right() -> None:
    padded = "3" + " " * (MARGIN - 1)  # and its end is the last token
    assert evaluate_tasks(scripted_llm([saying(padded, 0.9)]), TASKS[:1]).outcomes[0].right


def test_a_request_that_fails_is_wrong_and_the_others_are_answered() -> None:
    late = lambda n: logits(ord("8"), 0.4) if n == 0 else np.full(257, np.nan, np.float32)  # noqa: E731
    found = evaluate_tasks(scripted_llm([saying("3", 0.9), late, raising(ValueError("mine"))]), TASKS[:3])
    assert [o.right for o in found.outcomes] == [True, False, False]
    assert "NaN" in str(found.outcomes[1].error)
    assert "mine" in str(found.outcomes[2].error)
    assert found.outcomes[2].confidence is None
    assert found.failed == list(found.outcomes[1:])
    assert found.auc is None  # nothing that the model got wrong itself


def test_ctrl_c_keeps_what_was_answered() -> None:
    """Three at a time; the interrupt comes in the second round, and nothing of it stays in the engine."""
    answers = [saying("3", 0.9), saying("8", 0.9), saying("110", 0.9), saying("123", 0.9), raising(KeyboardInterrupt())]
    llm = scripted_llm(answers, max_num_seqs=3)
    found = evaluate_tasks(llm, TASKS)
    assert found.interrupted
    assert {o.task for o in found.outcomes} >= set(TASKS[:2])
    assert TASKS[4] not in {o.task for o in found.outcomes}
    assert all(o.right for o in found.outcomes)
    assert found.tasks == tuple(TASKS)
    assert not llm.engine.has_unfinished
    assert llm.engine.blocks.pool.num_used == 0


def test_nothing_runs_if_a_task_cannot() -> None:
    llm = scripted_llm([saying("3", 0.9)] * 2, max_model_len=12)
    long = Task("echo", 1, "echo " + "word " * 5, "word")
    with pytest.raises(ParameterError, match="the prompt has 31 tokens and the limit is 12"):
        evaluate_tasks(llm, [TASKS[0], long])
    assert not llm.engine.has_unfinished
    assert llm.engine.runner.steps == []
    with pytest.raises(ParameterError, match="there are no tasks"):
        evaluate_tasks(llm, [])


def test_a_model_without_a_chat_template_is_refused() -> None:
    with pytest.raises(
        ChatTemplateError, match="scripted has no chat template, and tasks are put as a user's messages"
    ):
        evaluate_tasks(scripted_llm([], template=None), TASKS)


# --- and over a real one -------------------------------------------------------------------------------------------


def test_the_answers_are_those_of_llm_chat(tmp_path: Path) -> None:
    """A random model: its greedy answers, each asked alone, and the probability of their least probable token."""
    llm = LLM(tiny_llama().write_gguf(tmp_path / "tiny.gguf"), backend="numpy")
    tasks = held_out_tasks(1, families=["add", "flip"], levels=[1, 2])
    found = evaluate_tasks(llm, tasks)
    for task, given in zip(tasks, found.outcomes, strict=True):
        longest = len(llm.tokenizer.encode(task.answer)) + MARGIN
        params = SamplingParams(temperature=0, max_tokens=longest, logprobs=1)
        (alone,) = llm.chat([{"role": "user", "content": task.prompt}], params)
        answer = alone.outputs[0]
        assert given.text == answer.text
        assert answer.logprobs is not None
        best = [max(entry.logprob for entry in entries.values()) for entries in answer.logprobs]
        assert given.confidence == pytest.approx(math.exp(min(best)), rel=1e-5)
        assert given.num_prompt_tokens == len(alone.prompt_token_ids)
    assert not any(o.right for o in found.outcomes)
