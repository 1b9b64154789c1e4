"""The list of operations in C: `NativeBackend` checks what it is given and calls csrc/ through cffi.

cffi releases the GIL for the length of a call, and the core keeps nothing between calls but a team's threads.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

import numpy as np

from minserve.errors import BackendError, ParameterError
from minserve.ops import native_sampling
from minserve.ops.c_arrays import FLOAT16, FLOAT32, INT8, INT32, UINT8, kv_arrays, sizes
from minserve.ops.dtypes import GroupedTensor, Tensor
from minserve.ops.native_core import ISAS, Core, info, load, usable_cpus, why_unavailable
from minserve.ops.native_forward import ForwardModel, NativeForward
from minserve.ops.native_weights import PackedWeight, pack
from minserve.ops.quantized_kv import KVLayer, QuantizedKV
from minserve.ops.reference import dequantize
from minserve.ops.sampling import SamplingSettings
from minserve.ops.weight_memory import WeightMemory

__all__ = ["NativeBackend", "PackedWeight", "info", "why_unavailable"]


class NativeBackend:
    """The operations of `reference`, with the same names, arguments and results, computed by the C core.

    threads: how many a call may use (None: all processors that this process may run on).
    isa: "plain", "avx2" or "avx512vnni" (None: the best that this processor has). Both change the
    speed and not one bit of a result. Quantized weights meet activations that are quantized to int8
    (`reference.quantize_activations`). Several Python threads may use one backend at a time. A forked
    child computes with one thread, because a fork copies none but the one that calls it; so does a core that
    was built without threads.

    Every operation raises ParameterError for an array of the wrong type, shape or layout, and
    KernelError for an index out of range. Raises BackendError if the core or the isa is not there.
    """

    name = "c"
    kv_cache_dtype = "float16"

    def __init__(self, threads: int | None = None, isa: str | None = None) -> None:
        core = load()
        if isinstance(core, str):
            raise BackendError(f"the C core cannot run: {core}")
        available = info()["isas"]
        if isa is not None and isa not in available:
            raise BackendError(f"no instruction set {isa!r} here; there are {', '.join(available)}")
        if threads is None:
            threads = min(usable_cpus(), 1024)  # the most that the core takes
        elif not isinstance(threads, int) or not 1 <= threads <= 1024:
            raise ParameterError(f"threads must be a whole number from 1 to 1024, not {threads!r}")
        self.isa = isa or available[-1]
        self._core, self._lib = core, core.lib
        if os.getpid() != core.process or not core.lib.ms_has_threads():
            threads = 1  # a forked child, or a core that was built without threads
        self._team = _new_team(core, threads)
        self._exec = core.ffi.new("ms_exec *", (threads, ISAS.index(self.isa), self._team))
        self._weights = WeightMemory()
        self._local = threading.local()  # a work space for each Python thread
        if hasattr(os, "register_at_fork"):
            backend = weakref.ref(self)
            os.register_at_fork(after_in_child=lambda: _use_one_thread(backend()))

    @property
    def threads(self) -> int:
        """How many threads a call may use."""
        return self._exec.threads

    def _f32(self, name: str, array: np.ndarray, shape: tuple[int, ...]) -> Any:
        return self._core.pointer(name, array, FLOAT32, shape)

    def _i32(self, name: str, array: np.ndarray, shape: tuple[int, ...]) -> Any:
        return self._core.pointer(name, array, INT32, shape)

    def _work(self, nbytes: int = 1 << 16) -> tuple[Any, int]:
        """This Python thread's work space of at least nbytes: (pointer, bytes)."""
        work = getattr(self._local, "work", None)
        if work is None or work[1] < nbytes:
            work = self._local.work = self._core.new((nbytes,), UINT8)[1], nbytes
        return work

    # ---- the operations, in the order of ops.OPERATIONS; see `reference` for each ----

    def prepare(self, tensor: Tensor | GroupedTensor) -> PackedWeight | np.ndarray:
        """A matrix as PackedWeight, a vector as float32 (n,)."""
        if len(tensor.shape) == 1:
            return np.ascontiguousarray(dequantize(tensor))
        return pack(self._core, self._exec, self._weights, tensor)

    def embedding(self, token_ids: np.ndarray, weight: PackedWeight) -> np.ndarray:
        """token_ids int32 (T,), weight (V, D) -> (T, D)."""
        rows, columns = _packed(weight).shape
        tokens = np.size(token_ids)
        ids = self._i32("token_ids", token_ids, (tokens,))
        out, out_pointer = self._core.new((tokens, columns))
        if code := self._lib.ms_embedding(
            self._exec, out_pointer, ids, tokens, weight.type_id, rows, columns, weight.pointer, weight.nbytes
        ):
            self._core.fail("embedding", code, f"{rows} tokens, ids {token_ids.min()} to {token_ids.max()}")
        return out

    def rms_norm(self, x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
        """x (T, D), weight (D,) -> (T, D)."""
        tokens, size = sizes("x", x, 2)
        out, out_pointer = self._core.new((tokens, size))
        x_pointer, w_pointer = self._f32("x", x, (tokens, size)), self._f32("weight", weight, (size,))
        if code := self._lib.ms_rms_norm(self._exec, out_pointer, x_pointer, w_pointer, tokens, size, eps):
            self._core.fail("rms_norm", code)
        return out

    def linear(self, x: np.ndarray, weight: PackedWeight) -> np.ndarray:
        """x (T, in), weight (out, in) -> (T, out)."""
        rows, columns = _packed(weight).shape
        tokens = sizes("x", x, 2)[0]
        x_pointer = self._f32("x", x, (tokens, columns))
        out, out_pointer = self._core.new((tokens, rows))
        lib, matrix = self._lib, (weight.type_id, rows, columns)
        arguments = (
            self._exec,
            out_pointer,
            x_pointer,
            tokens,
            weight.keep_largest,
            *matrix,
            weight.pointer,
            weight.nbytes,
        )
        code = lib.ms_linear(*arguments, *self._work())
        if code == lib.MS_WORK_TOO_SMALL:
            needed = self._core.ffi.new("size_t *")
            lib.ms_linear_work(self._exec, tokens, *matrix, needed)
            code = lib.ms_linear(*arguments, *self._work(needed[0]))
        if code:
            self._core.fail("linear", code)
        return out

    def rope(self, x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
        """x (T, heads, d); cos, sin (T, d/2) -> (T, heads, d)."""
        tokens, heads, head_dim = sizes("x", x, 3)
        x_pointer = self._f32("x", x, (tokens, heads, head_dim))
        cos_pointer = self._f32("cos", cos, (tokens, head_dim // 2))
        sin_pointer = self._f32("sin", sin, (tokens, head_dim // 2))
        out, out_pointer = self._core.new((tokens, heads, head_dim))
        if code := self._lib.ms_rope(
            self._exec, out_pointer, x_pointer, cos_pointer, sin_pointer, tokens, heads, head_dim
        ):
            self._core.fail("rope", code, f"head size {head_dim}")
        return out

    def _caches(
        self, k_cache: KVLayer, v_cache: KVLayer, kv_heads: int, head_dim: int, writable: bool
    ) -> tuple[Any, Any, Any, Any, int, int, int]:
        """Pointers to both caches and their scales (or NULL), their type for C, number of blocks, block size."""
        lib, take = self._lib, self._core.pointer
        arrays, dtype, blocks, block_size = kv_arrays(take, k_cache, v_cache, kv_heads, head_dim, writable)
        k, v, k_scale, v_scale = (*arrays, self._core.ffi.NULL, self._core.ffi.NULL)[:4]
        kind = {FLOAT32: lib.MS_KV_F32, FLOAT16: lib.MS_KV_F16, INT8: lib.MS_KV_I8}[dtype]
        return k, v, k_scale, v_scale, kind, blocks, block_size

    def write_kv(
        self, k: np.ndarray, v: np.ndarray, k_cache: KVLayer, v_cache: KVLayer, slot_mapping: np.ndarray
    ) -> None:
        """k, v (T, K, d) into caches float32, float16 or QuantizedKV (N, K, B, d); slot_mapping int32 (T,)."""
        shape = tokens, kv_heads, head_dim = sizes("k", k, 3)
        *caches, blocks, block_size = self._caches(k_cache, v_cache, kv_heads, head_dim, writable=True)
        k_from, v_from = self._f32("k", k, shape), self._f32("v", v, shape)
        slots = self._i32("slot_mapping", slot_mapping, (tokens,))
        if code := self._lib.ms_write_kv(self._exec, k_from, v_from, *caches, slots, *shape, blocks, block_size):
            self._core.fail("write_kv", code, f"{blocks} blocks of {block_size} slots")

    def paged_attention(
        self,
        q: np.ndarray,
        k_cache: KVLayer,
        v_cache: KVLayer,
        block_tables: np.ndarray,
        context_lens: np.ndarray,
        query_start_loc: np.ndarray,
        scale: float,
    ) -> np.ndarray:
        """q (T, H, d) over caches (N, K, B, d) -> (T, H, d); the index arrays are int32."""
        tokens, heads, head_dim = sizes("q", q, 3)
        kv_heads = sizes("k_cache", k_cache.q if isinstance(k_cache, QuantizedKV) else k_cache, 4)[1]
        sequences, max_blocks = sizes("block_tables", block_tables, 2)
        *caches, blocks, block_size = self._caches(k_cache, v_cache, kv_heads, head_dim, writable=False)
        q_pointer = self._f32("q", q, (tokens, heads, head_dim))
        tables = self._i32("block_tables", block_tables, (sequences, max_blocks))
        lens = self._i32("context_lens", context_lens, (sequences,))
        starts = self._i32("query_start_loc", query_start_loc, (sequences + 1,))
        out, out_pointer = self._core.new((tokens, heads, head_dim))
        lib, shape = self._lib, (heads, kv_heads, head_dim)
        arrays = (out_pointer, q_pointer, *caches, tables, lens, starts)
        arguments = (self._exec, *arrays, tokens, sequences, max_blocks, *shape, blocks, block_size, scale)
        code = lib.ms_paged_attention(*arguments, *self._work())
        if code == lib.MS_WORK_TOO_SMALL:
            needed = self._core.ffi.new("size_t *")
            lib.ms_paged_attention_work(self._exec, *shape, needed)
            code = lib.ms_paged_attention(*arguments, *self._work(needed[0]))
        if code:
            self._core.fail("paged_attention", code, f"{heads} heads over {kv_heads} of {head_dim}, {blocks} KV blocks")
        return out

    def silu_mul(self, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        """silu(gate) * up. (T, F), (T, F) -> (T, F)."""
        shape = np.shape(gate)
        gate_pointer, up_pointer = self._f32("gate", gate, shape), self._f32("up", up, shape)
        out, out_pointer = self._core.new(shape)
        if code := self._lib.ms_silu_mul(self._exec, out_pointer, gate_pointer, up_pointer, out.size):
            self._core.fail("silu_mul", code)
        return out

    def add(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """x + y. (T, D), (T, D) -> (T, D)."""
        shape = np.shape(x)
        x_pointer, y_pointer = self._f32("x", x, shape), self._f32("y", y, shape)
        out, out_pointer = self._core.new(shape)
        if code := self._lib.ms_add(self._exec, out_pointer, x_pointer, y_pointer, out.size):
            self._core.fail("add", code)
        return out

    def sample(self, logits: np.ndarray, settings: SamplingSettings | None = None) -> tuple[np.ndarray, np.ndarray]:
        """logits (R, V) -> token_ids int32 (R,), -1 where the row failed, and status int32 (R,), each a RowStatus."""
        return native_sampling.sample(self._core, self._exec, self._work, logits, settings)

    def probabilities(self, logits: np.ndarray, settings: SamplingSettings) -> tuple[np.ndarray, np.ndarray]:
        """logits (R, V) -> probabilities float64 (R, V), 0 where the row failed, and status int32 (R,)."""
        return native_sampling.probabilities(self._core, self._exec, self._work, logits, settings)

    def log_softmax(self, logits: np.ndarray) -> np.ndarray:
        """logits (R, V) -> float64 (R, V)."""
        return native_sampling.log_softmax(self._core, self._exec, logits)

    def fuse(self, model: ForwardModel) -> NativeForward:
        """The whole forward pass of a model as one call: the same bits as its operations one after the other."""
        return NativeForward(self._core, self._exec, self._work, self._caches, model)

    def quantize_activations(
        self, x: np.ndarray, keep_largest: bool = False
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """What `linear` does to x (T, in) for quantized weights, as `reference.quantize_activations`."""
        tokens, columns = sizes("x", x, 2)
        x_pointer, new = self._f32("x", x, (tokens, columns)), self._core.new
        q, q_pointer = new((tokens, columns), INT8)
        scale, scale_pointer = new((tokens, -(-columns // 32)))
        column, column_pointer = new((tokens,), INT32)
        value, value_pointer = new((tokens,))
        outputs = (q_pointer, scale_pointer, column_pointer, value_pointer)
        if code := self._lib.ms_quantize_activations(self._exec, *outputs, x_pointer, tokens, columns, keep_largest):
            self._core.fail("quantize_activations", code, f"{columns} columns")
        return q, scale, column, value


def _new_team(core: Core, threads: int) -> Any:
    """Threads that wait for work until the last reference to them is gone."""
    team = core.ffi.new("ms_team **")
    if code := core.lib.ms_team_new(threads, team):
        core.fail("start threads", code, f"{threads} threads: choose fewer")
    return core.ffi.gc(team[0], core.lib.ms_team_free)


def _use_one_thread(backend: NativeBackend | None) -> None:
    if backend is not None:
        backend._exec.threads = 1


def _packed(weight: PackedWeight) -> PackedWeight:
    if not isinstance(weight, PackedWeight):
        raise ParameterError(f"weight must be what prepare() returned, not {type(weight).__name__}")
    return weight
