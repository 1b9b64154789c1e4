"""What drafts must not cost: prompts read again and again, other sequences' blocks, a sequence that goes in circles."""

from __future__ import annotations

import dataclasses
from typing import Any

from minserve import Request, SamplingParams
from minserve.engine.llm_engine import LLMEngine
from minserve.engine.speculative.draft_model_proposer import DraftModelProposer
from minserve.engine.speculative.fixed_proposer import FixedProposer
from minserve.events import Drafted, Preempted

from .support.hash_model import hash_engine
from .support.scripted_model import serve
from .support.speculative import draft_model


def draft_tokens_of_each_run(eng: LLMEngine) -> list[int]:
    """Filled while the engine runs: tokens that the draft model computes."""
    assert eng.speculation is not None
    proposer = eng.speculation.proposer
    assert isinstance(proposer, DraftModelProposer)
    run, counts = proposer.runner.run, []

    def counted(batch: Any) -> Any:
        counts.append(sum(item.num_tokens for item in batch))
        return run(batch)

    proposer.runner.run = counted  # type: ignore[method-assign]
    return counts


def test_n_answers_read_their_prompt_once() -> None:
    """Each answer's shadow read it for itself: eight answers to 100 tokens were 824 in the first step."""
    prompt = [Request("r", list(range(3, 103)), SamplingParams(temperature=1.0, seed=1, n=8, max_tokens=4))]
    for caching in (True, False):
        eng = hash_engine(
            propose=draft_model,
            num_speculative_tokens=2,
            max_model_len=128,
            num_kv_blocks=80,
            block_size=16,
            enable_prefix_caching=caching,
        )
        counts = draft_tokens_of_each_run(eng)
        serve(eng, *prompt)
        assert 100 <= sum(counts) < 100 + 8 * 4 * 4


def test_optional_guesses_are_cut_to_the_blocks_that_there_are() -> None:
    """Those that fit into the sequence's own block stay, and nobody is preempted for the others."""
    wrong = FixedProposer({"a": [0] * 20})
    eng = hash_engine(
        propose=lambda _: wrong, num_speculative_tokens=6, max_model_len=24, num_kv_blocks=6, block_size=4
    )
    lengths: list[int] = []
    preempted: list[Preempted] = []
    eng.events.subscribe(lambda event: lengths.append(len(event.token_ids)), (Drafted,))
    eng.events.subscribe(preempted.append, (Preempted,))
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    short = dataclasses.replace(params, max_tokens=3)
    # a: [4 tokens][.   ] and b: [4][4][4][1   ]: all blocks are taken, and a has 3 slots behind its next token
    serve(eng, Request("a", [5, 6, 7, 8], params), Request("b", list(range(20, 33)), short))
    assert preempted == []
    assert lengths[:2] == [3, 2]
    assert max(lengths) > 3, "alone it got more"


def test_a_seeded_sequence_does_not_go_in_circles_for_its_guesses() -> None:
    """It was admitted where its tokens fit and its draft did not, and preempted again at once: 14 times."""
    eng = hash_engine(
        propose=draft_model,
        num_speculative_tokens=16,
        max_model_len=200,
        num_kv_blocks=64,
        block_size=4,
        enable_prefix_caching=False,
    )
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=80, ignore_eos=True)
    outputs = serve(eng, *(Request(name, list(range(3, 63)), params) for name in ("a", "b")))
    assert 1 <= sum(output.metrics.num_preemptions for output in outputs) <= 3
