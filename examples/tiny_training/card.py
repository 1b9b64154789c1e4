"""The model card: what the trained files are worth, measured with minserve itself."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path

from minserve import LLM, SamplingParams
from minserve.events import Accepted, RejectedDraft
from minserve.quantize.evaluation import perplexity
from minserve.quantize.task_evaluation import MARGIN, evaluate_tasks
from minserve.quantize.task_report import TaskReport
from minserve.tasks.families import FAMILIES
from minserve.tasks.suite import held_out_tasks
from minserve.tasks.task import Task

from .data import plays

_NUM_TASKS = 100  # a family and level
_NUM_CONVERSATIONS, _QUESTIONS = 400, 3  # conversations, and the questions of each
_TEXTS, _BEGINNING, _LONGEST = 64, 120, 128  # pieces of text to go on from, their characters, tokens of an answer

_HEAD = """\
# tiny and tiny-draft

Two small models of the Llama architecture that come with minserve, so that everything in it can be tried, taught and
tested without a download. `tiny` is to be served; `tiny-draft`, a tenth of its size, is to guess what `tiny` will say
(speculative sampling), or to answer what is easy in its place (routing). Both speak in the manner of Shakespeare's
plays, to no great purpose, and do short exercises whose answers a program can verify.

Trained by `examples/train_tiny.py` (PyTorch, CPU) on the plays in `examples/tiny_training/plays.txt`, which are in the
public domain, and on exercises that `minserve.tasks` makes up. Weights: Apache-2.0, float16. `tiny-int8` and
`tiny-draft-int8` are the same files, rounded to 8 bits when they are opened.
"""
_LIMITS = """\
## What they cannot

Most of it. They are no assistants, and nothing that they say is information.

- **Larger sizes.** Every size up to the largest of the table was trained on, and none beyond it, where nothing is
  promised. Of questions that are one larger, {target} answers exactly:
  {larger}.
- **Other families.** Nobody showed them how to subtract, or to sort letters. They answer such a question all the same.
- **Other wording.** An exercise has one form, the family's name and the question: `add 12+7=` is answered, "What is 12
  plus 7?" is not. The sentences of `json` have a few forms, and the words are those of `minserve/tasks/words.py`.
- **Other languages.** They have read English plays, and the exercises.
- **Facts and conversation.** Text that is no exercise is gone on with, or answered, in the manner of the plays. In a
  conversation, each exercise is answered for itself; other text may also pick up what was said before.
