"""`sample` and `log_softmax` in C against their definitions in NumPy, and against themselves: alone, in a batch, by
more threads. What a caller may get wrong is here for `probabilities` too: it takes what `sample` takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minserve.engine.sampler import SampledToken, Sampler
from minserve.engine.sampling_row import settings_of
from minserve.errors import KernelError, ParameterError
from minserve.ops import reference
from minserve.ops.native_core import Core, load
from minserve.ops.sampling import RowStatus, SamplingSettings, candidates, uniform
from tests.support.native_cases import BACKENDS
from tests.support.sampling_cases import (
    KINDS,
    LARGE,
    PARAMS,
    SIZES,
    a_row,
    large_rows,
    near_a_border,
    row_of,
    same_tokens,
    some_logits,
)

C = BACKENDS[-1]
ONE_EACH = [backend for backend in BACKENDS if backend.threads == 2]  # of each instruction set


@settings(max_examples=400)
@given(
    st.sampled_from(SIZES),
    st.lists(st.tuples(st.sampled_from(KINDS), PARAMS), min_size=1, max_size=4),
    st.integers(0, 2**32),
)
def test_it_is_the_definition(size: int, drawn: list[tuple[str, dict]], seed: int) -> None:
    """Any settings side by side, any logits: the tokens and failures of the NumPy form, on each instruction set."""
    rng = np.random.default_rng(seed)
    logits = np.stack([some_logits(rng, kind, size) for kind, _ in drawn])
    batch = settings_of([a_row(rng, size, params) for _, params in drawn])
    expected = reference.sample(logits, batch)
    for backend in ONE_EACH:
        same_tokens(expected, backend.sample(logits, batch), logits, batch)
    expected = reference.sample(logits)
    for backend in ONE_EACH:
        np.testing.assert_array_equal(backend.sample(logits), expected)


def test_a_real_vocabulary() -> None:
    logits, rows = large_rows()
    batch = settings_of(rows)
    expected = reference.sample(logits, batch)
    assert not expected[1].any()
    got = [backend.sample(logits, batch) for backend in BACKENDS]
    for result in got:
        np.testing.assert_array_equal(result, got[0])  # threads and instruction sets: not one token
    same_tokens(expected, got[0], logits, batch)
    for r, row in enumerate(rows):
        alone = C.sample(logits[r : r + 1], settings_of([row]))
        assert alone[0][0] == got[0][0][r]
    np.testing.assert_array_equal(C.sample(logits)[0], np.argmax(logits, axis=1))


def test_two_samplers_may_disagree_only_near_a_border() -> None:
    """The excuse that the comparison grants is a narrow one: of these 52 rows none needs it."""
    logits, rows = large_rows()
    batch = settings_of(rows)
    drawing = [r for r in range(len(rows)) if batch.temperature[r] > 0 and batch.top_p[r] in (1.0, 0.5, 0.9, 0.95)]
    assert len(drawing) > 20
    assert not any(near_a_border(logits, batch, r) for r in drawing)


@pytest.mark.parametrize("size", [5, 64, 200, 3000])
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_of_equal_logits_the_lower_index_is_first(size: int, temperature: float) -> None:
    """In arg-max, in top_k and at the edge of the nucleus."""
    logits = np.zeros((size, size), np.float32)
    logits[np.arange(size), np.arange(size)] = 1  # row r: token r is best, all others are equal
    rows = [row_of(row_seed=r, temperature=temperature, top_k=3) for r in range(size)]
    tokens = C.sample(logits, settings_of(rows))[0]
    if temperature == 0:
        assert tokens.tolist() == list(range(size))
        assert C.sample(np.zeros((3, size), np.float32))[0].tolist() == [0, 0, 0]
        return
    for r, token in enumerate(tokens.tolist()):
        assert token in {r, *[i for i in range(4) if i != r][:2]}
    half = [row_of(row_seed=seed, top_p=0.5) for seed in range(200)]
    tokens = C.sample(np.zeros((200, size), np.float32), settings_of(half))[0]
    assert tokens.max() < -(-size // 2)
    assert size > 5 or set(tokens.tolist()) == {0, 1, 2}


def test_top_k_is_more_than_the_chunks() -> None:
    """The tokens are first looked at in chunks of 64: the eleventh best must be found though it is no chunk's best."""
    logits = -np.arange(640, dtype=np.float32)
    logits[::64] = 1000  # the best of each of 10 chunks
    expected = [*range(0, 640, 64), 1, 2, 3, 4, 5]
    for top_k in (9, 10, 11, 12, 15):
        rows = [row_of(row_seed=seed, temperature=1e6, top_k=top_k) for seed in range(300)]
        tokens, _ = C.sample(np.repeat(logits[None], 300, axis=0), settings_of(rows))
        assert set(tokens.tolist()) == set(expected[:top_k])


