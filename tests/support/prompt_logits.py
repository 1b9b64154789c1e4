"""The logits of a whole prompt, through the model runner that serves requests."""

from __future__ import annotations

import numpy as np

from minserve import LLM, Request, SamplingParams
from minserve.engine.model_runner import ScheduledSequence
from minserve.request import Sequence


def prompt_logits(llm: LLM, ids: list[int], chunk: int = 10_000) -> np.ndarray:
    """Logits at every position of ids, float32 (len(ids), V), computed `chunk` tokens at a time."""
    seq = Sequence(Request("test", ids, SamplingParams()), 0, list(ids))
    seq.block_table = llm.engine.pool.allocate(-(-len(ids) // llm.engine.block_size))
    rows = []
    while seq.num_computed_tokens < len(ids):
        count = min(chunk, len(ids) - seq.num_computed_tokens)
        rows += llm.engine.runner.run([ScheduledSequence(seq, count, count)])
        seq.num_computed_tokens += count
    llm.engine.pool.free(seq.block_table)
    return np.concatenate(rows)
