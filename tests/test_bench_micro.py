"""minserve bench --micro: what operations must move and compute, the roof over them, and what the command shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minserve.bench.micro import Stopwatch
from minserve.bench.micro_costs import COSTS
from minserve.bench.micro_steps import Step
from minserve.bench.roofline import Limits, Work
from minserve.cli import main
from minserve.ops import native, native_limits, reference
from minserve.ops.dtypes import F16, Q4_1, Q8_0, WeightType
from minserve.ops.native import NativeBackend
from minserve.ops.quantized_kv import QuantizedKV

from .support.tiny_llama import tiny_llama


def floats(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


HALF = np.zeros((9, 2, 4, 8), np.float16)  # 9 blocks of 4 tokens, 2 heads of 8
INT8 = QuantizedKV(np.zeros((9, 2, 4, 8), np.int8), floats(9, 2, 4))
TABLES = np.zeros((2, 3), np.int32)
# operation, its result, its arguments, its sizes for people, its work
COST_CASES: list[tuple[str, Any, tuple[Any, ...], str, Work]] = [
    (
        "embedding",
        floats(3, 8),
        (ints(1, 2, 1), floats(10, 8)),
        "10 -> 8 float32",
        Work(weights=3 * 8 * 4, activations=3 * 8 * 4),
    ),
    (
        "rms_norm",
        floats(3, 8),
        (floats(3, 8), floats(8), 1e-5),
        "8",
        Work(weights=8 * 4, activations=2 * 3 * 8 * 4, float32_ops=4 * 24),
    ),
    (
        "quantize_activations",
        (np.zeros((3, 48), np.int8), floats(3, 2)),
        (floats(3, 48),),
        "48",
        Work(activations=3 * 48 * 4 + 3 * 48 + 3 * 2 * 4, float32_ops=2 * 144),
    ),
    (
        "linear",
        floats(3, 5),
        (floats(3, 8), floats(5, 8)),
        "8 -> 5 float32",
        Work(weights=5 * 8 * 4, activations=3 * 8 * 4 + 3 * 5 * 4, float32_ops=2 * 3 * 5 * 8),
    ),
    (
        "rope",
        floats(3, 2, 8),
        (floats(3, 2, 8), floats(3, 4), floats(3, 4)),
        "2 x 8",
        Work(activations=2 * 3 * 2 * 8 * 4 + 2 * 3 * 4 * 4, float32_ops=3 * 48),
    ),
    (
        "write_kv",
        None,
        (floats(3, 2, 8), floats(3, 2, 8), HALF, HALF, ints(0, 1, 2)),
        "2 x 8 float16",
        Work(kv=2 * 3 * 2 * 8 * 2, activations=2 * 3 * 2 * 8 * 4),
    ),
    (
        "write_kv",
        None,
        (floats(3, 2, 8), floats(3, 2, 8), INT8, INT8, ints(0, 1, 2)),
        "2 x 8 int8",
        Work(kv=2 * 3 * 2 * (8 + 4), activations=2 * 3 * 2 * 8 * 4, float32_ops=2 * 2 * 48),
    ),
    (  # one token at a context of 7, and the last two of 5, which see 4 and 5: 16 pairs for each of 6 query heads
        "paged_attention",
        floats(3, 6, 8),
        (floats(3, 6, 8), HALF, HALF, TABLES, ints(7, 5), ints(0, 1, 3), 0.5),
        "6/2 x 8, 7 float16",
        Work(kv=(7 + 5) * 2 * 2 * 8 * 2, activations=2 * 3 * 6 * 8 * 4, float32_ops=16 * 6 * 4 * 8),
    ),
    (  # a prompt of 4: 1 + 2 + 3 + 4 pairs
        "paged_attention",
        floats(4, 6, 8),
        (floats(4, 6, 8), INT8, INT8, TABLES[:1], ints(4), ints(0, 4), 0.5),
        "6/2 x 8, 4 int8",
        Work(kv=4 * 2 * 2 * (8 + 4), activations=2 * 4 * 6 * 8 * 4, float32_ops=10 * 6 * 4 * 8),
    ),
    (
        "silu_mul",
        floats(3, 8),
        (floats(3, 8), floats(3, 8)),
        "8",
        Work(activations=3 * 24 * 4, float32_ops=4 * 24),
    ),
    ("add", floats(3, 8), (floats(3, 8), floats(3, 8)), "8", Work(activations=3 * 24 * 4, float32_ops=24)),
    ("sample", (ints(1, 1), ints(0, 0)), (floats(2, 10),), "10", Work(activations=80, float32_ops=20)),
]


@pytest.mark.parametrize(("operation", "result", "arguments", "shape", "work"), COST_CASES)
def test_what_an_operation_must_move_and_compute(
    operation: str, result: Any, arguments: tuple[Any, ...], shape: str, work: Work
) -> None:
    assert COSTS[operation](result, *arguments) == (shape, work)


def test_every_operation_of_a_pass_has_a_cost() -> None:
    from minserve.ops.backend import OPERATIONS

    assert set(OPERATIONS) - set(COSTS) == {"prepare", "probabilities", "log_softmax"}


has_core = pytest.mark.skipif(native.why_unavailable() is not None, reason="no C core")


@has_core
@pytest.mark.parametrize(
    ("dtype", "row_bytes", "integer"),
    [(Q4_1, 2 * 20, True), (Q8_0, 2 * 34, True), (F16, 64 * 2, False)],
    ids=lambda value: getattr(value, "name", None),
)
def test_packed_weights_count_with_their_bytes(dtype: WeightType, row_bytes: int, integer: bool) -> None:
    from .support.native_cases import random_tensor

    weight = NativeBackend(1).prepare(random_tensor(np.random.default_rng(0), dtype, 32, 64))
    shape, work = COSTS["linear"](floats(3, 32), floats(3, 64), weight)
    assert shape == f"64 -> 32 {dtype.name}"
    assert work.weights == 32 * row_bytes
    assert (work.int8_ops, work.float32_ops) == ((2 * 3 * 32 * 64, 0) if integer else (0, 2 * 3 * 32 * 64))
    shape, work = COSTS["embedding"](floats(3, 64), ints(1, 1, 1), weight)
    assert (shape, work.weights) == (f"32 -> 64 {dtype.name}", 3 * row_bytes)


def test_a_weight_that_does_not_tell_its_size_is_no_error() -> None:
    """A student's `prepare` may give anything."""
    shape, work = COSTS["linear"](floats(3, 5), floats(3, 8), {"anything": 1})
    assert (shape, work.weights, work.float32_ops) == ("8 -> 5", 0, 2 * 3 * 5 * 8)
    assert COSTS["embedding"](floats(3, 8), ints(1, 2, 3), object())[1].weights == 0


