"""The C core's whole forward pass: a model's packed weights and one step's arrays, as `ms_forward` reads them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minserve.errors import ParameterError
from minserve.ops.c_arrays import FLOAT32, INT32
from minserve.ops.native_core import Core
from minserve.ops.native_weights import PackedWeight
from minserve.ops.quantized_kv import KVLayer

VECTORS = ("input_layernorm", "post_attention_layernorm")
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class ForwardModel:
    """What a forward pass needs to know of a model; the weights are what `prepare` returned.

    layers: for each layer, its weights by the names in VECTORS and MATRICES.
    cosine, sine: float32 (positions, d/2). attention_scale: what a query times a key is multiplied by.
    """

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    attention_scale: float
    embed_tokens: Any  # (V, D)
    layers: Sequence[Mapping[str, Any]]
    norm: np.ndarray  # (D,)
    lm_head: Any  # (V, D)
    cosine: np.ndarray
    sine: np.ndarray


@dataclass(frozen=True)
class _KnownCaches:
    """Arrays that C knows the addresses of, as long as they are there: they are not kept for its sake."""

    layers: Sequence[weakref.ref[Any]]  # keys of all layers, then values
    pointer: Any  # ms_kv_cache *
    arrays: tuple[Any, ...]  # what it points to

    def are(self, layers: Sequence[KVLayer]) -> bool:
        return len(layers) == len(self.layers) and all(map(_refers, self.layers, layers))


class NativeForward:
    """One call a step for the whole batch and all layers (csrc/forward.c).

    The same bits as the operations one after the other. work(nbytes) gives a work space: (pointer, bytes);
    describe(k_cache, v_cache, kv_heads, head_dim, writable) one layer's pointers and sizes.
    Raises ParameterError if the weights are not packed ones, or their shapes contradict each other.
    """

    def __init__(
        self,
        core: Core,
        exec_pointer: Any,
        work: Callable[[int], tuple[Any, int]],
        describe: Callable[..., tuple[Any, ...]],
        model: ForwardModel,
    ) -> None:
        self._core, self._exec, self._work, self._describe = core, exec_pointer, work, describe
        self._kept: list[Any] = [model]  # what C has pointers to
        self._vocab_size, hidden_size = _shape(model.embed_tokens)
        self._head_shape = (model.num_key_value_heads, model.head_dim)
        self._num_layers = len(model.layers)
        c = core.ffi.new("ms_model *")
        c.hidden_size, c.intermediate_size, c.vocab_size = hidden_size, model.intermediate_size, self._vocab_size
        c.heads, c.kv_heads, c.head_dim = model.num_attention_heads, *self._head_shape
        c.layer_count, c.positions = self._num_layers, model.cosine.shape[0]
        c.rms_norm_eps, c.attention_scale = model.rms_norm_eps, model.attention_scale
        angles = (model.cosine.shape[0], model.head_dim // 2)
        c.cosine, c.sine = (self._vector(n, getattr(model, n), angles) for n in ("cosine", "sine"))
        c.embed_tokens, c.lm_head = self._matrix(model.embed_tokens), self._matrix(model.lm_head)
        c.norm = self._vector("norm", model.norm, (hidden_size,))
        layers = core.ffi.new("ms_layer[]", max(1, self._num_layers))
        for layer, weights in zip(layers, model.layers, strict=False):
            for name in VECTORS:
                setattr(layer, name, self._vector(name, weights[name], (hidden_size,)))
            for name in MATRICES:
                setattr(layer, name, self._matrix(weights[name]))
        c.layers = layers
        self._kept.append(layers)
        self._model = c
        self._known: _KnownCaches | None = None
        needed = core.ffi.new("size_t *")
        if code := core.lib.ms_forward_work(exec_pointer, c, 1, 1, 1, needed):
            core.fail("forward", code, "the weights' shapes or types contradict each other")

    def _vector(self, name: str, array: np.ndarray, shape: tuple[int, ...]) -> Any:
        pointer = self._core.pointer(name, array, FLOAT32, shape)
        self._kept.append(pointer)  # it keeps the array alive
        return pointer

    def _matrix(self, weight: PackedWeight) -> dict[str, Any]:
        rows, columns = _shape(weight)
        return {
            "type": weight.type_id,
            "rows": rows,
            "columns": columns,
            "packed": weight.pointer,
            "packed_bytes": weight.nbytes,
            "keep_largest": weight.keep_largest,
        }

    def _caches(self, layers: list[KVLayer]) -> _KnownCaches:
        """The caches as C reads them: made once, and again if a step brings other arrays.

        Whoever calls C with them keeps what this returns until C is done: another thread's call may replace it here.
        """
        known = self._known
        if known is not None and known.are(layers):
            return known
        count, new = self._num_layers, self._core.ffi.new
        k, v = new("void *[]", max(1, count)), new("void *[]", max(1, count))
        k_scale, v_scale = new("float *[]", max(1, count)), new("float *[]", max(1, count))
        first: tuple[Any, ...] | None = None
        for i in range(count):
            pointers = self._describe(layers[i], layers[count + i], *self._head_shape, writable=True)
            k[i], v[i], k_scale[i], v_scale[i], *sizes = pointers
            first = first or tuple(sizes)
            if tuple(sizes) != first:
                raise ParameterError("all layers' KV caches must have the same type, blocks and block size")
        kind, blocks, block_size = first or (0, 1, 1)
        has_scales = kind == self._core.lib.MS_KV_I8
        null = self._core.ffi.NULL
        scales = (k_scale, v_scale) if has_scales else (null, null)
        cache = new("ms_kv_cache *", (kind, blocks, block_size, k, v, *scales))
        known = _KnownCaches([weakref.ref(layer) for layer in layers], cache, (k, v, k_scale, v_scale))
        self._known = known
        return known

    def __call__(
        self,
        token_ids: np.ndarray,
        positions: np.ndarray,
        slot_mapping: np.ndarray,
        block_tables: np.ndarray,
        context_lens: np.ndarray,
        query_start_loc: np.ndarray,
        logits_indices: np.ndarray,
        k_caches: Sequence[KVLayer],
        v_caches: Sequence[KVLayer],
    ) -> np.ndarray:
        """The arrays of a ModelInput -> logits (L, V). Writes the tokens' keys and values into the caches."""
        core, lib = self._core, self._core.lib
        tokens, sequences, logits = np.size(token_ids), np.size(context_lens), np.size(logits_indices)
        max_blocks = np.shape(block_tables)[1] if np.ndim(block_tables) == 2 else 0
        if not len(k_caches) == len(v_caches) == self._num_layers:
            counts = f"{len(k_caches)} of keys and {len(v_caches)} of values"
            raise ParameterError(f"the model has {self._num_layers} layers, the KV cache {counts}")
        caches = self._caches([*k_caches, *v_caches])
        arrays = (
            core.pointer("token_ids", token_ids, INT32, (tokens,)),
            core.pointer("positions", positions, INT32, (tokens,)),
            core.pointer("slot_mapping", slot_mapping, INT32, (tokens,)),
            core.pointer("block_tables", block_tables, INT32, (sequences, max_blocks)),
            core.pointer("context_lens", context_lens, INT32, (sequences,)),
            core.pointer("query_start_loc", query_start_loc, INT32, (sequences + 1,)),
            core.pointer("logits_indices", logits_indices, INT32, (logits,)),
        )
        batch = core.ffi.new("ms_batch *", (tokens, sequences, max_blocks, logits, *arrays))
        out, out_pointer = core.new((logits, self._vocab_size))
        code = lib.ms_forward(self._exec, out_pointer, self._model, caches.pointer, batch, *self._work(1))
        if code == lib.MS_WORK_TOO_SMALL:
            needed = core.ffi.new("size_t *")
            lib.ms_forward_work(self._exec, self._model, tokens, sequences, logits, needed)
            code = lib.ms_forward(self._exec, out_pointer, self._model, caches.pointer, batch, *self._work(needed[0]))
        if code:
            core.fail("forward", code, f"{tokens} tokens of {sequences} sequences")
        return out


def _refers(reference: weakref.ref[Any], layer: KVLayer) -> bool:
    return reference() is layer


def _shape(weight: PackedWeight) -> tuple[int, int]:
    if not isinstance(weight, PackedWeight):
        raise ParameterError(f"a weight must be what prepare() returned, not {type(weight).__name__}")
    return weight.shape
