"""The logits of a whole prompt, through the model runner that serves requests."""

from __future__ import annotations

from array import array

import numpy as np

from minserve import LLM, Request, SamplingParams
from minserve.engine.scheduled_batch import ScheduledSequence
from minserve.request import Sequence


def prompt_logits(llm: LLM, ids: list[int], chunk: int = 10_000) -> np.ndarray:
    """Logits at every position of ids, float32 (len(ids), V), computed `chunk` tokens at a time."""
    blocks = -(-len(ids) // llm.engine_config.block_size)
    runner = llm.new_runner(num_kv_blocks=blocks)
    seq = Sequence(Request("test", ids, SamplingParams()), 0, array("i", ids), array("i", range(blocks)))
    rows = []
    while seq.num_computed_tokens < len(ids):
        count = min(chunk, len(ids) - seq.num_computed_tokens)
        rows.append(runner.run([ScheduledSequence(seq, count, count)]))
        seq.num_computed_tokens += count
    return np.concatenate(rows)