LIMITS = Limits(read_small_pages=10.0, read_huge_pages=20.0, int8=1000.0, float32=200.0)


@pytest.mark.parametrize(
    ("work", "seconds", "name"),
    [
        (Work(weights=100, kv=60, activations=40), 10.0, "memory"),
        (Work(weights=20, int8_ops=999), 1.0, "memory"),
        (Work(weights=20, int8_ops=1000), 1.0, "memory"),
        (Work(weights=20, int8_ops=4000), 4.0, "int8"),
        (Work(weights=20, float32_ops=400), 2.0, "float32"),
        (Work(weights=20, int8_ops=3000, float32_ops=200), 4.0, "int8"),
        (Work(weights=20, int8_ops=1000, float32_ops=600), 4.0, "float32"),
    ],
)
def test_the_limit_that_binds(work: Work, seconds: float, name: str) -> None:
    assert LIMITS.bound(work) == (pytest.approx(seconds), name)


def test_the_roof_is_the_less_of_peak_and_memory() -> None:
    """The form in which it is usually written: operations a second <= min(peak, intensity * bytes a second)."""
    for int8_ops in (10, 900, 1100, 50_000):
        work = Work(weights=20, int8_ops=int8_ops)
        most = min(LIMITS.int8, work.intensity * LIMITS.read)
        assert work.ops / LIMITS.bound(work)[0] == pytest.approx(most)


