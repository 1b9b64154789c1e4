"""The fused forward pass: the same bits as its operations one after the other, for any model and any batch."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minserve.errors import KernelError, ParameterError
from minserve.kv.kv_cache import KVCache
from minserve.model import transformer
from minserve.model.canonical import expected_shapes
from minserve.model.config import ModelConfig
from minserve.model.model_input import ModelInput
from minserve.model.transformer import Transformer
from minserve.ops import native
from minserve.ops.dtypes import BF16, F16, F32, Q4_0, Q4_1, Q8_0, Tensor, WeightType
from tests.support.native_cases import BACKENDS, ISAS, random_tensor

FLOATS = (F32, F16, BF16)
QUANTIZED = (Q4_0, Q4_1, Q8_0)


def model_of(config: ModelConfig, seed: int, types: tuple[WeightType, ...]) -> dict[str, Tensor]:
    """Random weights; each matrix has one of the types, so that a layer's may differ."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in expected_shapes(config):
        if len(shape) == 1:
            values = rng.uniform(0.5, 1.5, shape).astype("<f4")
            tensors[name] = Tensor(name, F32, shape, values.view(np.uint8))
        else:
            dtype = types[rng.integers(len(types))]
            tensors[name] = Tensor(name, dtype, shape, random_tensor(rng, dtype, *shape).data)
    return tensors


