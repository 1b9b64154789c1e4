"""An engine over a scripted model with a byte tokenizer: engine tests in milliseconds.

The runner keeps, in the place of keys and values, the token that each slot was written for, and refuses a step that
would read anything else: so a wrong block table, a lost copy, a shared block that was written, or a block that was
registered before it was computed shows at once.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from minserve import Request, RequestOutput, SamplingParams
from minserve.engine.engine_config import EngineConfig
from minserve.engine.llm_engine import LLMEngine
from minserve.engine.sampler import Sampler
from minserve.engine.scheduled_batch import ScheduledSequence
from minserve.ops import reference
from minserve.text.tokenizer import Tokenizer
from minserve.text.vocabulary import Vocabulary

EOS = 256
BYTES = Tokenizer(
    Vocabulary(
        tokens=[*(bytes([b]) for b in range(256)), b"<eos>"],
        merges=[],
        special_tokens={"<eos>": EOS},
        pre_tokenizer="gpt2",
        eos_ids=(EOS,),
    )
)
Script = Callable[[str, list[int]], object]


def make_copies(slots: np.ndarray, batch: list[ScheduledSequence]) -> None:
    """What a runner does before it writes: the copies that were asked for, which it then takes off the items."""
    copies = [pair for item in batch for pair in item.copies]
    if copies:
        slots[[to for _, to in copies]] = slots[[source for source, _ in copies]]
    for item in batch:
        item.copies = ()


class ScriptedRunner:
    """Answers each request with its script, a byte a token, and checks the blocks that it is given.

    script(request id, output so far) -> next token, or an exception to raise, or logits.
    """

    def __init__(self, script: Script, num_blocks: int, block_size: int) -> None:
        self.script = script
        self.block_size = block_size
        self.slots = np.full((num_blocks, block_size), -1)  # (N, B) which token each was written for
        self.steps: list[tuple[str, int]] = []  # (request id, tokens) of every run
        self.batches: list[int] = []  # sequences in each run

    def run(self, batch: list[ScheduledSequence]) -> np.ndarray:
        self.batches.append(len(batch))
        make_copies(self.slots, batch)
        for item in batch:
            self._write(item)
        return np.concatenate([self._answer(item) for item in batch])

    def _write(self, item: ScheduledSequence) -> None:
        seq, start = item.seq, item.seq.num_computed_tokens
        assert item.num_tokens > 0, "a sequence was scheduled with nothing to compute"
        self.steps.append((seq.request.request_id, item.num_tokens))
        for position, token_id in enumerate(item.token_ids, start):
            block, place = divmod(position, self.block_size)
            self.slots[seq.block_table[block], place] = token_id

    def _answer(self, item: ScheduledSequence) -> np.ndarray:
        seq, end = item.seq, item.seq.num_computed_tokens + item.num_tokens
        assert len(set(seq.block_table)) == len(seq.block_table)
        held = self.slots[list(seq.block_table)].ravel()[:end]
        tokens = [*seq.token_ids[: seq.num_computed_tokens], *item.token_ids]
        assert held.tolist() == tokens, "the blocks hold something else than this sequence's tokens"
        rows = np.zeros((item.num_logits, 257), np.float32)
        for row, position in zip(rows, range(end - item.num_logits, end), strict=True):
            step = self.script(seq.request.request_id, tokens[seq.num_prompt_tokens : position + 1])
            if isinstance(step, BaseException):
                raise step
            if isinstance(step, np.ndarray):
                row[:] = step
            else:
                row[step] = 10.0
        return rows


def saying(text: str) -> Script:
    """A script that says `text`, then EOS."""
    data = [*text.encode(), EOS]
    return lambda _, output: data[min(len(output), len(data) - 1)]


def engine(
    script: Script, *, blocks: int = 64, budget: int = 512, max_model_len: int = 256, block_size: int = 4, **options
) -> LLMEngine:
    """An engine over the script. options: fields of EngineConfig, or clock, events, identity, speculation."""
    names = ("clock", "events", "identity", "speculation")
    engine_options = {name: options.pop(name) for name in names if name in options}
    config = EngineConfig(
        max_model_len=max_model_len,
        num_kv_blocks=blocks,
        block_size=block_size,
        max_num_batched_tokens=budget,
        **options,
    )
    return LLMEngine(ScriptedRunner(script, blocks, block_size), Sampler(reference), BYTES, config, **engine_options)


def request(prompt: str, name: str = "r", *, fields: dict | None = None, **params: object) -> Request:
    """A greedy request of up to 100 tokens. params: SamplingParams. fields: of the Request itself."""
    sampling_params = SamplingParams(**{"temperature": 0, "max_tokens": 100, **params})  # type: ignore[arg-type]
    return Request(name, BYTES.encode(prompt), sampling_params, **(fields or {}))


def check_blocks(eng: LLMEngine) -> None:
    """free + cached + used is the whole pool, and each used block has as many owners as its count says."""
    pool = eng.blocks.pool
    assert pool.num_free + pool.num_cached + pool.num_used == pool.num_blocks
    owners = [0] * pool.num_blocks
    for seq in eng.scheduler.running:
        for block in seq.block_table:
            owners[block] += 1
    assert owners == list(pool.ref_counts)


def run_to_the_end(eng: LLMEngine, most_steps: int = 10_000) -> None:
    """Step until nothing is unfinished; check the blocks after each step."""
    for _ in range(most_steps):
        if not eng.has_unfinished:
            break
        eng.step()
        check_blocks(eng)
    assert not eng.has_unfinished, "somebody waits for ever"
    assert eng.blocks.pool.num_used == 0


def serve(eng: LLMEngine, *requests: Request) -> list[RequestOutput]:
    """Run all of them to their end; outputs in the order of the requests; no block may be left."""
    outputs = [eng.add_request(item) for item in requests]
    run_to_the_end(eng)
    return outputs