def test_limits_are_medians_over_all_turns() -> None:
    turns = [{"read_small_pages": [1.0, 9.0], "int8": [5.0], "float32": [2.0]}]
    turns += [{"read_small_pages": [2.0], "int8": [50.0], "float32": [4.0]}] * 2
    limits = Limits.of(turns)
    assert limits == Limits(2.0, None, 50.0, 4.0)
    assert limits.read == 2.0


def test_sequences_that_decode() -> None:
    step = Step.of(2, max_model_len=6)
    assert (step.context, step.num_blocks(4), str(step)) == (6, 4, "2 sequences decode at a context of 6")
    batch = step.model_input(4, vocab_size=50)
    assert batch.positions.tolist() == [5, 5]
    assert batch.block_tables.tolist() == [[0, 1], [2, 3]]
    assert batch.slot_mapping.tolist() == [5, 13]
    assert batch.context_lens.tolist() == [6, 6]
    assert batch.query_start_loc.tolist() == [0, 1, 2]
    assert batch.logits_indices.tolist() == [0, 1]
    assert str(Step.of(1, 8192)) == "1 sequence decodes at a context of 512"


def test_a_prompt() -> None:
    step = Step.of(33, max_model_len=40)
    assert (step.context, step.num_blocks(16), str(step)) == (33, 3, "33 tokens of a prompt")
    batch = step.model_input(16, vocab_size=50)
    assert batch.positions.tolist() == batch.slot_mapping.tolist() == list(range(33))
    assert (batch.block_tables.tolist(), batch.context_lens.tolist()) == ([[0, 1, 2]], [33])
    assert (batch.query_start_loc.tolist(), batch.logits_indices.tolist()) == ([0, 33], [32])
    assert 0 <= batch.token_ids.min() <= batch.token_ids.max() < 50


def test_a_stopwatch_changes_no_result_and_tells_sizes_apart() -> None:
    watch: Any = Stopwatch(reference)  # type: ignore[arg-type]  # a module
    np.testing.assert_array_equal(watch.add(floats(2, 3), floats(2, 3)), 2 * floats(2, 3))
    watch.add(floats(2, 3), floats(2, 3))
    watch.add(floats(4, 3), floats(4, 3))
    entries = list(watch.times.values())
    assert [(entry.operation, entry.rows, entry.shape, len(entry.seconds)) for entry in entries] == [
        ("add", 2, "3", 2),
        ("add", 4, "3", 1),
    ]
    assert min(second for entry in entries for second in entry.seconds) > 0


# ---- the command ----


