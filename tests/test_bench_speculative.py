"""minserve bench --speculative on random models: what is served, what comes of the times, what is printed."""

from __future__ import annotations

import json
import re
from array import array
from itertools import count
from pathlib import Path

import pytest

from minserve import LLM
from minserve.bench.speculation_figures import DecodeSums, SpeculationFigures
from minserve.bench.speculative import SpeculationGain, Turn, measure_speculation
from minserve.bench.speculative_report import EXPLANATION, GAIN_COLUMNS, REASON_COLUMNS, gain_rows, lesson, reason_rows
from minserve.bench.speculative_workload import SpeculativeWorkload, speculative_workload
from minserve.cli import main
from minserve.commands.bench_speculative import default_draft
from minserve.commands.output import table
from minserve.engine.speculative.acceptance import expected_tokens, wall_time_gain
from minserve.errors import ChatTemplateError, MinserveError, ParameterError

from .support.speculative_events import step
from .support.tiny_llama import tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tiny_llama().write_gguf(folder / "tiny.gguf")
    tiny_llama(1, hidden_size=32, num_hidden_layers=1, num_attention_heads=2).write_gguf(folder / "draft.gguf")
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    """A model that is its own draft: each guess is right."""
    config = {"model": folder / "tiny.gguf", "num_speculative_tokens": 3, "adaptive": False}
    return LLM(folder / "tiny.gguf", backend="numpy", speculative_config=config)


def test_a_prompt_that_repeats(llm: LLM) -> None:
    load = speculative_workload(llm, "repeat", 3, answer_tokens=20, seed=4)
    assert len(load.prompts) == 6  # whole batches of at least 4
    for prompt in load.prompts:
        ids = prompt.token_ids
        length = next(n for n in count(1) if ids[:n] == ids[n : 2 * n])  # of the paragraph
        copies = (ids[:length] * 4)[: len(ids)]
        assert ids == copies
        assert 3 * length < len(ids) < 4 * length
        assert len(ids) + prompt.max_tokens <= llm.max_model_len
        assert (prompt.max_tokens, prompt.ignore_eos) == (20, True)
    assert len({tuple(prompt.token_ids) for prompt in load.prompts}) == 6
    assert speculative_workload(llm, "repeat", 3, answer_tokens=20, seed=4) == load
    assert load.longest == max(len(prompt.token_ids) for prompt in load.prompts) + 20


def test_tasks_of_the_same_length_share_a_batch(llm: LLM) -> None:
    load = speculative_workload(llm, "tasks", 16)
    lengths = [prompt.max_tokens for prompt in load.prompts]
    assert len(lengths) == 32
    assert lengths == sorted(lengths)
    assert not any(prompt.ignore_eos for prompt in load.prompts)
    assert len(speculative_workload(llm, "tasks", 50).prompts) == 50


def test_seeds_of_drawn_answers(llm: LLM) -> None:
    load = speculative_workload(llm, "text", 2, answer_tokens=8, temperature=0.7, seed=10)
    seeds = [request.sampling_params.seed for batch in load.batches() for request in batch]
    assert seeds == [10, 11, 12, 13]
    assert {request.sampling_params.seed for batch in load.batches(seeded=False) for request in batch} == {None}
    assert load.most_prompt_tokens == max(
        sum(len(request.prompt_token_ids) for request in batch) for batch in load.batches()
    )


def test_what_cannot_be_served_is_told(folder: Path, llm: LLM) -> None:
    with pytest.raises(ParameterError, match=r"answers of 250 tokens leave no room .* --answer-tokens"):
        speculative_workload(llm, "repeat", 1, answer_tokens=250)
    with pytest.raises(ParameterError, match="no task fits a context of 16 tokens"):
        speculative_workload(LLM(folder / "tiny.gguf", backend="numpy", max_model_len=16), "tasks", 1)
    llm_without = LLM(folder / "tiny.gguf", backend="numpy")
    llm_without.tokenizer.chat_template = None
    with pytest.raises(ChatTemplateError, match="has no chat template"):
        speculative_workload(llm_without, "tasks", 1)