def step_input(
    rng: np.random.Generator,
    config: ModelConfig,
    new: list[int],
    before: list[int],
    block_size: int,
    blocks: int,
    *,
    last: bool = False,
) -> ModelInput:
    """A step of len(new) sequences: before[i] tokens are in the cache, new[i] are computed. Some rows are wanted:
    with `last` the last ones of each sequence, as an engine asks for them (none, one, or more), else any."""
    order = rng.permutation(blocks)
    width = max(-(-(n + b) // block_size) for n, b in zip(new, before, strict=True))
    tables = np.zeros((len(new), width), np.int32)
    positions, slots, used = [], [], 0
    for i, (n, b) in enumerate(zip(new, before, strict=True)):
        needed = -(-(n + b) // block_size)
        tables[i, :needed] = order[used : used + needed]
        used += needed
        places = np.arange(b, b + n)
        positions.append(places)
        slots.append(tables[i][places // block_size] * block_size + places % block_size)
    starts = np.concatenate([[0], np.cumsum(new)])
    wanted = rng.integers(0, starts[-1], rng.integers(0, 4)) if starts[-1] else np.zeros(0)
    if last:
        counts = [min(n, int(rng.choice([0, 1, 1, 3, n]))) for n in new]
        wanted = np.concatenate([np.arange(end - n, end) for n, end in zip(counts, starts[1:], strict=True)])
    arrays: dict[str, Any] = {
        "token_ids": rng.integers(0, config.vocab_size, starts[-1]),
        "positions": np.concatenate(positions),
        "slot_mapping": np.concatenate(slots),
        "block_tables": tables,
        "context_lens": np.array(new) + np.array(before),
        "query_start_loc": starts,
        "logits_indices": wanted,
    }
    return ModelInput(**{name: np.ascontiguousarray(array, np.int32) for name, array in arrays.items()})


def filled_cache(config: ModelConfig, blocks: int, block_size: int, dtype: str, seed: int) -> KVCache:
    """A cache in which every slot holds something."""
    cache = KVCache(config.num_hidden_layers, blocks, block_size, config.num_key_value_heads, config.head_dim, dtype)
    rng = np.random.default_rng(seed)
    for layer in (*cache.k, *cache.v):
        layer[:] = rng.standard_normal(layer.shape)
    return cache


def bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8)


def assert_same(
    config: ModelConfig, tensors: dict[str, Tensor], steps: list[ModelInput], cache: dict[str, Any]
) -> None:
    """Every backend, fused and by operations: the same logits and the same cache after each step."""
    wanted = None
    for backend in BACKENDS:
        model = Transformer(config, tensors, backend, 64)
        caches = filled_cache(config, **cache), filled_cache(config, **cache)
        found: list[np.ndarray] = []
        for step in steps:
            fused = model.forward(step, caches[0].k, caches[0].v)
            found.append(fused)
            single = model.forward_by_operations(step, caches[1].k, caches[1].v)
            np.testing.assert_array_equal(bits(fused), bits(single), f"{backend.isa}, {backend.threads} threads")
        for one, other in zip((*caches[0].k, *caches[0].v), (*caches[1].k, *caches[1].v), strict=True):
            np.testing.assert_array_equal(bits(one[:]), bits(other[:]))
        if wanted is not None:
            for mine, first in zip(found, wanted, strict=True):
                np.testing.assert_array_equal(bits(mine), bits(first), f"{backend.isa}, {backend.threads} threads")
        wanted = found


def tiny_config(**changes: Any) -> ModelConfig:
    sizes = {
        "vocab_size": 70,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
    }
    return ModelConfig(**{**sizes, **changes})  # type: ignore[arg-type]


MODELS: dict[str, tuple[dict[str, Any], tuple[WeightType, ...]]] = {
    "quantized, of all types": ({}, QUANTIZED),
    "quantized and floats in one layer": ({}, (*QUANTIZED, *FLOATS)),
    "floats of odd sizes": ({"hidden_size": 30, "intermediate_size": 43, "head_dim": 10, "vocab_size": 33}, FLOATS),
    "one head": ({"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64}, (Q4_1,)),
    "many query heads a KV head": ({"num_attention_heads": 10, "num_key_value_heads": 2, "head_dim": 32}, (Q8_0, Q4_1)),
    "an odd number of panels": ({"hidden_size": 96, "intermediate_size": 160, "vocab_size": 49}, (Q4_1, Q8_0)),
    "many panels": ({"intermediate_size": 416}, (Q4_1,)),
    "tied": ({"tie_word_embeddings": True}, (Q8_0,)),
    "one layer": ({"num_hidden_layers": 1}, (Q4_0, F16)),
}


@pytest.mark.parametrize("name", MODELS)
def test_fused_is_the_operations_one_after_the_other(name: str) -> None:
    changes, types = MODELS[name]
    config = tiny_config(**changes)
    rng = np.random.default_rng(len(name))
    batches = [([1], [0]), ([1], [37]), ([5, 1, 1, 17], [0, 8, 30, 3]), ([1] * 7, list(range(7))), ([40, 33], [0, 20])]
    for dtype in ("float16", "float32", "int8"):
        steps = [step_input(rng, config, *batch, 8, 40, last=last) for batch in batches for last in (True, False)]
        cache = {"blocks": 40, "block_size": 8, "dtype": dtype, "seed": 1}
        assert_same(config, model_of(config, 3, types), steps, cache)


@settings(deadline=None, max_examples=15)
@given(st.data())
def test_any_model_and_any_batch(data: st.DataObject) -> None:
    quantized = data.draw(st.booleans())
    size = st.integers(1, 4).map(lambda n: 32 * n) if quantized else st.integers(1, 70)
    kv_heads = data.draw(st.integers(1, 3))
    head_dim = data.draw(st.sampled_from([32, 64] if quantized else [2, 6, 16, 20, 48]))
    config = tiny_config(
        hidden_size=data.draw(size),
        intermediate_size=data.draw(size),
        vocab_size=data.draw(st.integers(1, 70)),
        num_attention_heads=kv_heads * data.draw(st.integers(1, 4)),
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        num_hidden_layers=1,
    )
    sequences = data.draw(st.integers(1, 6))
    new = data.draw(st.lists(st.integers(1, 30), min_size=sequences, max_size=sequences))
    before = data.draw(st.lists(st.integers(0, 30), min_size=sequences, max_size=sequences))
    block_size = data.draw(st.sampled_from([1, 3, 8, 16]))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    step = step_input(rng, config, new, before, block_size, 6 * 60, last=data.draw(st.booleans()))
    cache = {"blocks": 6 * 60, "block_size": block_size, "dtype": "float16", "seed": 2}
    assert_same(config, model_of(config, 5, QUANTIZED if quantized else FLOATS), [step], cache)


@pytest.fixture(scope="module")
def tiny() -> tuple[ModelConfig, Transformer]:
    config = tiny_config()
    return config, Transformer(config, model_of(config, 0, QUANTIZED), BACKENDS[-1], 64)


def changed(step: ModelInput, **changes: Any) -> ModelInput:
    return ModelInput(**{**vars(step), **{k: np.array(v, np.int32) for k, v in changes.items()}})


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a token id": ({"token_ids": [1, 2, 70]}, "outside the vocabulary"),
    "a position": ({"positions": [0, 1, 64]}, "contradict"),
    "a negative position": ({"positions": [0, 1, -1]}, "contradict"),
    "a slot": ({"slot_mapping": [0, 1, 40 * 8]}, "slot"),
    "a negative slot": ({"slot_mapping": [0, 1, -1]}, "slot"),
    "a block": ({"block_tables": [[40]]}, "block"),
    "a context too long for its table": ({"context_lens": [9]}, "block"),
    "fewer tokens than said": ({"query_start_loc": [0, 2]}, "contradict"),
    "a row that is not there": ({"logits_indices": [3]}, "contradict"),
    "a negative row": ({"logits_indices": [-1]}, "contradict"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_step_is_refused_before_anything_is_written(name: str, tiny: tuple[ModelConfig, Transformer]) -> None:
    config, model = tiny
    changes, message = WRONG[name]
    rng = np.random.default_rng(0)
    step = step_input(rng, config, [3], [0], 8, 40)
    cache = filled_cache(config, 40, 8, "float16", 0)
    before = [layer.copy() for layer in (*cache.k, *cache.v)]
    with pytest.raises((KernelError, ParameterError), match=message):
        model.forward(changed(step, **changes), cache.k, cache.v)
    for layer, was in zip((*cache.k, *cache.v), before, strict=True):
        np.testing.assert_array_equal(bits(layer), bits(was))


def test_wrong_arrays_are_named(tiny: tuple[ModelConfig, Transformer]) -> None:
    config, model = tiny
    step = step_input(np.random.default_rng(0), config, [3], [0], 8, 40)
    cache = filled_cache(config, 40, 8, "float16", 0)
    with pytest.raises(ParameterError, match="positions must have the shape"):
        model.forward(changed(step, positions=[0, 1]), cache.k, cache.v)
    with pytest.raises(ParameterError, match="2 layers, the KV cache 1 of keys and 1 of values"):
        model.forward(step, cache.k[:1], cache.v[:1])
    with pytest.raises(ParameterError, match="3 of keys and 1 of values"):
        model.forward(step, [*cache.k, cache.v[0]], cache.v[:1])
    with pytest.raises(ParameterError, match="same type, blocks and block size"):
        model.forward(step, [cache.k[0], cache.k[1][:20]], [cache.v[0], cache.v[1][:20]])
    cache = filled_cache(config, 40, 8, "float16", 0)
    cache.k[0].flags.writeable = False
    with pytest.raises(ParameterError, match="k_cache is read-only"):
        model.forward(step, cache.k, cache.v)


def test_another_cache_is_noticed(tiny: tuple[ModelConfig, Transformer]) -> None:
    """The pointers to the caches are kept from step to step. A model that went on writing into the old arrays would
    answer from what another engine's sequences said."""
    config, model = tiny
    step = changed(step_input(np.random.default_rng(0), config, [3], [0], 8, 40), logits_indices=[2])
    one, other = filled_cache(config, 40, 8, "float16", 0), filled_cache(config, 40, 8, "float16", 0)
    before = [layer.copy() for layer in (*one.k, *one.v)]
    model.forward(step, one.k, one.v)
    assert any((layer != was).any() for layer, was in zip((*one.k, *one.v), before, strict=True))
    model.forward(step, other.k, other.v)
    for mine, theirs in zip((*one.k, *one.v), (*other.k, *other.v), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    one.k[1] = one.k[1].copy()  # in the same list
    one.k[1][:] = 0
    model.forward(step, one.k, one.v)
    assert (one.k[1] != 0).any()


def test_weights_whose_shapes_contradict_each_other_are_refused() -> None:
    config = tiny_config()
    tensors = model_of(config, 0, (Q8_0,))
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = random_tensor(np.random.default_rng(0), Q8_0, 64, 128)
    with pytest.raises(KernelError, match="contradict"):
        Transformer(config, tensors, BACKENDS[0], 64)


@pytest.mark.parametrize("fields", [(), ("o_proj",), ("q_proj", "v_proj", "up_proj")], ids=str)
def test_each_matrix_says_how_its_input_is_quantized(fields: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices that read the same rows may want them in different forms."""
    monkeypatch.setattr(transformer, "KEEP_LARGEST", frozenset(fields))
    config = tiny_config()
    step = step_input(np.random.default_rng(0), config, [6, 1], [0, 9], 8, 40)
    cache = {"blocks": 40, "block_size": 8, "dtype": "float16", "seed": 1}
    assert_same(config, model_of(config, 3, (Q4_1,)), [step], cache)


def test_the_down_projection_keeps_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its input is quantized a block at a time, so a model that asks for more is refused, not computed otherwise."""
    monkeypatch.setattr(transformer, "KEEP_LARGEST", frozenset({"down_proj"}))
    with pytest.raises(KernelError, match="forward"):
        Transformer(tiny_config(), model_of(tiny_config(), 0, (Q8_0,)), BACKENDS[0], 64)


def test_a_batch_of_no_wanted_rows_and_one_of_no_tokens(tiny: tuple[ModelConfig, Transformer]) -> None:
    config, model = tiny
    cache = filled_cache(config, 40, 8, "float16", 0)
    step = step_input(np.random.default_rng(0), config, [3], [0], 8, 40)
    assert model.forward(changed(step, logits_indices=np.zeros(0)), cache.k, cache.v).shape == (0, 70)
    nothing = {name: np.zeros(0) for name in ("token_ids", "positions", "slot_mapping", "logits_indices")}
    empty = changed(step, **nothing, query_start_loc=[0, 0], context_lens=[0])
    assert model.forward(empty, cache.k, cache.v).shape == (0, 70)


@pytest.mark.parametrize("isa", ISAS)
def test_a_model_whose_work_space_grows(isa: str) -> None:
    """The first step's work space is too small for the second one."""
    config = tiny_config()
    model = Transformer(config, model_of(config, 0, QUANTIZED), native.NativeBackend(2, isa), 64)
    cache = filled_cache(config, 40, 8, "float16", 0)
    rng = np.random.default_rng(0)
    for new in ([1], [60, 60, 60], [1]):
        step = step_input(rng, config, new, [0] * len(new), 8, 40)
        fused = model.forward(step, cache.k, cache.v)
        np.testing.assert_array_equal(bits(fused), bits(model.forward_by_operations(step, cache.k, cache.v)))


NOT_LAST: dict[str, list[int]] = {
    "one before the last": [1, 4],
    "in another order": [4, 2],
    "one of them twice": [2, 4, 4],
    "a gap": [0, 2, 4],
    "more than there are": [0, 1, 2, 3, 4, 4],
    "the last ones": [2, 3, 4],
    "of the second sequence alone": [3, 4],
    "all": [0, 1, 2, 3, 4],
    "none": [],
}


@pytest.mark.parametrize("rows", NOT_LAST)
def test_the_last_layer_computes_the_wanted_rows_whichever_they_are(
    rows: str, tiny: tuple[ModelConfig, Transformer]
) -> None:
    """Only their attention and feed-forward are needed there. Taken for a sequence's last rows when they are others,
    they would be computed at the wrong positions."""
    config, model = tiny
    step = step_input(np.random.default_rng(0), config, [3, 2], [0, 9], 8, 40)
    step = changed(step, logits_indices=NOT_LAST[rows])
    one, other = filled_cache(config, 40, 8, "float16", 0), filled_cache(config, 40, 8, "float16", 0)
    fused = model.forward(step, one.k, one.v)
    np.testing.assert_array_equal(bits(fused), bits(model.forward_by_operations(step, other.k, other.v)))
    for mine, theirs in zip((*one.k, *one.v), (*other.k, *other.v), strict=True):
        np.testing.assert_array_equal(bits(mine), bits(theirs))


def test_a_dropped_cache_is_gone(tiny: tuple[ModelConfig, Transformer]) -> None:
    """The model remembers where the last step's cache lies. Kept for that, an engine that was thrown away left its
    cache, often most of the memory, until the next one's first step."""
    config, model = tiny
    step = step_input(np.random.default_rng(0), config, [3], [0], 8, 40)
    for dtype in ("float16", "int8"):
        cache = filled_cache(config, 40, 8, dtype, 0)
        gone = [weakref.ref(layer) for layer in (*cache.k, *cache.v)]
        model.forward(step, cache.k, cache.v)
        del cache
        gc.collect()
        assert [reference() for reference in gone] == [None] * len(gone)


def test_two_threads_with_a_cache_each(tiny: tuple[ModelConfig, Transformer]) -> None:
    """One model, a runner in each thread. While one was in C, the other's call replaced the addresses of its cache,
    and freed the memory that they were read from."""
    config, model = tiny
    step = step_input(np.random.default_rng(0), config, [9, 1], [0, 20], 8, 40, last=True)
    step = changed(step, logits_indices=[8, 9])
    right = model.forward_by_operations(step, *(lambda c: (c.k, c.v))(filled_cache(config, 40, 8, "float16", 1)))
    wrong: list[int] = []

    def run(thread: int) -> None:
        cache = filled_cache(config, 40, 8, "float16", 1)
        for _ in range(60):
            if not (model.forward(step, cache.k, cache.v) == right).all():
                wrong.append(thread)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_lists_in_the_place_of_arrays_are_named(tiny: tuple[ModelConfig, Transformer]) -> None:
    config, model = tiny
    step = step_input(np.random.default_rng(0), config, [3], [0], 8, 40)
    cache = filled_cache(config, 40, 8, "float16", 0)
    for name in vars(step):
        with pytest.raises(ParameterError, match=f"{name} must be a NumPy array"):
            model.forward(ModelInput(**{**vars(step), name: vars(step)[name].tolist()}), cache.k, cache.v)


def test_pieces_for_more_than_one_thread() -> None:
    """Threads share the rows of a step only if there is enough to do: small models never get that far."""
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
    config = tiny_config(hidden_size=576, intermediate_size=96, num_hidden_layers=1, **heads)
    rng = np.random.default_rng(0)
    step = step_input(rng, config, [60, 60, 60], [0, 0, 3], 8, 40, last=True)
    tensors = model_of(config, 0, (Q4_1, Q8_0))
    wanted = None
    for threads in (1, 3):
        model = Transformer(config, tensors, native.NativeBackend(threads), 64)
        for _ in range(5):
            cache = filled_cache(config, 40, 8, "float16", 0)
            logits = model.forward(step, cache.k, cache.v)
            found = [bits(logits), *(bits(layer) for layer in (*cache.k, *cache.v))]
            wanted = wanted or found
            for mine, first in zip(found, wanted, strict=True):
                np.testing.assert_array_equal(mine, first)
