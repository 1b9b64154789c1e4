"""minserve bench --overhead: what a step costs besides the model, and what events cost."""

from __future__ import annotations

import argparse

from minserve.bench.overhead import LISTENERS, PROMPT_LEN, measure_overhead, steps_for
from minserve.bench.report import counted, duration_text
from minserve.commands.bench import document, subject, warm_up
from minserve.commands.common import blame, load_llm
from minserve.commands.exit_codes import INTERRUPTED
from minserve.commands.output import facts, note, say, table, write_json
from minserve.commands.progress import StageProgress
from minserve.errors import ParameterError

NUM_SEQS = 32
_TURNS = 10  # for each listener
# seconds that these should stay under, with 32 sequences and a vocabulary of 49,152 on two cores
TARGETS = {"outside": 0.5e-3, "greedy": 1e-3, "top_k_top_p_penalties": 3e-3}
# of what is measured, for people
_NAMES = {
    "nobody": "nobody",
    "step_finished": "one, to steps",
    "everything": "one, to everything",
    "greedy": "greedy",
    "top_k_top_p_penalties": "top-k, top-p and penalties",
}
_COLUMNS = ("who listens", "step", "forward", "sampler", "outside", "outside p95", "steps")


def run_overhead(args: argparse.Namespace) -> int:
    """Measure on the model that the options ask for, print, and end with a JSON line; 0, or 130 after Ctrl-C.

    Raises MinserveError, OSError.
    """
    num_seqs = args.max_num_seqs or NUM_SEQS
    llm = load_llm(args)
    num_steps = steps_for(llm.max_model_len, _TURNS)
    if num_steps < len(LISTENERS):
        raise ParameterError(f"max_model_len must be larger than {llm.max_model_len} to measure steps in it")
    block_size = llm.engine.config.block_size
    blocks = num_seqs * -(-(PROMPT_LEN + num_steps + 2) // block_size)
    with StageProgress("steps", opening="timing", quiet=args.quiet) as bar, blame(args.backend, "it was measured"):
        warm_up(llm)
        engine = llm.new_engine(
            max_num_seqs=num_seqs, num_kv_blocks=blocks, max_num_batched_tokens=max(512, PROMPT_LEN * num_seqs)
        )
        costs = measure_overhead(engine, num_seqs, num_steps, lambda done, total: bar("time", done, total))
    facts(
        f"Overhead of a step: {subject(llm)}",
        [
            ("sequences", f"{num_seqs}, one token each"),
            ("outside", "the step without the model's forward call and the sampler's call"),
            ("vocabulary", f"{llm.tokenizer.vocab_size:,}"),
        ],
    )
    say()
    rows = [
        (_NAMES[name], *map(duration_text, (c.step, c.forward, c.sample, c.outside, c.outside_p95)), c.num_steps)
        for name, c in costs.steps.items()
    ]
    if rows:
        table(_COLUMNS, rows, right=_COLUMNS[1:])
        say()
    comparison = []
    if "nobody" in costs.steps:
        comparison.append(("a step, outside (nobody listens)", costs.steps["nobody"].outside, TARGETS["outside"]))
    sampled = f"sampling {counted(num_seqs, 'row')}"
    comparison += [(f"{sampled}, {_NAMES[name]}", cost, TARGETS[name]) for name, cost in costs.sampling.items()]
    columns = ("median of", "measured", "target", "")
    shown = [(what, duration_text(t), duration_text(goal), _verdict(t, goal)) for what, t, goal in comparison]
    table(columns, shown, right=columns[1:3])
    say()
    write_json(
        {
            **document("bench --overhead", llm),
            "num_seqs": num_seqs,
            "vocab_size": llm.tokenizer.vocab_size,
            "step": costs.steps,
            "sampling": costs.sampling,
            "targets": TARGETS,
            "interrupted": costs.interrupted,
        }
    )
    if costs.interrupted:
        note("interrupted: the figures are of what was measured until then")
        return INTERRUPTED
    return 0


def _verdict(seconds: float, target: float) -> str:
    return "met" if seconds < target else "missed"
