"""csrc/sample.c against its definition in NumPy, and against itself: alone, in a batch, by more threads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minserve.engine.sampler import SampledToken, Sampler
from minserve.engine.sampling_row import SamplingRow, settings_of
from minserve.errors import KernelError, ParameterError
from minserve.ops import reference
from minserve.ops.native_core import Core, load
from minserve.ops.sampling import RowStatus, SamplingSettings, candidates, uniform
from tests.support.native_cases import BACKENDS
from tests.support.sampling_cases import near_a_border, row_of, same_tokens

C = BACKENDS[-1]
ONE_EACH = [backend for backend in BACKENDS if backend.threads == 2]  # of each instruction set
LARGE = 49152


def keep_all(output_ids: list[int], logits: np.ndarray) -> np.ndarray:
    """A logits processor. (Those who call the operation themselves only say by it that -infinity is allowed.)"""
    return logits


def some_logits(rng: np.random.Generator, kind: str, size: int) -> np.ndarray:
    """float32 (V,) of one kind."""
    x = rng.normal(size=size)
    match kind:
        case "flat":
            x *= 1e-3
        case "peaked":
            x *= 12
        case "ties":
            x = np.round(x)
        case "equal":
            x[:] = 2.5
        case "huge":
            x = (x * 1e38).clip(-3e38, 3e38)
        case "denormal":
            x *= 1e-44
        case "zeros":
            x = rng.choice([0.0, -0.0], size)
        case "outliers":
            x = -300 + x * 1e-5
            x[rng.integers(size)] = 0
        case "masked":
            x[rng.random(size) < 0.5] = -np.inf
            x[rng.integers(size)] = 1
        case "all masked":
            x[:] = -np.inf
        case "one NaN":
            x[rng.integers(size)] = np.nan
        case "one infinity":
            x[rng.integers(size)] = np.inf
    return x.astype(np.float32)


KINDS = ["normal", "flat", "peaked", "ties", "equal", "huge", "denormal", "zeros", "outliers", "masked"]
KINDS += ["all masked", "one NaN", "one infinity"]
SIZES = [1, 2, 3, 7, 15, 16, 17, 63, 64, 65, 100, 128, 129, 500, 1023, 1024, 1025, 2047, 2999]


PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([1.0, 0.8, 0.3, 7.5, 1e6, 1e-6, 1e-300, 1e-310, 0]),
        "top_k": st.sampled_from([0, 0, 0, 0, -1, 1, 2, 5, 31, 64, 500, 2**40]),
        "top_p": st.one_of(st.just(1.0), st.sampled_from([1e-9, 0.1, 0.5, 0.9, 1 - 1e-12]), st.floats(1e-3, 1)),
        "min_p": st.sampled_from([0.0, 0.0, 0.0, 1e-300, 0.01, 0.3, 1.0]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1e-300, 0.5, 1.3, 100.0]),
        "presence_penalty": st.sampled_from([0.0, 0.0, -2.0, 0.5]),
        "frequency_penalty": st.sampled_from([0.0, 0.0, -0.7, 2.0]),
        "logits_processors": st.sampled_from([None, [keep_all]]),
        "min_tokens": st.sampled_from([0, 0, 8]),
    }
)


def a_row(rng: np.random.Generator, size: int, params: dict) -> SamplingRow:
    """One answer with such parameters, over a vocabulary of that size; its tokens and biases are random."""
    few = [rng.integers(0, size, rng.integers(0, 15)).tolist() for _ in range(4)]
    bias = {token_id: float(rng.choice([-100, -1.5, 0.25, 100])) for token_id in few[3][:3]}
    seed, index = int(rng.integers(0, 2**64, dtype=np.uint64)), int(rng.integers(5))
    return row_of(few[0], few[1], row_seed=seed, index=index, end_ids=few[2][:3], logit_bias=bias, **params)


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


def large_rows() -> tuple[np.ndarray, list[SamplingRow]]:
    """Many kinds of rows over a real vocabulary's size."""
    rng = np.random.default_rng(11)
    asked: list[dict[str, Any]] = [
        {"temperature": 0},
        {},
        {"top_p": 0.95},
        {"top_p": 1e-9},
        {"top_p": 1 - 1e-12},
        {"top_k": 50},
        {"top_k": 767, "top_p": 0.9},
        {"top_k": 769},
        {"top_k": 20_000, "top_p": 0.5},
        {"min_p": 0.02},
        {"temperature": 1e6, "top_p": 0.7},
        {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1},
        {"temperature": 0, "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.1},
    ]
    kinds = ["normal", "peaked", "ties", "outliers"]
    rows, logits = [], []
    for r, params in enumerate(asked * len(kinds)):
        history = rng.integers(0, LARGE, 200).tolist()
        rows.append(row_of(history[:50], history[50:] + history[:30], row_seed=r, **params))
        logits.append(some_logits(rng, kinds[r // len(asked)], LARGE))
    return np.stack(logits), rows


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


WRONG: list[tuple[type, str, Callable[[], object]]] = [
    (ParameterError, "logits must be a NumPy array of 2", lambda: C.sample(LOGITS[0])),
    (ParameterError, "logits must be float32, not float64", lambda: C.sample(LOGITS.astype(float))),
    (ParameterError, "logits must be C-contiguous", lambda: C.sample(LOGITS.T)),
    (ParameterError, "logits must be a NumPy array of 2", lambda: C.log_softmax(LOGITS[0])),
    (ParameterError, "logits must be float32", lambda: C.log_softmax(LOGITS.astype(float))),
    (ParameterError, r"temperature must have the shape \(3,\)", lambda: C.sample(np.zeros((3, 10), "f4"), GOOD)),
    (ParameterError, "top_k must be int32", lambda: C.sample(LOGITS, changed(top_k=doubles(0, 0)))),
    (ParameterError, "masked must be uint8", lambda: C.sample(LOGITS, changed(masked=np.zeros(2, bool)))),
    (
        ParameterError,
        r"draw_keys must have the shape \(2, 3\)",
        lambda: C.sample(LOGITS, changed(draw_keys=GOOD.draw_keys[:, :2].copy())),
    ),
    (ParameterError, r"biases must have the shape \(2,\)", lambda: C.sample(LOGITS, changed(biases=doubles(1)))),
    (
        ParameterError,
        r"bias_starts must have the shape \(3,\)",
        lambda: C.sample(LOGITS, changed(bias_starts=ints(0, 2))),
    ),
    (KernelError, "sample: a size", lambda: C.sample(np.zeros((2, 0), np.float32))),
    (KernelError, "sample: a size", lambda: C.sample(LOGITS, changed(bias_starts=ints(0, 1, 3)))),
    (KernelError, "sample: a size", lambda: C.sample(LOGITS, changed(bias_starts=ints(0, 3, 2)))),
    (KernelError, "sample: a size", lambda: C.sample(LOGITS, changed(bias_starts=ints(1, 1, 2)))),
    (KernelError, "sample: a size", lambda: C.sample(LOGITS, changed(ruled_out_starts=ints(0, -1, 2)))),
    (KernelError, "sample: a size", lambda: C.sample(LOGITS, changed(num_prompt_tokens=ints(-1, 0)))),
    (KernelError, "a token id is outside", lambda: C.sample(LOGITS, changed(bias_ids=ints(0, 10)))),
    (KernelError, "a token id is outside", lambda: C.sample(LOGITS, changed(ruled_out_ids=ints(-1, 0)))),
    (
        KernelError,
        "a token id is outside",
        lambda: C.sample(LOGITS, changed(token_ids=ints(2**31 - 1), token_starts=ints(0, 0, 1))),
    ),
    (KernelError, "a temperature, top_p", lambda: C.sample(LOGITS, changed(temperature=doubles(1, -0.1)))),
    (KernelError, "a temperature, top_p", lambda: C.sample(LOGITS, changed(temperature=doubles(1, np.nan)))),
    (KernelError, "a temperature, top_p", lambda: C.sample(LOGITS, changed(temperature=doubles(np.inf, 1)))),
    (KernelError, "a temperature, top_p", lambda: C.sample(LOGITS, changed(top_p=doubles(0, 1)))),
    (KernelError, "a temperature, top_p", lambda: C.sample(LOGITS, changed(top_p=doubles(1, 1.1)))),
    (KernelError, "a temperature, top_p", lambda: C.sample(LOGITS, changed(min_p=doubles(1, 1.5)))),
    (KernelError, "a temperature, top_p", lambda: C.sample(LOGITS, changed(repetition_penalty=doubles(1, 0)))),
    (KernelError, "a temperature, top_p", lambda: C.sample(LOGITS, changed(presence_penalty=doubles(1, np.inf)))),
    (KernelError, "a temperature, top_p", lambda: C.sample(LOGITS, changed(frequency_penalty=doubles(np.nan, 0)))),
    (KernelError, "a temperature, top_p", lambda: C.sample(LOGITS, changed(biases=doubles(1, np.nan)))),
    (KernelError, "log_softmax: a size", lambda: C.log_softmax(np.zeros((2, 0), np.float32))),
]


@pytest.mark.parametrize(("error", "message", "call"), WRONG, ids=[f"{i}: {row[1]}" for i, row in enumerate(WRONG)])
def test_what_a_caller_may_get_wrong(error: type, message: str, call: Callable[[], object]) -> None:
    assert not C.sample(LOGITS, GOOD)[1].any()
    with pytest.raises(error, match=message):
        call()


class TestTheCoreItself:
    """The C functions called as another program might call them, past the checks of native_sampling.py."""

    core = load()
    assert isinstance(core, Core)
    lib, ffi = core.lib, core.ffi
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

    def call(self, settings: Any, **changes: Any) -> int:
        ffi = self.ffi
        work = ffi.new("uint8_t[4096]")
        arguments = {
            "exec": ffi.new("ms_exec *", (1, 0)),
            "token_ids": ffi.new("int32_t[1]"),
            "status": ffi.new("int32_t[1]"),
            "logits": ffi.new("float[8]"),
            "rows": 1,
            "vocab": 8,
            "settings": settings,
            "work": work,
            "work_bytes": 4096,
        }
        return self.lib.ms_sample(*{**arguments, **changes}.values())

    def test_null_pointers(self) -> None:
        lib, null = self.lib, self.ffi.NULL
        assert len(self.POINTERS) == 17
        assert self.call(self.settings()) == lib.MS_OK
        assert self.call(null, work=null, work_bytes=0) == lib.MS_OK  # greedy: no settings, no work space
        for name in self.POINTERS:
            assert self.call(self.settings(**{name: null})) == lib.MS_NULL_POINTER, name
        for name in ("exec", "token_ids", "status", "logits", "work"):
            assert self.call(self.settings(), **{name: null}) == lib.MS_NULL_POINTER, name
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
        assert self.call(self.settings(), vocab=huge) == lib.MS_BAD_SIZE
        if huge != 2**31 - 1:
            f, d = self.ffi.new("float[8]"), self.ffi.new("double[8]")
            assert self.call(self.settings(), rows=huge) == lib.MS_BAD_SIZE
            assert lib.ms_log_softmax(exec, d, f, huge, 8) == lib.ms_log_softmax(exec, d, f, 8, huge) == lib.MS_BAD_SIZE

    def test_how_to_run_and_in_what_space(self) -> None:
        lib, n = self.lib, self.ffi.new("size_t *")
        for threads, isa, code in ((0, 0, lib.MS_BAD_THREADS), (1025, 0, lib.MS_BAD_THREADS), (1, 3, lib.MS_BAD_ISA)):
            exec = self.ffi.new("ms_exec *", (threads, isa))
            assert self.call(self.settings(), exec=exec) == lib.ms_sample_work(exec, 8, n) == code
            assert lib.ms_log_softmax(exec, self.ffi.new("double[8]"), self.ffi.new("float[8]"), 1, 8) == code
        assert lib.ms_sample_work(self.ffi.new("ms_exec *", (1, 0)), 8, n) == lib.MS_OK
        assert self.call(self.settings(), work_bytes=n[0] - 1) == lib.MS_WORK_TOO_SMALL
        assert self.call(self.settings(), work_bytes=n[0]) == lib.MS_OK
        assert self.call(self.settings(), rows=0) == lib.MS_OK