def figures_of(drafts: list[int], gamma: int, seconds: float, draft_seconds: float) -> SpeculationFigures:
    """As if one answer, a step each, had had drafts of gamma with these numbers of right guesses, and gone on."""
    figures = SpeculationFigures()
    for number, right in enumerate(drafts):
        for event in step(number, (right + 1, right), gamma=gamma):
            figures(event)
    figures.decodes.seconds, figures.decodes.draft_seconds = seconds, draft_seconds
    return figures


def test_the_formula_is_the_papers() -> None:
    """Where each decode has gamma guesses, the prediction is wall_time_gain of the costs that were measured."""
    gamma = 4
    drafted = figures_of([4, 2, 0, 4, 1, 3, 4, 0], gamma, seconds=8 * 1.75, draft_seconds=8 * 0.25)
    plain = SpeculationFigures()
    plain.decodes = DecodeSums(10, 10, 0, 0, 10, 10.0)
    answers = [array("i", [1, 2])]
    turns = {
        "plain": [Turn(plain, 12.0, 11, answers)] * 3,
        "drafts": [Turn(drafted, 20.0, 27, answers)] * 3,
        "adaptive": [Turn(plain, 11.0, 11, answers)] * 3,
    }
    load = SpeculativeWorkload("text", [], 1)
    gain = SpeculationGain.of(load, turns)
    alpha = drafted.alpha
    assert alpha == 18 / (18 + 5)
    assert (gain.draft_share, gain.draft_cost, gain.verify_cost) == (0.25, 0.25 / 4, 1.5)
    assert gain.gain == pytest.approx(26 / 14.0)
    assert gain.whole_gain == pytest.approx((27 / 20) / (11 / 12))
    assert gain.adaptive_gain == 1.0
    assert gain.figures.predicted_tokens_a_decode == pytest.approx(expected_tokens(alpha, gamma))
    assert gain.paper_gain == pytest.approx(wall_time_gain(alpha, gamma, 0.0625))
    assert gain.formula_gain == pytest.approx(wall_time_gain(alpha, gamma, 0.0625, 1.5))
    assert gain.same_answers is True
    document = gain.document()
    assert document["formula_error"] == pytest.approx(gain.gain / gain.formula_gain - 1)
    assert document["alpha"] == alpha
    turns["drafts"] = [Turn(drafted, 20.0, 27, [array("i", [1, 3])])]
    assert SpeculationGain.of(load, turns).same_answers is False
    assert SpeculationGain.of(SpeculativeWorkload("text", [], 1, temperature=1.0), turns).same_answers is None
    assert len(gain_rows([gain])[0]) == len(GAIN_COLUMNS)
    assert len(reason_rows([gain])[0]) == len(REASON_COLUMNS)


def test_medians_over_turns() -> None:
    def turn(seconds: float) -> Turn:
        figures = SpeculationFigures()
        figures.decodes = DecodeSums(1, 1, 0, 0, 1, seconds)
        return Turn(figures, seconds, 1, [])

    turns = {"plain": [turn(1.0), turn(50.0), turn(2.0)], "drafts": [turn(1.0)], "adaptive": [turn(4.0), turn(4.0)]}
    gain = SpeculationGain.of(SpeculativeWorkload("text", [], 1), turns)
    assert (gain.gain, gain.adaptive_gain, gain.verify_cost, gain.draft_cost) == (2.0, 0.5, 0.5, None)
    assert (gain.paper_gain, gain.formula_gain) == (1.0, 2.0)


@pytest.mark.parametrize(
    ("gains", "text"),
    [
        ({1: 1.5, 4: 1.1}, "Drafts paid at every batch size that was measured (1, 4)."),
        ({1: 0.5, 4: 1.0}, "Drafts paid at no batch size that was measured (1, 4)."),
        ({1: 1.5, 4: 1.1, 8: 0.8}, "Drafts paid at batch size 1, 4, and cost more than they brought at 8."),
    ],
)
def test_the_lesson_in_a_sentence(gains: dict[int, float], text: str) -> None:
    def of(size: int, gain: float) -> SpeculationGain:
        return SpeculationGain(size, 1.0, gain, 1.0, gain, 1.0, 1.0, SpeculationFigures(), 1.0, 0.0, None, 1.0, None)

    assert lesson([of(size, gain) for size, gain in gains.items()]) == text


