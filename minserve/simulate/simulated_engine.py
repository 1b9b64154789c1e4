"""simulated_engine: the serving engine itself, with nothing behind it but a cost model and a clock."""

from __future__ import annotations

from typing import Any

from minserve.engine.engine_config import EngineConfig, blocks_in
from minserve.engine.llm_engine import LLMEngine
from minserve.engine.served_model import DEFAULT_MAX_MODEL_LEN
from minserve.errors import ParameterError, check_whole_number
from minserve.events import EventStream
from minserve.kv.kv_cache import check_slots
from minserve.simulate.cost_model import CostModel
from minserve.simulate.simulated_runner import SimulatedRunner, SimulatedSampler
from minserve.simulate.stand_in_tokenizer import StandInTokenizer
from minserve.simulate.virtual_clock import VirtualClock

# Of the model behind a cost model whose source does not say: SmolLM2-135M's, with float16 keys and values.
_MODEL = {"vocab_size": 49_152, "max_position_embeddings": 8192, "kv_bytes_per_token": 23_040}

_MOST_BLOCKS = 10_000_000
_MOST_IDS = 10_000_000  # each is drawn from, so each is a Python int in a list


def simulated_engine(
    cost_model: CostModel, config: EngineConfig, *, events: EventStream | None = None
) -> tuple[LLMEngine, VirtualClock]:
    """An engine whose steps take no time but the clock's, and the clock.

    Its scheduler, block manager and prefix cache are the real ones. Prompts must be token ids below the measured
    model's vocabulary, and requests must set detokenize to False; every answer grows to its max_tokens.
    """
    clock = VirtualClock()
    tokenizer: Any = StandInTokenizer(_of_source(cost_model, "vocab_size"))
    runner = SimulatedRunner(cost_model, clock, config.token_budget)
    engine = LLMEngine(runner, SimulatedSampler(0), tokenizer, config, clock=clock, events=events)
    return engine, clock


def simulated_config(
    cost_model: CostModel,
    *,
    max_model_len: int | None = None,
    num_kv_blocks: int | None = None,
    kv_cache_memory: int | None = None,
    block_size: int = 16,
    max_num_seqs: int = 32,
    **options: Any,
) -> EngineConfig:
    """An EngineConfig with the defaults that LLM has for the measured model. Raises ParameterError.

    options: the other fields of EngineConfig.
    """
    context = context_of(cost_model)
    if max_model_len is None:
        max_model_len = min(context, DEFAULT_MAX_MODEL_LEN)
    check_whole_number("max_model_len", max_model_len, 1, context)
    check_whole_number("block_size", block_size, 1)
    if num_kv_blocks is None:
        num_kv_blocks = blocks_in(
            kv_cache_memory,
            _of_source(cost_model, "kv_bytes_per_token") * block_size,
            max_model_len=max_model_len,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
        )
    check_slots(num_kv_blocks, block_size)  # a simulation refuses what the real cache refuses
    if num_kv_blocks > _MOST_BLOCKS:  # the pool's lists take 100 bytes a block
        raise ParameterError(f"num_kv_blocks must be at most {_MOST_BLOCKS:,} in a simulation, not {num_kv_blocks:,}")
    return EngineConfig(max_model_len, num_kv_blocks, block_size, max_num_seqs, **options)


def context_of(cost_model: CostModel) -> int:
    """The measured model's context in tokens, which max_model_len cannot be above. Raises ParameterError."""
    return _of_source(cost_model, "max_position_embeddings")


def _of_source(cost_model: CostModel, name: str) -> int:
    """A whole number about the measured model. Raises ParameterError if the source says something else."""
    value = cost_model.source.get(name, _MODEL[name])
    try:
        check_whole_number(name, value, 1, _MOST_IDS if name == "vocab_size" else 2**31 - 1)
    except ParameterError as error:
        raise ParameterError(f"the cost model's source: {error}") from None
    return int(value)
