"""minserve's own bare loop: a runner and the most probable token, without scheduler, sampler or text.

Run by child.py in this interpreter. The choice is the same NumPy call as for llama.cpp.
"""

from __future__ import annotations

from array import array
from typing import Any

from minserve import __version__
from minserve.engine.model_runner import ModelRunner
from minserve.engine.scheduled_batch import ScheduledSequence
from minserve.llm import LLM
from minserve.request import Request, Sequence
from minserve.sampling_params import SamplingParams


def open_engine(options: dict[str, Any]) -> MinserveEngine:
    """options: arguments of LLM."""
    return MinserveEngine(LLM(**options))


class MinserveEngine:
    """One model, and a KV cache that sequences take blocks of from the front."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._runner: ModelRunner | None = None
        self._seqs: list[Sequence] = []
        isa = getattr(llm.backend, "isa", None)  # NumPy has none to tell of
        self.about = {
            "version": f"minserve {__version__}",
            "weights": "as the file's",
            "settings": f"backend {llm.backend.name}{f' ({isa})' if isa else ''}, KV {llm.kv_cache_dtype}",
        }

    def prepare(self, prompts: list[list[int]], num_steps: int) -> None:
        """Make the sequences, with blocks for all that they will hold."""
        block_size = self._llm.engine_config.block_size
        self._seqs, blocks = [], 0
        for prompt in prompts:
            end = blocks + -(-(len(prompt) + num_steps) // block_size)
            request = Request(f"peer-{len(self._seqs)}", prompt, SamplingParams())
            self._seqs.append(Sequence(request, 0, array("i", prompt), array("i", range(blocks, end))))
            blocks = end
        if self._runner is None or self._runner.kv_cache.num_blocks < blocks:
            self._runner = self._llm.new_runner(num_kv_blocks=blocks)

    def start(self) -> None:
        """Run the prompts, all in one batch."""
        self._run()

    def step(self) -> None:
        """Run the last chosen token of each sequence."""
        self._run()

    def finish(self) -> list[list[int]]:
        """The chosen tokens."""
        return [seq.token_ids[seq.num_prompt_tokens :].tolist() for seq in self._seqs]

    def _run(self) -> None:
        assert self._runner is not None  # `prepare` made it
        batch = [ScheduledSequence(seq, len(seq.token_ids) - seq.num_computed_tokens, 1) for seq in self._seqs]
        logits = self._runner.run(batch)  # (B, V)
        for seq, token in zip(self._seqs, logits.argmax(axis=1).tolist(), strict=True):
            seq.num_computed_tokens = len(seq.token_ids)
            seq.token_ids.append(token)