- **Long carries.** `add 9999+1=` is one of the few sums that tiny gets wrong.
"""


def write_card(
    path: Path,
    files: Mapping[str, Path],
    facts: Mapping[str, str],
    progress: Callable[[str, int, int], None],
    *,
    quick: bool = False,
) -> None:
    """Measure the models and write the card. files: name -> GGUF file, the target first. facts: more lines.

    quick: with few tasks and little text, to see that it works.
    """
    target, draft = list(files)
    tasks, num_conversations = held_out_tasks(2 if quick else _NUM_TASKS), 8 if quick else _NUM_CONVERSATIONS
    reports = {
        name: evaluate_tasks(LLM(file), tasks, progress=lambda done, total: progress("answer", done, total))
        for name, file in files.items()
    }
    held_out = plays()[1][: 5000 if quick else None]
    bits = {name: perplexity(LLM(file), held_out).bits_per_byte for name, file in files.items()}
    lines = [_HEAD, "## Figures", "", f"| | {target} | {draft} |", "|---|---|---|"]
    lines += [f"| {what} | {values} |" for what, values in facts.items()]
    rows = {
        "exercises, mean of all families and levels": [f"{100 * r.overall.rate:.1f} %" for r in reports.values()],
        "answers to the third question of one conversation that are exact": [
            f"{100 * last_answers(file, num_conversations):.1f} %" for file in files.values()
        ],
        "AUC of confidence": ["-" if r.auc is None else f"{r.auc:.3f}" for r in reports.values()],
        "bits a byte of held-out text": [f"{value:.3f}" for value in bits.values()],
    }
    lines += [f"| {what} | {' | '.join(values)} |" for what, values in rows.items()]
    alpha = acceptance(files[target], files[draft], num_seeds=1 if quick else 4)
    lines += [
        "",
        f"Of the tokens that {draft} guesses when {target} goes on with held-out text at temperature 1, {target} "
        f"accepts {100 * alpha:.1f} % (the rate alpha of arXiv 2211.17192, guesses behind a rejected one not counted).",
        "",
        f"Exercises are held out: {len(tasks)} questions, up to {_NUM_TASKS} a family and level, none of which was "
        "trained on (`a+b` and `b+a` are one question). An answer is right if it is exact. Confidence is the smallest "
        "probability that a model gave to a token of its answer; the AUC says how well it tells right from wrong.",
        "",
        f"The {num_conversations} conversations have {_QUESTIONS} held-out questions each, of families and levels that "
        f"are drawn; before the last one stand the model's own answers to the others, right or wrong.",
        "",
        *_table(reports),
        "",
        _LIMITS.format(target=target, larger=larger_sizes(files[target], 2 if quick else _NUM_TASKS)).strip(),
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _table(reports: Mapping[str, TaskReport]) -> list[str]:
    """A row for each level; what the family asks, and an example, stand in the first."""
    lines = ["| exercise | example | level | size | " + " | ".join(reports) + " |", "|---" * (4 + len(reports)) + "|"]
    for family in FAMILIES.values():
        what = f"{family.name}: {family.description} | `{family.example}` gives `{family.solve(family.example)}`"
        for level in family.levels:
            rates = [report.cells[family.name, level].rate for report in reports.values()]
            shares = " | ".join(f"{100 * rate:.0f} %" for rate in rates)
            lines.append(f"| {what} | {level} | {family.size_text(level)} | {shares} |")
            what = " | "
    return lines


def last_answers(file: Path, num_conversations: int) -> float:
    """The share of exact answers to the last question of a conversation, behind the model's own answers to the others.

    The questions are held out, of any family and level, and the same for every model.
    """
    rng = random.Random("conversations")
    cells = [(family, level) for family in FAMILIES.values() for level in family.levels]

    def question() -> Task:
        family, level = rng.choice(cells)
        return family.task(rng, level, held_out=True)

    asked = [[question() for _ in range(_QUESTIONS)] for _ in range(num_conversations)]
    conversations: list[list[dict[str, str]]] = [[] for _ in asked]
    llm = LLM(file)
    for turn in range(_QUESTIONS):
        params = []
        for conversation, tasks in zip(conversations, asked, strict=True):
            conversation.append({"role": "user", "content": tasks[turn].prompt})
            most = len(llm.tokenizer.encode(tasks[turn].answer)) + MARGIN
            params.append(SamplingParams(temperature=0.0, max_tokens=most))
        answers = [output.outputs[0] for output in llm.chat(conversations, params)]
        for conversation, answer in zip(conversations, answers, strict=True):
            conversation.append({"role": "assistant", "content": answer.text})
    right = [
        answer.finish_reason == "stop" and tasks[-1].verify(answer.text)
        for answer, tasks in zip(answers, asked, strict=True)
    ]
    return sum(right) / len(right)


def larger_sizes(file: Path, num: int) -> str:
    """The share of exact answers to `num` questions of one size beyond the largest, a family: "add of 5, 2 %; ..."."""
    rng = random.Random("larger")
    sizes = {family.name: family.sizes[-1][-1] + 1 for family in FAMILIES.values() if family.name != "json"}
    prompts = [(FAMILIES[name], FAMILIES[name].draw(rng, size)) for name, size in sizes.items() for _ in range(num)]
    tasks = [Task(family.name, family.levels[-1] + 1, prompt, family.solve(prompt)) for family, prompt in prompts]
    rates = evaluate_tasks(LLM(file), tasks).families
    return "; ".join(f"{name} of {size}, {100 * rates[name].rate:.0f} %" for name, size in sizes.items())


def acceptance(target: Path, draft: Path, num_seeds: int) -> float:
    """The share of the draft's guesses that the target accepts, as it goes on with held-out text at temperature 1."""
    llm = LLM(target, speculative_config={"model": str(draft), "num_speculative_tokens": 4, "adaptive": False})
    counts = {"accepted": 0, "rejected": 0}

    def count(event: Accepted | RejectedDraft) -> None:
        if isinstance(event, Accepted):
            counts["accepted"] += event.tokens
        else:
            counts["rejected"] += 1

    llm.engine.events.subscribe(count, [Accepted, RejectedDraft])
    text = plays()[1]
    starts = range(0, len(text) - _BEGINNING, (len(text) - _BEGINNING) // _TEXTS)
    prompts = [text[start : start + _BEGINNING] for start in starts]
    for seed in range(num_seeds):
        llm.generate(prompts, SamplingParams(temperature=1.0, seed=seed, max_tokens=_LONGEST, ignore_eos=True))
    return counts["accepted"] / sum(counts.values())
