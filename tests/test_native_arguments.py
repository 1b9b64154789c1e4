"""What a caller may get wrong: each is an error with a name, and none reaches memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from minserve.errors import KernelError, ParameterError
from minserve.ops.dtypes import F32, Q4_1, Q8_0, Tensor
from minserve.ops.native import NativeBackend
from minserve.ops.native_core import Core, load
from minserve.ops.quantized_kv import QuantizedKV
from tests.support.native_cases import BACKENDS, random_tensor

RNG = np.random.default_rng(0)
BACKEND: NativeBackend = BACKENDS[-1]
WEIGHT = BACKEND.prepare(random_tensor(RNG, Q4_1, 20, 64))


def floats(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def ints(*values: Any) -> np.ndarray:
    return np.array(values, np.int32)


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def misaligned(*shape: int) -> np.ndarray:
    """float32, C-contiguous, from an odd address on."""
    return np.zeros(4 * int(np.prod(shape)) + 1, np.uint8)[1:].view(np.float32).reshape(shape)


HEADS = floats(2, 3, 8)
CACHE = floats(4, 3, 16, 8)


def int8_cache(*shape: int) -> QuantizedKV:
    return QuantizedKV(np.ones(shape, np.int8), floats(*shape[:3]))


INT8 = int8_cache(4, 3, 16, 8)
READ_ONLY_SCALE = QuantizedKV(INT8.q, read_only(INT8.scale.copy()))
READ_ONLY_Q = QuantizedKV(read_only(INT8.q.copy()), INT8.scale)
STRIDED = QuantizedKV(np.ones((4, 3, 16, 16), np.int8)[..., ::2], INT8.scale)


def attend(**changed: Any) -> np.ndarray:
    """Two tokens, the second and third of one sequence, with some arguments changed."""
    right = {
        "q": floats(2, 6, 8),
        "k_cache": CACHE,
        "v_cache": CACHE,
        "block_tables": ints([1, 3]),
        "context_lens": ints(3),
        "query_start_loc": ints(0, 2),
        "scale": 0.5,
    }
    return BACKEND.paged_attention(**{**right, **changed})


WRONG_ARRAYS: list[tuple[str, Callable[[], object]]] = [
    ("x must be float32, not float64", lambda: BACKEND.linear(np.ones((2, 64)), WEIGHT)),
    ("x must be float32, not int32", lambda: BACKEND.linear(np.ones((2, 64), np.int32), WEIGHT)),
    (r"x must have the shape \(2, 64\)", lambda: BACKEND.linear(floats(2, 63), WEIGHT)),
    ("x must be a NumPy array of 2", lambda: BACKEND.linear(floats(64), WEIGHT)),
    ("x must be a NumPy array of 2", lambda: BACKEND.linear([[1.0] * 64], WEIGHT)),  # type: ignore[arg-type]
    ("C-contiguous", lambda: BACKEND.linear(floats(64, 2).T, WEIGHT)),
    ("C-contiguous", lambda: BACKEND.linear(floats(2, 128)[:, ::2], WEIGHT)),
    ("aligned", lambda: BACKEND.linear(misaligned(2, 64), WEIGHT)),
    ("weight must be what prepare", lambda: BACKEND.linear(floats(2, 64), floats(20, 64))),  # type: ignore[arg-type]
    ("weight must be what prepare", lambda: BACKEND.embedding(ints(1), floats(20, 64))),  # type: ignore[arg-type]
    ("token_ids must be int32, not int64", lambda: BACKEND.embedding(np.array([1]), WEIGHT)),
    ("token_ids must have the shape", lambda: BACKEND.embedding(ints([1, 2]), WEIGHT)),
    (r"weight must have the shape \(64,\)", lambda: BACKEND.rms_norm(floats(2, 64), floats(63), 1e-5)),
    ("x must be a NumPy array of 2", lambda: BACKEND.rms_norm(floats(64), floats(64), 1e-5)),
    (r"cos must have the shape \(2, 4\)", lambda: BACKEND.rope(HEADS, floats(2, 3), floats(2, 4))),
    (r"sin must have the shape \(2, 4\)", lambda: BACKEND.rope(HEADS, floats(2, 4), floats(1, 4))),
    ("x must be a NumPy array of 3", lambda: BACKEND.rope(floats(2, 24), floats(2, 4), floats(2, 4))),
    ("up must have the shape", lambda: BACKEND.silu_mul(floats(2, 8), floats(2, 9))),
    ("y must be float32", lambda: BACKEND.add(floats(2, 8), np.ones((2, 8), np.float16))),
    ("k_cache is read-only", lambda: BACKEND.write_kv(HEADS, HEADS, read_only(CACHE.copy()), CACHE, ints(0, 1))),
    ("v_cache is read-only", lambda: BACKEND.write_kv(HEADS, HEADS, CACHE, read_only(CACHE.copy()), ints(0, 1))),
    ("v_cache must be float32", lambda: BACKEND.write_kv(HEADS, HEADS, CACHE, CACHE.astype("f2"), ints(0, 1))),
    (
        "k_cache must be float32, not float64",
        lambda: BACKEND.write_kv(HEADS, HEADS, CACHE.astype("f8"), CACHE, ints(0)),
    ),
    ("k_cache must have the shape", lambda: BACKEND.write_kv(HEADS, HEADS, floats(4, 2, 16, 8), CACHE, ints(0, 1))),
    ("v must have the shape", lambda: BACKEND.write_kv(HEADS, floats(2, 3, 6), CACHE.copy(), CACHE.copy(), ints(0, 1))),
    ("slot_mapping must have the shape", lambda: BACKEND.write_kv(HEADS, HEADS, CACHE.copy(), CACHE.copy(), ints(0))),
    ("slot_mapping must be int32", lambda: BACKEND.write_kv(HEADS, HEADS, CACHE, CACHE, np.array([0, 1]))),
    ("k_cache.q is read-only", lambda: BACKEND.write_kv(HEADS, HEADS, READ_ONLY_Q, INT8, ints(0, 1))),
    ("v_cache.scale is read-only", lambda: BACKEND.write_kv(HEADS, HEADS, INT8, READ_ONLY_SCALE, ints(0, 1))),
    ("v_cache.q must be C-contiguous", lambda: BACKEND.write_kv(HEADS, HEADS, INT8, STRIDED, ints(0, 1))),
    ("both be a QuantizedKV", lambda: BACKEND.write_kv(HEADS, HEADS, INT8, CACHE.copy(), ints(0, 1))),
    ("both be a QuantizedKV", lambda: BACKEND.write_kv(HEADS, HEADS, CACHE.copy(), INT8, ints(0, 1))),
    ("k_cache must be float32, not int8", lambda: BACKEND.write_kv(HEADS, HEADS, INT8.q, INT8.q, ints(0, 1))),
    (
        "k_cache.q must have the shape",
        lambda: BACKEND.write_kv(HEADS, HEADS, int8_cache(4, 2, 16, 8), INT8, ints(0, 1)),
    ),
    ("v_cache.q must have the shape", lambda: attend(k_cache=INT8, v_cache=int8_cache(4, 3, 8, 8))),
    ("k_cache.q must have the shape", lambda: attend(q=floats(2, 6, 4), k_cache=INT8, v_cache=INT8)),
    ("both be a QuantizedKV", lambda: attend(k_cache=INT8)),
    ("both be a QuantizedKV", lambda: attend(v_cache=INT8)),
    ("q must be a NumPy array of 3", lambda: attend(q=floats(2, 48))),
    ("k_cache must be a NumPy array of 4", lambda: attend(k_cache=floats(4, 3, 128))),
    ("k_cache must have the shape", lambda: attend(q=floats(2, 6, 4))),
    ("v_cache must have the shape", lambda: attend(v_cache=floats(5, 3, 16, 8))),
    ("block_tables must be a NumPy array of 2", lambda: attend(block_tables=ints(1, 3))),
    ("context_lens must have the shape", lambda: attend(context_lens=ints(3, 3))),
    ("query_start_loc must have the shape", lambda: attend(query_start_loc=ints(0, 1, 2))),
    ("query_start_loc must be int32", lambda: attend(query_start_loc=np.array([0, 2]))),
]


@pytest.mark.parametrize(("message", "call"), WRONG_ARRAYS, ids=[message for message, _ in WRONG_ARRAYS])
def test_a_wrong_array_is_named(message: str, call: Callable[[], object]) -> None:
    """cffi alone takes any buffer for any pointer: float64 would be read as twice as many floats."""
    with pytest.raises(ParameterError, match=message):
        call()


WRONG_VALUES: list[tuple[str, Callable[[], object]]] = [
    ("embedding: a token id is outside", lambda: BACKEND.embedding(ints(0, 20), WEIGHT)),
    (r"ids -1 to 5", lambda: BACKEND.embedding(ints(5, -1), WEIGHT)),
    ("rope: a size", lambda: BACKEND.rope(floats(2, 3, 7), floats(2, 3), floats(2, 3))),
    ("write_kv: a slot is outside", lambda: BACKEND.write_kv(HEADS, HEADS, CACHE.copy(), CACHE.copy(), ints(0, 64))),
    ("write_kv: a slot is outside", lambda: BACKEND.write_kv(HEADS, HEADS, CACHE.copy(), CACHE.copy(), ints(-1, 0))),
    ("write_kv: a slot is outside", lambda: BACKEND.write_kv(HEADS, HEADS, INT8, INT8, ints(0, 64))),
    ("write_kv: a slot is outside", lambda: BACKEND.write_kv(HEADS, HEADS, INT8, INT8, ints(-1, 0))),
    ("a block id is outside", lambda: attend(block_tables=ints([4, 0]), k_cache=INT8, v_cache=INT8)),
    ("a block id is outside", lambda: attend(block_tables=ints([4, 0]))),
    ("a block id is outside", lambda: attend(block_tables=ints([-1, 0]))),
    ("a block table is too short", lambda: attend(context_lens=ints(33))),
    ("query_start_loc or context_lens", lambda: attend(context_lens=ints(1))),
    ("query_start_loc or context_lens", lambda: attend(context_lens=ints(-1))),
    ("query_start_loc or context_lens", lambda: attend(query_start_loc=ints(0, 1))),
    ("query_start_loc or context_lens", lambda: attend(query_start_loc=ints(0, 3))),
    ("query_start_loc or context_lens", lambda: attend(query_start_loc=ints(1, 2))),
    (
        "query_start_loc or context_lens",
        lambda: attend(block_tables=ints([1], [2], [3]), context_lens=ints(9, 9, 9), query_start_loc=ints(0, 5, 1, 2)),
    ),
    ("paged_attention: a size", lambda: attend(q=floats(2, 4, 8))),
    (
        "paged_attention: a size",
        lambda: attend(q=floats(2, 3, 258), k_cache=floats(4, 3, 2, 258), v_cache=floats(4, 3, 2, 258)),
    ),
    (r"prepare w: .*\(Q4_1, 3 x 33\)", lambda: BACKEND.prepare(Tensor("w", Q4_1, (3, 33), np.zeros(99, np.uint8)))),
    ("fewer bytes than its sizes need", lambda: BACKEND.prepare(Tensor("w", Q8_0, (2, 32), np.zeros(67, np.uint8)))),
]


@pytest.mark.parametrize(("message", "call"), WRONG_VALUES, ids=[message for message, _ in WRONG_VALUES])
def test_a_value_out_of_range_is_refused_before_memory_is_touched(message: str, call: Callable[[], object]) -> None:
    with pytest.raises(KernelError, match=message):
        call()


def test_a_refused_write_changes_nothing() -> None:
    """All slots are checked before the first is written."""
    k_cache, v_cache = CACHE.copy(), CACHE.copy()
    with pytest.raises(KernelError):
        BACKEND.write_kv(HEADS * 2, HEADS * 2, k_cache, v_cache, ints(0, 64))
    assert (k_cache == CACHE).all()
    assert (v_cache == CACHE).all()
    k_int8, v_int8 = int8_cache(4, 3, 16, 8), int8_cache(4, 3, 16, 8)
    with pytest.raises(KernelError):
        BACKEND.write_kv(HEADS * 2, HEADS * 2, k_int8, v_int8, ints(0, 64))
    for array in (k_int8.q, k_int8.scale, v_int8.q, v_int8.scale):
        assert (array == 1).all()


@pytest.mark.parametrize("shape", [(2, 2, 2), (0, 32), (2, 0)])
def test_a_matrix_has_two_dimensions_and_values(shape: tuple[int, ...]) -> None:
    with pytest.raises(ParameterError, match="two dimensions"):
        BACKEND.prepare(Tensor("w", F32, shape, np.zeros(4 * int(np.prod(shape)), np.uint8)))


@pytest.mark.parametrize("threads", [0, -1, 1025, 1.5, "2"])
def test_a_wrong_number_of_threads(threads: Any) -> None:
    with pytest.raises(ParameterError, match="threads must be"):
        NativeBackend(threads)


class TestTheCoreItself:
    """The C functions called as another program might call them, past the checks of native.py."""

    core = load()
    assert isinstance(core, Core)
    lib, ffi = core.lib, core.ffi

    def exec(self, threads: int = 1, isa: int = 0) -> Any:
        return self.ffi.new("ms_exec *", (threads, isa))

    @pytest.mark.parametrize(
        ("threads", "isa", "code"),
        [
            (0, 0, "BAD_THREADS"),
            (-5, 0, "BAD_THREADS"),
            (1025, 0, "BAD_THREADS"),
            (1, 3, "BAD_ISA"),
            (1, -1, "BAD_ISA"),
        ],
    )
    def test_how_to_run(self, threads: int, isa: int, code: str) -> None:
        x = self.ffi.new("float[16]")
        assert self.lib.ms_add(self.exec(threads, isa), x, x, x, 16) == getattr(self.lib, f"MS_{code}")

    def test_null_pointers(self) -> None:
        """Each pointer of each operation in turn: a code, not a crash."""
        lib, null = self.lib, self.ffi.NULL
        f, i, b = self.ffi.new("float[4096]"), self.ffi.new("int32_t[64]", [0, 1]), self.ffi.new("uint8_t[65536]")
        h, q, n = self.ffi.new("uint16_t[64]"), self.ffi.new("int8_t[64]"), self.ffi.new("size_t *")
        e = self.exec()
        attention = [i, i + 1, i, 1, 1, 1, 1, 1, 16, 1, 1, 1.0, b, 65536]
        calls = [
            (lib.ms_pack, [e, lib.MS_Q8_0, 1, 32, b, 34, b, 65536]),
            (lib.ms_pack_grouped, [e, 8, 32, 1, 32, b, h, h, b, 65536]),
            (lib.ms_embedding, [e, f, i, 1, lib.MS_F32, 16, 16, b, 65536]),
            (lib.ms_rms_norm, [e, f, f, f, 1, 16, 1e-5]),
            (lib.ms_quantize_activations, [e, q, f, i, f, f, 1, 32, 1]),
            (lib.ms_linear, [e, f, f, 1, 0, lib.MS_F32, 16, 16, b, 65536, b, 65536]),
            (lib.ms_rope, [e, f, f, f, f, 1, 1, 16]),
            (lib.ms_write_kv, [e, f, f, f, f, f, f, lib.MS_KV_I8, i, 1, 1, 16, 1, 1]),
            (lib.ms_paged_attention, [e, f, f, f, f, f, f, lib.MS_KV_I8, *attention]),
            (lib.ms_silu_mul, [e, f, f, f, 16]),
            (lib.ms_add, [e, f, f, f, 16]),
            (lib.ms_linear_work, [e, 1, lib.MS_F32, 16, 16, n]),
            (lib.ms_paged_attention_work, [e, 1, 1, 16, n]),
        ]
        for function, arguments in calls:
            assert function(*arguments) == lib.MS_OK
            for place, argument in enumerate(arguments):
                if isinstance(argument, self.ffi.CData):
                    spoiled = [*arguments[:place], null, *arguments[place + 1 :]]
                    assert function(*spoiled) == lib.MS_NULL_POINTER, (function, place)
        for kv in (lib.MS_KV_F32, lib.MS_KV_F16):  # these have no scales
            assert lib.ms_write_kv(e, f, f, f, f, null, null, kv, i, 1, 1, 16, 1, 1) == lib.MS_OK
            assert lib.ms_paged_attention(e, f, f, f, f, null, null, kv, *attention) == lib.MS_OK

    @pytest.mark.parametrize("huge", [-1, 2**62, 2**63 - 1])
    def test_sizes_that_overflow(self, huge: int) -> None:
        """A product of sizes that wraps around would pass for a small buffer."""
        lib, e = self.lib, self.exec()
        f, i, b = self.ffi.new("float[64]"), self.ffi.new("int32_t[64]"), self.ffi.new("uint8_t[65536]")
        n = self.ffi.new("size_t *")
        for code in (
            lib.ms_add(e, f, f, f, huge),
            lib.ms_packed_bytes(lib.MS_F32, huge, 64, n),
            lib.ms_packed_bytes(lib.MS_F32, 64, huge, n),
            lib.ms_rms_norm(e, f, f, f, huge, 16, 1e-5),
            lib.ms_linear(e, f, f, huge, 0, lib.MS_F32, 16, 16, b, 65536, b, 65536),
            lib.ms_rope(e, f, f, f, f, 1, huge, 16),
            lib.ms_write_kv(e, f, f, f, f, f, f, lib.MS_KV_F32, i, 1, 1, 16, huge, 16),
            lib.ms_write_kv(e, f, f, f, f, f, f, lib.MS_KV_I8, i, 1, huge, 16, 1, 16),
            lib.ms_embedding(e, f, i, huge, lib.MS_F32, 16, 16, b, 65536),
        ):
            assert code == lib.MS_BAD_SIZE

    def test_small_buffers_and_unknown_types(self) -> None:
        lib, e = self.lib, self.exec()
        f, i, b = self.ffi.new("float[4096]"), self.ffi.new("int32_t[4]", [0, 1]), self.ffi.new("uint8_t[65536]")
        n = self.ffi.new("size_t *")
        assert lib.ms_packed_bytes(99, 1, 32, n) == lib.ms_packed_bytes(-1, 1, 32, n) == lib.MS_BAD_TYPE
        assert lib.ms_pack(e, lib.MS_U8_32, 1, 32, b, 34, b, 65536) == lib.MS_BAD_TYPE
        assert lib.ms_pack(e, lib.MS_Q8_0, 1, 32, b, 33, b, 65536) == lib.MS_BUFFER_TOO_SMALL
        assert lib.ms_pack(e, lib.MS_Q8_0, 1, 32, b, 34, b, 543) == lib.MS_BUFFER_TOO_SMALL
        assert lib.ms_embedding(e, f, i, 1, lib.MS_F32, 17, 16, b, 2047) == lib.MS_BUFFER_TOO_SMALL
        assert lib.ms_linear(e, f, f, 1, 0, lib.MS_F32, 17, 16, b, 2047, b, 65536) == lib.MS_BUFFER_TOO_SMALL
        assert lib.ms_linear(e, f, f, 1, 0, lib.MS_Q8_0, 16, 32, b, 65536, b, 64) == lib.MS_WORK_TOO_SMALL
        assert lib.ms_quantize_activations(e, self.ffi.new("int8_t[64]"), f, i, f, f, 1, 40, 0) == lib.MS_BAD_SIZE
        attention = [f, f, f, f, f, f, lib.MS_KV_F32, i, i + 1, i, 1, 1, 1, 1, 1, 16, 1, 1, 1.0, b]
        assert lib.ms_paged_attention(e, *attention, 4096) == lib.MS_WORK_TOO_SMALL
        for kv in (-1, 3):
            attention[6] = kv
            assert lib.ms_paged_attention(e, *attention, 65536) == lib.MS_BAD_TYPE
            assert lib.ms_write_kv(e, f, f, f, f, f, f, kv, i, 1, 1, 16, 1, 1) == lib.MS_BAD_TYPE

    def test_every_code_has_words(self) -> None:
        names = [name for name in dir(self.lib) if (name.startswith("MS_") and "BAD" in name) or "SMALL" in name]
        texts = [self.ffi.string(self.lib.ms_error_text(getattr(self.lib, name))) for name in names]
        assert len(names) >= 10
        assert len(set(texts)) == len(names)
        assert b"unknown error" not in texts
        assert self.ffi.string(self.lib.ms_error_text(12345)) == b"unknown error"