@pytest.fixture(autouse=True)
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure memory on few bytes: what comes of it is not looked at here."""
    monkeypatch.setattr(native_limits, "last_cache_bytes", lambda: 1 << 19)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """2 layers, D 64, F 96, 4 heads over 2 of 16, a vocabulary of 284, a context of 256."""
    return str(tiny_llama().write_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf"))


def micro(model: str, *args: str, backend: str = "numpy") -> int:
    return main(["bench", "--micro", "--model", model, "--backend", backend, "--turns", "2", *args])


def split(capsys: pytest.CaptureFixture[str]) -> tuple[str, dict[str, Any], str]:
    """Text for people, the document, and stderr."""
    out, err = capsys.readouterr()
    text, _, line = out.rstrip("\n").rpartition("\n")
    return text, json.loads(line), err


def test_each_operation_in_each_step(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert micro(model, "--tokens", "3,40", "--kv-cache-dtype", "float16") == 0
    text, document, err = split(capsys)
    assert err == ""
    assert "3 sequences decode at a context of 256" in text
    assert "40 tokens of a prompt" in text
    assert (document["command"], document["backend"], document["interrupted"]) == ("bench --micro", "numpy", False)
    assert document["num_turns"] == 2
    decode = [each for each in document["operations"] if each["tokens"] == 3]
    assert [(each["operation"], each["rows"], each["shape"], each["calls"]) for each in decode] == [
        ("embedding", 3, "284 -> 64 float32", 1),
        ("rms_norm", 3, "64", 5),
        ("quantize_activations", 3, "64", None),
        ("quantize_activations", 3, "96", None),
        ("linear", 3, "64 -> 64 float32", 4),
        ("linear", 3, "64 -> 32 float32", 4),
        ("linear", 3, "64 -> 96 float32", 4),
        ("linear", 3, "96 -> 64 float32", 2),
        ("linear", 3, "64 -> 284 float32", 1),
        ("rope", 3, "4 x 16", 2),
        ("rope", 3, "2 x 16", 2),
        ("write_kv", 3, "2 x 16 float16", 2),
        ("paged_attention", 3, "4/2 x 16, 256 float16", 2),
        ("silu_mul", 3, "96", 2),
        ("add", 3, "64", 4),
        ("sample", 3, "284", None),
        ("forward", 3, "", None),
    ]
    for each in decode:
        assert 0 < each["seconds"] < 10
        assert each["num_timed"] == 2 * (each["calls"] or (1 if each["operation"] == "forward" else 5))
        assert each["bytes_per_second"] == pytest.approx(each["bytes"] / each["seconds"])
        assert each["ops_per_second"] == pytest.approx(each["ops"] / each["seconds"])
    prompt = {
        (each["operation"], each["rows"], each["shape"]) for each in document["operations"] if each["tokens"] == 40
    }
    assert ("linear", 1, "64 -> 284 float32") in prompt  # only the last row's logits
    assert ("paged_attention", 40, "4/2 x 16, 40 float16") in prompt


def test_what_the_whole_pass_must_move(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """All matrices once, the rows of 3 tokens of the embedding, and the keys and values of 3 contexts and 3 tokens."""
    assert micro(model, "--tokens", "3", "--kv-cache-dtype", "float16") == 0
    (forward,) = (each for each in split(capsys)[1]["operations"] if each["operation"] == "forward")
    layer = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64  # values in matrices
    row = 2 * 2 * 16  # keys and values of a token in a layer
    assert forward["work"] == {
        "weights": 4 * (2 * layer + 5 * 64 + 284 * 64 + 3 * 64),
        "kv": 2 * 2 * row * 3 * (256 + 1),
        "activations": 4 * 3 * 284,
        "int8_ops": 0,
        # matrices; attention; norms; rope; silu_mul; add
        "float32_ops": 2 * 3 * (2 * layer + 284 * 64)
        + 2 * 4 * 16 * 4 * 3 * 256
        + 5 * 4 * 3 * 64
        + 2 * 3 * 3 * (4 + 2) * 16
        + 2 * 4 * 3 * 96
        + 4 * 3 * 64,
    }


@has_core
def test_on_the_core_with_limits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tiny_llama().write_gguf(tmp_path / "tiny.gguf", "Q4_1"))
    assert micro(path, "--tokens", "1,2", "--threads", "2", backend="c") == 0
    text, document, _ = split(capsys)
    limits = document["limits"]
    assert "memory read" in text
    assert limits["read"] == max(limits["read_small_pages"], limits["read_huge_pages"] or 0)
    assert min(limits["int8"], limits["float32"]) > 0
    assert document["limits_with"] == {"threads": 2, "isa": native.info()["isa"], "nbytes": 4 << 20}
    for each in document["operations"]:
        assert each["limit"] in ("memory", "int8", "float32")
        assert each["share_of_limit"] == pytest.approx(each["limit_seconds"] / each["seconds"])
    (linear,) = (e for e in document["operations"] if e["shape"] == "96 -> 64 Q4_1" and e["tokens"] == 1)
    assert linear["work"]["weights"] == 64 * 3 * 20
    assert linear["work"]["int8_ops"] == linear["ops"] == 2 * 64 * 96


def test_without_a_core_there_are_no_limits(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "why_unavailable", lambda: "it was not built")
    assert micro(model) == 0
    text, document, _ = split(capsys)
    assert "none: the C core, which measures them, is not here" in text
    assert (document["limits"], document["limits_with"]) == (None, None)
    assert {each["tokens"] for each in document["operations"]} == {1, 16, 256}  # 512 do not fit
    assert {each["share_of_limit"] for each in document["operations"]} == {None}
    pytest.importorskip("matplotlib")
    assert micro(model, "--plot", str(tmp_path / "roof.png")) == 2
    assert "the limits are measured by the C core, and it is not here: it was not built" in capsys.readouterr().err


@has_core
def test_the_roofline_as_a_picture(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    png, page = tmp_path / "roof.png", tmp_path / "roof.html"
    assert micro(model, "--tokens", "1,40", "--plot", str(png)) == 0
    assert f"minserve: the picture is in {png}\n" in capsys.readouterr().err
    assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert micro(model, "--tokens", "1", "--plot", str(page)) == 0
    text = page.read_text(encoding="utf-8")
    assert text.count("<svg") == 1
    assert "<title>Roofline: tiny on numpy</title>" in text
    assert "<h2>1 sequence decodes at a context of 256</h2>" in text
    assert "<td>paged_attention</td><td>1</td><td>4/2 x 16, 256 float32</td>" in text


# A backend in which Ctrl-C comes at an addition. Filling the cache has 4; a turn of one step 4 by operations, 4 whole.
INTERRUPTED_BACKEND = """\
from minserve.ops import reference