def test_the_tables_fit_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    """One table of fourteen columns broke each word in a terminal below 110."""
    figures = figures_of([4, 2, 0, 4, 1, 3, 4, 0], 4, seconds=14.0, draft_seconds=2.0)
    gain = SpeculationGain(128, 123456.0, 234567.0, 1.0, 12.34, 12.34, 12.34, figures, 1.0, 0.5, 0.125, 12.345, True)
    rows = gain_rows([gain]), reason_rows([gain])
    for columns, shown in zip((GAIN_COLUMNS, REASON_COLUMNS), rows, strict=True):
        table(columns, shown, right=columns)
    lines = [*capsys.readouterr().out.splitlines(), *EXPLANATION.splitlines()]
    assert len(lines) > 4
    assert max(map(len, lines)) <= 80
    header, values = lines[:2]
    assert header.split() == " ".join(GAIN_COLUMNS).split()
    assert "123,456" in values


def test_each_batch_is_served_as_one(llm: LLM) -> None:
    """Of a model that is its own draft, every guess is right, and the formula tells the tokens exactly."""
    loads = [speculative_workload(llm, "text", size, answer_tokens=10) for size in (1, 2)]
    seen: list[tuple[int, int]] = []
    measured = measure_speculation(llm, loads, 2, lambda done, total: seen.append((done, total)))
    assert not measured.interrupted
    assert seen == [(done, 12) for done in range(12)]
    assert [gain.batch_size for gain in measured.gains] == [1, 2]
    for gain in measured.gains:
        sums = gain.figures.decodes
        # 9 tokens behind the first: 4 + 4 + 1, the last without a guess, as there is room for one token alone
        assert (sums.decodes, sums.drafts, sums.guesses, sums.tokens) == (12, 8, 24, 36)
        assert sums.steps == 12 // gain.batch_size
        assert (gain.figures.alpha, gain.same_answers) == (1.0, True)
        assert gain.figures.predicted_tokens_a_decode == gain.figures.tokens_a_decode == 3.0
        assert gain.gain > 0
        assert gain.draft_cost is not None
        assert gain.draft_cost > 0


def test_ctrl_c_keeps_the_batch_sizes_that_were_measured(llm: LLM) -> None:
    loads = [speculative_workload(llm, "text", size, answer_tokens=4) for size in (1, 2)]

    def interrupt_at(turn: int) -> list[int]:
        def progress(done: int, total: int) -> None:
            if done == turn:
                raise KeyboardInterrupt

        measured = measure_speculation(llm, loads, 2, progress)
        assert measured.interrupted
        return [gain.batch_size for gain in measured.gains]

    assert interrupt_at(4) == [1]  # a turn of each way was over
    assert interrupt_at(7) == [1]
    with pytest.raises(KeyboardInterrupt):
        interrupt_at(2)


def test_nothing_is_measured_of_failures(folder: Path, tmp_path: Path) -> None:
    backend = tmp_path / "broken.py"
    backend.write_text(
        "from minserve.ops import reference\n\ndef add(x, y):\n    if x.shape[-1] == 32:\n        raise ValueError\n"
        "    return reference.add(x, y)\n",
        encoding="utf-8",
    )
    llm = LLM(folder / "tiny.gguf", backend=backend, speculative_config={"model": folder / "draft.gguf"})
    with pytest.raises(MinserveError, match="the draft failed while it was measured"):
        measure_speculation(llm, [speculative_workload(llm, "text", 1, answer_tokens=4)], 1)
    llm = LLM(folder / "tiny.gguf", backend="numpy", speculative_config={"method": "ngram"})
    with pytest.raises(MinserveError, match="no decodes to time"):
        measure_speculation(llm, [speculative_workload(llm, "text", 1, answer_tokens=1)], 1)


def bench(folder: Path, *args: str) -> int:
    command = ["bench", "--speculative", "--model", str(folder / "tiny.gguf"), "--backend", "numpy", "--turns", "1"]
    return main([*command, "--answer-tokens", "8", *args])