def test_the_random_number_is_the_definitions() -> None:
    """Over V equal logits the token is floor(u * V): the first 16 bits of u, for keys from all over their range."""
    rng = np.random.default_rng(2)
    keys = rng.integers(0, 2**64, (200, 3), np.uint64)
    keys[:, 1] %= 16384
    keys[:, 2] %= 2**31
    keys[:6] = [[0, 0, 0], [2**64 - 1, 0, 1], [2**63, 16383, 2**31 - 1], [1, 0, 0], [0, 1, 0], [0, 0, 1]]
    batch = dataclasses.replace(settings_of([row_of() for _ in keys]), draw_keys=keys)
    tokens, _ = C.sample(np.zeros((200, 65536), np.float32), batch)
    assert tokens.tolist() == [int(uniform(*map(int, key)) * 65536) for key in keys]


@pytest.mark.parametrize("params", [{"top_k": 8}, {"top_p": 0.8}, {"min_p": 0.3}, {"temperature": 1.5}], ids=str)
def test_draws_have_the_distribution(params: dict) -> None:
    """Chi-square of 20,000 draws over what is left; the seed is fixed, and a fair sampler fails one in 10,000."""
    logits, count = np.random.default_rng(4).normal(size=30).astype(np.float32), 20_000
    one = settings_of([row_of(**params)])
    ids, weights = candidates(
        logits.astype(np.float64), one.temperature[0], one.top_k[0], one.top_p[0], one.min_p[0]
    )  # (C,) each
    batch = settings_of([row_of(row_seed=9, index=i, **params) for i in range(count)])
    tokens, _ = C.sample(np.repeat(logits[None], count, axis=0), batch)
    seen = np.bincount(tokens, minlength=30)
    expected = weights / weights.sum() * count
    assert seen[ids].sum() == count
    freedom = ids.size - 1
    limit = freedom + 3.72 * np.sqrt(2 * freedom) + 2 / 3 * (3.72**2 - 1)  # Cornish and Fisher, p = 1e-4
    assert ((seen[ids] - expected) ** 2 / expected).sum() < limit


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("size", [3, 64, 1000, LARGE])
def test_one_bad_value_anywhere_is_found(bad: float, size: int) -> None:
    """In the first and last place, in the vectors and in what is left over; the rows beside it are as alone."""
    rng = np.random.default_rng(size)
    clean = rng.normal(size=(3, size)).astype(np.float32)
    rows = [row_of(temperature=t, row_seed=3, top_k=4) for t in (0, 0.8, 0.8)]
    for batch in (None, settings_of(rows)):
        expected, _ = C.sample(clean, batch)
        for place in {0, size // 2, size - 2, size - 1}:
            for r in range(3):
                spoiled = clean.copy()
                spoiled[r, place] = bad
                for backend in ONE_EACH:
                    tokens, status = backend.sample(spoiled, batch)
                    assert status.tolist() == [RowStatus.NOT_FINITE if i == r else RowStatus.DONE for i in range(3)]
                    assert tokens.tolist() == [-1 if i == r else expected[i] for i in range(3)]


@settings(max_examples=60)
@given(st.sampled_from([*SIZES, LARGE]), st.sampled_from(KINDS[:10]), st.integers(1, 4), st.integers(0, 2**32))
def test_log_softmax_is_the_definition(size: int, kind: str, count: int, seed: int) -> None:
    """Within a few units of the last place of float64; the same bits alone, in a batch, and by any threads."""
    rng = np.random.default_rng(seed)
    logits = np.stack([some_logits(rng, kind, size) for _ in range(count)])
    got = [backend.log_softmax(logits) for backend in BACKENDS]
    assert got[0].dtype == np.float64
    for result in got:
        np.testing.assert_array_equal(result.view(np.uint64), got[0].view(np.uint64))
    for r in range(count):
        np.testing.assert_array_equal(C.log_softmax(logits[r : r + 1])[0], got[0][r])
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(got[0], reference.log_softmax(logits), rtol=4e-16, atol=4e-14)


def test_the_exponential_is_exact_to_the_last_places() -> None:
    """Over two tokens the log probabilities are -log(1 + e^x), so an error in e^x cannot hide in a sum of many."""
    x = np.linspace(-40, 0, 20_001, dtype=np.float32)
    got = C.log_softmax(np.stack([np.zeros_like(x), x], axis=1))
    np.testing.assert_allclose(got[:, 0], -np.log1p(np.exp(x.astype(np.float64))), rtol=0, atol=5e-16)


def test_logprobs_do_not_depend_on_the_batch() -> None:
    """Rows that ask for them are gathered from among those that do not."""
    rng = np.random.default_rng(8)
    logits = rng.normal(size=(6, 777)).astype(np.float32)
    logits[2, 5] = np.nan
    rows = [row_of(row_seed=r, logprobs=None if r in (0, 4) else 1) for r in range(6)]
    sampler = Sampler(C)
    together = sampler.sample(logits, rows)
    for r, (result,) in enumerate(sampler.sample(logits[r : r + 1], rows[r : r + 1]) for r in range(6)):
        if r == 2:
            assert isinstance(together[r], Exception)
            continue
        expected = together[r]
        assert isinstance(result, SampledToken)
        assert isinstance(expected, SampledToken)
        assert result.token_id == expected.token_id
        assert (result.logprobs is None) == (r in (0, 4))
        if result.logprobs is not None:
            np.testing.assert_array_equal(result.logprobs, expected.logprobs)


LOGITS = np.zeros((2, 10), np.float32)
GOOD = settings_of([row_of([1, 2], [3], logit_bias={4: 1.0}, min_tokens=3, end_ids=[9], top_p=0.5)] * 2)


def changed(**fields: Any) -> SamplingSettings:
    """GOOD but for these fields."""
    return dataclasses.replace(GOOD, **fields)


def doubles(*values: float) -> np.ndarray:
    return np.array(values, np.float64)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


WRONG_LOGITS: list[tuple[type, str, np.ndarray]] = [
    (ParameterError, "logits must be a NumPy array of 2", LOGITS[0]),
    (ParameterError, "logits must be float32, not float64", LOGITS.astype(float)),
    (ParameterError, "logits must be C-contiguous", LOGITS.T),
    (KernelError, "a size", np.zeros((2, 0), np.float32)),
]
WRONG_SETTINGS: list[tuple[type, str, SamplingSettings]] = [
    (ParameterError, r"temperature must have the shape \(2,\)", changed(temperature=doubles(1, 1, 1))),
    (ParameterError, "top_k must be int32", changed(top_k=doubles(0, 0))),
    (ParameterError, "masked must be uint8", changed(masked=np.zeros(2, bool))),
    (ParameterError, r"draw_keys must have the shape \(2, 3\)", changed(draw_keys=GOOD.draw_keys[:, :2].copy())),
    (ParameterError, r"biases must have the shape \(2,\)", changed(biases=doubles(1))),
    (ParameterError, r"bias_starts must have the shape \(3,\)", changed(bias_starts=ints(0, 2))),
    (KernelError, "a size", changed(bias_starts=ints(0, 1, 3))),
    (KernelError, "a size", changed(bias_starts=ints(0, 3, 2))),
    (KernelError, "a size", changed(bias_starts=ints(1, 1, 2))),
    (KernelError, "a size", changed(ruled_out_starts=ints(0, -1, 2))),
    (KernelError, "a size", changed(num_prompt_tokens=ints(-1, 0))),
    (KernelError, "a token id is outside", changed(bias_ids=ints(0, 10))),
    (KernelError, "a token id is outside", changed(ruled_out_ids=ints(-1, 0))),
    (KernelError, "a token id is outside", changed(token_ids=ints(2**31 - 1), token_starts=ints(0, 0, 1))),
    (KernelError, "a temperature, top_p", changed(temperature=doubles(1, -0.1))),
    (KernelError, "a temperature, top_p", changed(temperature=doubles(1, np.nan))),
    (KernelError, "a temperature, top_p", changed(temperature=doubles(np.inf, 1))),
    (KernelError, "a temperature, top_p", changed(top_p=doubles(0, 1))),
    (KernelError, "a temperature, top_p", changed(top_p=doubles(1, 1.1))),
    (KernelError, "a temperature, top_p", changed(min_p=doubles(1, 1.5))),
    (KernelError, "a temperature, top_p", changed(repetition_penalty=doubles(1, 0))),
    (KernelError, "a temperature, top_p", changed(presence_penalty=doubles(1, np.inf))),
    (KernelError, "a temperature, top_p", changed(frequency_penalty=doubles(np.nan, 0))),
    (KernelError, "a temperature, top_p", changed(biases=doubles(1, np.nan))),
]


def refuses(operation: Callable[..., object], error: type, message: str, *arguments: object) -> None:
    """Assert that it raises just that; a KernelError says which operation it comes from."""
    prefix = f"^{operation.__name__}: " if error is KernelError else ""  # type: ignore[attr-defined]
    with pytest.raises(error, match=prefix + message):
        operation(*arguments)


@pytest.mark.parametrize(("error", "message", "logits"), WRONG_LOGITS)
def test_wrong_logits(error: type, message: str, logits: np.ndarray) -> None:
    refuses(C.sample, error, message, logits)
    refuses(C.sample, error, message, logits, GOOD)
    refuses(C.probabilities, error, message, logits, GOOD)
    refuses(C.log_softmax, error, message, logits)


@pytest.mark.parametrize(("error", "message", "wrong"), WRONG_SETTINGS)
def test_wrong_settings(error: type, message: str, wrong: SamplingSettings) -> None:
    for operation in (C.sample, C.probabilities):
        assert not operation(LOGITS, GOOD)[1].any()
        refuses(operation, error, message, LOGITS, wrong)


class TestTheCoreItself:
    """The C functions called as another program might call them, past the checks of native_sampling.py."""

    core = load()
    assert isinstance(core, Core)
    lib, ffi = core.lib, core.ffi
    BOTH = ("ms_sample", "ms_probabilities")
    POINTERS: ClassVar = [name for name, field in ffi.typeof("ms_sampling").fields if field.type.kind == "pointer"]

    def settings(self, **changes: Any) -> Any:
        """One row, greedy; NULL or 0 where `changes` says so."""
        ffi = self.ffi
        self.kept = {
            name: ffi.new(f"{ffi.typeof('ms_sampling').fields[i][1].type.item.cname}[4]")
            for i, (name, field) in enumerate(ffi.typeof("ms_sampling").fields)
            if field.type.kind == "pointer"
        }
        self.kept["top_p"][0] = self.kept["repetition_penalty"][0] = 1
        return ffi.new("ms_sampling *", {**self.kept, **changes})

    def call(self, settings: Any, operation: str = "ms_sample", **changes: Any) -> int:
        ffi = self.ffi
        work = ffi.new("uint8_t[4096]")
        arguments = {
            "exec": ffi.new("ms_exec *", (1, 0)),
            "out": ffi.new("int32_t[1]" if operation == "ms_sample" else "double[8]"),
            "status": ffi.new("int32_t[1]"),
            "logits": ffi.new("float[8]"),
            "rows": 1,
            "vocab": 8,
            "settings": settings,
            "work": work,
            "work_bytes": 4096,
        }
        return getattr(self.lib, operation)(*{**arguments, **changes}.values())

    @pytest.mark.parametrize("operation", BOTH)
    def test_null_pointers(self, operation: str) -> None:
        lib, null = self.lib, self.ffi.NULL
        assert len(self.POINTERS) == 17
        assert self.call(self.settings(), operation) == lib.MS_OK
        for name in self.POINTERS:
            assert self.call(self.settings(**{name: null}), operation) == lib.MS_NULL_POINTER, name
        for name in ("exec", "out", "status", "logits", "work"):
            assert self.call(self.settings(), operation, **{name: null}) == lib.MS_NULL_POINTER, name

    def test_without_settings(self) -> None:
        """Greedy, and no work space is needed; but there is no distribution without a temperature."""
        none = {"settings": self.ffi.NULL, "work": self.ffi.NULL, "work_bytes": 0}
        assert self.call(**none) == self.lib.MS_OK
        assert self.call(**none, operation="ms_probabilities") == self.lib.MS_NULL_POINTER

    def test_null_pointers_elsewhere(self) -> None:
        lib, null = self.lib, self.ffi.NULL
        exec, n, f, d = (
            self.ffi.new("ms_exec *", (1, 0)),
            self.ffi.new("size_t *"),
            *map(self.ffi.new, ("float[8]", "double[8]")),
        )
        assert lib.ms_sample_work(exec, 8, n) == lib.ms_log_softmax(exec, d, f, 1, 8) == lib.MS_OK
        for code in (
            lib.ms_sample_work(null, 8, n),
            lib.ms_sample_work(exec, 8, null),
            lib.ms_log_softmax(null, d, f, 1, 8),
            lib.ms_log_softmax(exec, null, f, 1, 8),
            lib.ms_log_softmax(exec, d, null, 1, 8),
        ):
            assert code == lib.MS_NULL_POINTER

    @pytest.mark.parametrize("huge", [-1, 2**31 - 1, 2**62, 2**63 - 1])
    def test_sizes_that_overflow(self, huge: int) -> None:
        lib, exec = self.lib, self.ffi.new("ms_exec *", (1, 0))
        assert lib.ms_sample_work(exec, huge, self.ffi.new("size_t *")) == lib.MS_BAD_SIZE
        for operation in self.BOTH:
            assert self.call(self.settings(), operation, vocab=huge) == lib.MS_BAD_SIZE
            assert huge == 2**31 - 1 or self.call(self.settings(), operation, rows=huge) == lib.MS_BAD_SIZE
        if huge != 2**31 - 1:
            f, d = self.ffi.new("float[8]"), self.ffi.new("double[8]")
            assert lib.ms_log_softmax(exec, d, f, huge, 8) == lib.ms_log_softmax(exec, d, f, 8, huge) == lib.MS_BAD_SIZE

    def test_how_to_run_and_in_what_space(self) -> None:
        lib, n = self.lib, self.ffi.new("size_t *")
        for threads, isa, code in ((0, 0, lib.MS_BAD_THREADS), (1025, 0, lib.MS_BAD_THREADS), (1, 3, lib.MS_BAD_ISA)):
            exec = self.ffi.new("ms_exec *", (threads, isa))
            assert [self.call(self.settings(), operation, exec=exec) for operation in self.BOTH] == [code, code]
            assert lib.ms_sample_work(exec, 8, n) == code
            assert lib.ms_log_softmax(exec, self.ffi.new("double[8]"), self.ffi.new("float[8]"), 1, 8) == code
        assert lib.ms_sample_work(self.ffi.new("ms_exec *", (1, 0)), 8, n) == lib.MS_OK
        for operation in self.BOTH:
            assert self.call(self.settings(), operation, work_bytes=n[0] - 1) == lib.MS_WORK_TOO_SMALL
            assert self.call(self.settings(), operation, work_bytes=n[0]) == lib.MS_OK
            assert self.call(self.settings(), operation, rows=0) == lib.MS_OK