calls = []

def add(x, y):
    calls.append(1)
    if len(calls) == {number}:
        raise KeyboardInterrupt
    return reference.add(x, y)
"""


@pytest.mark.parametrize(
    ("number", "turns", "additions", "forwards"), [(7, 0, 2, 0), (15, 1, 2, 0), (17, 1, 4, 0), (23, 2, 6, 1)]
)
def test_ctrl_c_shows_what_was_measured(
    number: int,
    turns: int,
    additions: int,
    forwards: int,
    model: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    backend = tmp_path / "interrupted.py"
    backend.write_text(INTERRUPTED_BACKEND.format(number=number))
    assert micro(model, "--tokens", "1", backend=str(backend)) == 130
    _, document, err = split(capsys)
    assert err == "minserve: interrupted: the figures are of what was measured until then\n"
    assert (document["interrupted"], document["num_turns"]) == (True, turns)
    timed = {each["operation"]: each["num_timed"] for each in document["operations"]}
    assert (timed["add"], timed.get("forward", 0)) == (additions, forwards)


def test_ctrl_c_before_anything_was_measured(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    backend = tmp_path / "interrupted.py"
    backend.write_text(INTERRUPTED_BACKEND.format(number=2))
    assert micro(model, "--tokens", "1", backend=str(backend)) == 130
    assert capsys.readouterr().out == ""


def test_a_fault_in_a_users_backend_names_the_file(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backend = tmp_path / "faulty.py"
    backend.write_text("def add(x, y):\n    return x.nothing\n")
    assert micro(model, backend=str(backend)) == 2
    assert "faulty.py failed while it was measured: AttributeError" in capsys.readouterr().err


MISTAKES = [
    (["--tokens", "1,0"], "--tokens: must be whole numbers of at least 1 such as 1,16,512, not '1,0'"),
    (["--tokens", "1,many"], "must be whole numbers of at least 1"),
    (["--tokens", ""], "must be whole numbers of at least 1"),
    (["--tokens", "257"], "--tokens: a prompt of 257 does not fit max_model_len 256"),
    (["--turns", "0"], "--turns: must be a whole number of at least 1, not '0'"),
    (["--overhead"], "not allowed with argument"),
    (["--baseline", "static"], "--baseline has no effect with --micro"),
    (["--cost", "cost.json"], "--cost has no effect with --micro"),
    (["--plot", "roof.pdf"], "a picture is FILE.png or FILE.html, not 'roof.pdf'"),
]


@pytest.mark.parametrize(("args", "message"), MISTAKES, ids=[" ".join(args) for args, _ in MISTAKES])
def test_a_mistake_is_told_in_one_line(
    model: str, args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert micro(model, *args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("option", [["--tokens", "4"], ["--turns", "3"]], ids=" ".join)
def test_options_of_micro_have_no_effect_without_it(
    option: list[str], model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--model", model, "--backend", "numpy", *option]) == 2
    assert f"{option[0]} has no effect without --micro" in capsys.readouterr().err