def test_the_command_prints_a_table_and_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draft = str(folder / "draft.gguf")
    args = ("--draft", draft, "--draft-tokens", "2", "--batch-sizes", "1,3", "--speculative-workload", "text")
    assert bench(folder, *args, "--seed", "3") == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith(f"Speculation: tiny on numpy, drafts by {draft}\n")
    assert re.search(r"\nbatch +tok/s +with drafts +gain +paper +formula +adaptive +whole\n", out)
    assert re.search(r"\nbatch +alpha +guesses +tokens +predicted +c +v\n", out)
    assert re.search(r"\nDrafts paid at ", out)
    document = json.loads(out.splitlines()[-1])
    assert document["command"] == "bench --speculative"
    assert document["workload"] == {"name": "text", "temperature": 0.0, "seed": 3}
    assert (document["speculative"]["num_speculative_tokens"], document["speculative"]["adaptive"]) == (2, False)
    assert [gain["batch_size"] for gain in document["gains"]] == [1, 3]
    for gain in document["gains"]:
        assert gain["gain"] == pytest.approx(gain["drafts_rate"] / gain["plain_rate"])
        assert gain["decode_steps"]["tokens"] > 0
        assert gain["same_answers"] is True
    assert document["interrupted"] is False


def test_the_default_is_prompt_lookup_on_answers_that_repeat(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(folder, "--batch-sizes", "2", "--prompt-lookup-max", "3") == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["workload"]["name"] == "repeat"
    assert (document["speculative"]["method"], document["speculative"]["prompt_lookup_max"]) == ("ngram", 3)
    assert default_draft("tiny") == "tiny-draft"
    assert default_draft("smollm2") == "ngram"


def test_who_looks_up_needs_not_say_ngram(capsys: pytest.CaptureFixture[str]) -> None:
    """On tiny, whose own draft model looks up nothing."""
    assert main(["bench", "--speculative", "-m", "tiny", "--prompt-lookup-max", "2", "--batch-sizes", "1", "--turns",
                 "1", "--answer-tokens", "4"]) == 0  # fmt: skip
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["speculative"]["method"] == "ngram"


def test_drawn_answers_and_a_picture(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "gain.html"
    args = (
        "--speculative-workload",
        "text",
        "-t",
        "0.8",
        "--batch-sizes",
        "1,2",
        "--draft",
        str(folder / "draft.gguf"),
    )
    assert bench(folder, *args, "--plot", str(picture)) == 0
    out = capsys.readouterr().out
    assert "drawn, with drafts and without from the same distribution" in out
    assert json.loads(out.splitlines()[-1])["gains"][0]["same_answers"] is None
    page = picture.read_text(encoding="utf-8")
    assert "<svg" in page
    assert all(f"<th>{name}</th>" in page for name in (*GAIN_COLUMNS, *REASON_COLUMNS))


MISTAKES = [
    (["--speculative", "--max-num-seqs", "3"], "--max-num-seqs has no effect with --speculative"),
    (["--speculative", "--always-draft"], "--always-draft has no effect with --speculative"),
    (["--speculative", "-n", "3"], "--num-requests has no effect with --speculative"),
    (["--speculative", "--no-prefix-cache"], "--enable-prefix-caching has no effect with --speculative"),
    (["--speculative", "--trace", "t.jsonl"], "--trace has no effect with --speculative"),
    (["--speculative", "--speculative-workload", "repaet"], "'repaet' is no workload (did you mean repeat?)"),
    (["--speculative", "--batch-sizes", "0"], "--batch-sizes: must be whole numbers of at least 1"),
    (["--speculative", "--answer-tokens", "1"], "--answer-tokens: must be a whole number of at least 2"),
    (["--speculative", "--overhead"], "not allowed with argument"),
    (["--batch-sizes", "1"], "--batch-sizes has no effect without --speculative"),
    (["--answer-tokens", "4"], "--answer-tokens has no effect without --speculative"),
    (["--overhead", "--draft", "ngram"], "--draft has no effect with --overhead"),
    (["--micro", "--draft-tokens", "2"], "--draft-tokens has no effect with --micro"),
    (["--predict", "--draft", "ngram"], "--draft has no effect with --predict"),
    (["--baseline", "no-draft"], "--baseline no-draft has no effect without --draft"),
]


@pytest.mark.parametrize(("options", "message"), MISTAKES, ids=[" ".join(options) for options, _ in MISTAKES])
def test_mistakes_are_told_before_a_model_is_loaded(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--model", "nowhere.gguf", *options]) == 2
    assert message in capsys.readouterr().err
