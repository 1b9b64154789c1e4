"""The model card: what the trained files are worth, measured with minserve itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from minserve import LLM, SamplingParams
from minserve.events import Accepted, RejectedDraft
from minserve.quantize.evaluation import perplexity
from minserve.quantize.task_evaluation import evaluate_tasks
from minserve.quantize.task_report import TaskReport
from minserve.tasks.families import FAMILIES
from minserve.tasks.suite import held_out_tasks

from .data import plays

_NUM_TASKS = 100  # a family and level
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
    tasks = held_out_tasks(2 if quick else _NUM_TASKS)
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
        *_table(reports),
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _table(reports: Mapping[str, TaskReport]) -> list[str]:
    lines = ["| exercise | level | size | " + " | ".join(reports) + " |", "|---|---|---|" + "---|" * len(reports)]
    for family in FAMILIES.values():
        for level in family.levels:
            rates = [report.cells[family.name, level].rate for report in reports.values()]
            shares = " | ".join(f"{100 * rate:.0f} %" for rate in rates)
            lines.append(f"| {family.name}: {family.description} | {level} | {family.sizes[level - 1]} | {shares} |")
    return lines


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
