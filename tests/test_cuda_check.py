"""minserve cuda-check: the translation, the cases and what they should give, the score, the command."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from minserve.cli import main
from minserve.errors import KernelError
from minserve.kernel_check.case import KV_TYPES, MARK32, Case, make_case
from minserve.kernel_check.case_set import make_cases
from minserve.kernel_check.compiler import find_compiler, first_errors
from minserve.kernel_check.debugger import first_lines
from minserve.kernel_check.oracle import expected
from minserve.kernel_check.process import run_process
from minserve.kernel_check.program import CaseRun
from minserve.kernel_check.results import compare_orders, judge
from minserve.kernel_check.score import least_bytes
from minserve.kernel_check.translation import translate
from minserve.ops import reference
from minserve.ops.cuda_library import cuda_sources
from minserve.ops.quantized_kv import QuantizedKV
from tests.support.planted_fault import replaced, source

needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="there is no g++ and no clang++"
)
PATH = Path("/home/student/my kernel.cu")


def translated(text: str) -> str:
    """Without the first line, which names the file."""
    first, _, rest = translate(text, PATH).partition("\n")
    assert first == f'#line 1 "{PATH}"'
    return rest.removesuffix("\n")


@pytest.mark.parametrize(
    ("cuda", "cpp"),
    [
        ("f<<<1, 32>>>(a);", "LAUNCH((f), (1), (32))(a);"),
        ("f<float, 64><<<dim3(a, b), D>>>(*x);", "LAUNCH((f<float, 64>), (dim3(a, b)), (D))(*x);"),
        ("f<g<1>::x> <<< n, m >>> (a)", "LAUNCH((f<g<1>::x>), (n), (m)) (a)"),
        ("if (a < b) ns::f<<<{1, 2}, 3, 0, nullptr>>>(a)", "if (a < b) LAUNCH((ns::f), (dim3{1, 2}), (3))(a)"),
        ("(f<T>)<<<1, 2>>>(a)", "LAUNCH(((f<T>)), (1), (2))(a)"),
        ("return ::f<<<1, 2>>>(a)", "return LAUNCH((::f), (1), (2))(a)"),
        ("f<<<1, // blocks\n  32>>>(a)", "LAUNCH((f), (1), (32))\n(a)"),
        ("// f<<<1, 2>>>(a)\n", "// f<<<1, 2>>>(a)\n"),
        (
            's = "f<<<1, 2>>>(a)"; c = \'"\'; f<<<1, 2>>>();',
            's = "f<<<1, 2>>>(a)"; c = \'"\'; LAUNCH((f), (1), (2))();',
        ),
        ("/* f<<<\n1>>> */ x", "/* f<<<\n1>>> */ x"),
        ('R"x(f<<<1, 2>>>)")x" + f', 'R"x(f<<<1, 2>>>)")x" + f'),
        ("static __global__ void f() {}", "__global__ void f() {}"),
        ('extern "C" __global__ void f() {}', "__global__ void f() {}"),
        ("__global__ static void f() {}", "__global__  void f() {}"),
        ("template <int N> static inline __global__ void f() {}", "template <int N> inline __global__ void f() {}"),
        ("static int x; __global__ void f() {}", "static int x; __global__ void f() {}"),
        (
            "x = a << b >> c; y = 1'000'000; f<<<1'024, 2>>>();",
            "x = a << b >> c; y = 1'000'000; LAUNCH((f), (1'024), (2))();",
        ),
    ],
)
def test_translation(cuda: str, cpp: str) -> None:
    assert translated(cuda) == cpp
    assert cuda.count("\n") == cpp.count("\n")


@pytest.mark.parametrize(
    ("cuda", "message"),
    [
        ("\n\nextern __shared__ float x[];", ":3: `extern __shared__`"),
        ("\nf<<<1, 2, 1024>>>(a)", ":2: shared memory whose size the launch says (1024)"),
        ("f<<<1, 2, 0, stream>>>(a)", ":1: a stream (stream)"),
        ("f<<<1>>>(a)", ":1: a launch has a grid and a block"),
        ("\n\n\nf<<<1, 2(a)", ":4: a launch begins with <<< and has no >>>"),
        ("= <<<1, 2>>>(a)", ":1: there is no kernel's name before <<<"),
    ],
)
def test_what_a_cpu_does_not_have_is_refused_with_its_line(cuda: str, message: str) -> None:
    with pytest.raises(KernelError) as error:
        translate(cuda, PATH)
    assert str(error.value).startswith(f"{PATH}{message}")


def test_breakpoints_are_where_kernels_begin() -> None:
    text = "// __global__ void no() {\n__global__ void f(int a);\n__global__ void\nf(int a)\n{\n}\nint g() {}\n"
    assert first_lines(text) == [5]


def test_of_a_compilers_words_the_first_errors_are_kept() -> None:
    text = "In file included from x:1:\na.cu: In function 'f':\n"
    text += "a.cu:1:2: error: one\n  1 | x\n    | ^\na.cu:1:2: note: no\n  n\na.cu:2:1: warning: no\n w\n"
    text += "a.cu:3:1: error: two\na.cu:4:1: error: three\na.cu:5:1: error: four\n f\n"
    kept = ["a.cu:1:2: error: one", "  1 | x", "    | ^", "a.cu:3:1: error: two", "a.cu:4:1: error: three", "(1 more)"]
    assert first_errors(text).splitlines() == kept
    assert first_errors("strange") == "strange"


def small(dtype: str = "float32", **options: object) -> Case:
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 32, "block_size": 8} | options
    return make_case("small", dtype, (11, 3, 9), (2, 0, 9), **sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", make_cases("small"), ids=lambda case: case.name)
def test_the_oracle_agrees_with_the_reference(case: Case) -> None:
    k, v = case.k, case.v
    if case.k_scale is not None and case.v_scale is not None:
        k, v = QuantizedKV(case.k, case.k_scale), QuantizedKV(case.v, case.v_scale)
    out = reference.paged_attention(
        case.q, k, v, case.block_tables, case.context_lens, case.query_start_loc, case.scale
    )
    wanted, tolerance = expected(case)
    assert (np.abs(out - wanted) <= tolerance[..., None] / 4).all()
    assert judge(case, out.astype(np.float32)).kind == ""
    # The tolerance is far below what a row that is another token's would be off by.
    assert tolerance.max() < 0.1 * np.abs(wanted).max()


def test_the_cases_cover_what_they_should() -> None:
    cases = make_cases("small")
    assert {case.dtype for case in cases} == set(KV_TYPES)
    assert {case.heads // case.kv_heads for case in cases} >= {1, 3, 8}
    assert {case.q.shape[2] for case in cases} == {32, 64, 128}
    assert {case.block_size for case in cases} == {8, 16, 32}
    assert any(case.with_partial for case in cases)
    assert any(0 in np.diff(case.query_start_loc) for case in cases)
    lengths = {int(n) % case.block_size for case in cases for n in case.context_lens}
    assert lengths >= {0, 1, 15}
    names = [case.name for case in make_cases("full")]
    assert len(set(names)) == len(names) > 100


def test_what_no_sequence_holds_is_marked() -> None:
    for dtype in KV_TYPES:
        case = small(dtype)
        rows = case.k.astype(np.float32) if case.k_scale is None else case.k_scale[..., None] * case.k
        seen = ~np.isnan(rows).any(axis=(1, 3))  # (N, B)
        assert seen.sum() == sum(case.context_lens)
        for s, length in enumerate(case.context_lens):
            for t in range(length):
                assert seen[case.block_tables[s, t // 8], t % 8]
        marked = np.ascontiguousarray(rows[np.isnan(rows)], np.float32).view(np.uint32)
        assert ((marked & 0x7FFFF000) == MARK32).all()


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda out: out, ""),
        (lambda out: out + np.float32(1e-3), "wrong result"),
        (lambda out: out * np.float32("inf"), "not a number"),
        (lambda out: np.full(out.shape, 0xFFFFFFFF, np.uint32).view(np.float32), "not written"),
        (lambda out: np.full(out.shape, MARK32, np.uint32).view(np.float32), "past the context's end"),
    ],
)
def test_judging(change: object, kind: str) -> None:
    case = small()
    out = expected(case)[0].astype(np.float32)
    assert callable(change)
    assert judge(case, change(out)).kind == kind


def test_a_difference_between_orders_is_a_finding() -> None:
    case = small()
    out = expected(case)[0].astype(np.float32)
    other = out.copy()
    other[3, 1, 2] = np.nextafter(other[3, 1, 2], np.float32(9))
    runs = {order: [CaseRun(case, order, code=0, out=x)] for order, x in ((0, out), (1, other))}
    assert compare_orders({0: runs[0], 1: runs[0]}) is None
    finding = compare_orders(runs)
    assert finding is not None
    assert finding.kind == "depends on the order"
    assert "1 of 44 rows" in finding.what


def test_the_least_traffic() -> None:
    """Two sequences with new tokens, of 11 and 9 tokens: 2 blocks each; 2 KV heads of 32, 11 rows of 4 heads."""
    tables = 4 * (2 + 2) + 4 * 3 + 4 * 4
    in_and_out = 2 * 11 * 4 * 32 * 4
    assert least_bytes(small("float32")) == 2 * 20 * 2 * 32 * 4 + in_and_out + tables
    assert least_bytes(small("float16")) == 2 * 20 * 2 * 32 * 2 + in_and_out + tables
    assert least_bytes(small("int8")) == 2 * 20 * 2 * (32 + 4) + in_and_out + tables


@pytest.mark.skipif(os.name != "posix", reason="sleep")
def test_a_process_that_takes_too_long_ends_with_its_children(tmp_path: Path) -> None:
    marker = tmp_path / "still here"
    ended = run_process(["sh", "-c", f"(sleep 0.8; touch '{marker}') & echo begun; sleep 60"], seconds=0.2)
    assert ended.timed_out
    assert ended.code != 0
    assert ended.stdout == "begun\n"
    time.sleep(0.9)
    assert not marker.exists()


def check(*arguments: str) -> int:
    return main(["cuda-check", *arguments])


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert check("--help") == 0
    out = capsys.readouterr().out
    assert "\nExamples:\n  minserve cuda-check" in out
    assert max(map(len, out.splitlines())) <= 100


@needs_compiler
def test_the_command_on_a_right_kernel(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert check("naive", "--only", "float32", "--keep", str(tmp_path / "kept")) == 0
    out, err = capsys.readouterr()
    assert "nothing is wrong" in out
    assert "6 of 6, plain, address, thread, account" in out
    document = json.loads(out.splitlines()[-1])
    assert document["right"] is True
    assert document["findings"] == []
    assert 0 < document["score"]["score"] < 0.5
    assert len(document["scores"]) == 6
    assert {"plain", "address", "thread", "account", "translated.cu", "plain.cases"} <= {
        path.name for path in (tmp_path / "kept").iterdir()
    }
    assert str(tmp_path / "kept") in err


@needs_compiler
def test_the_command_on_a_wrong_kernel(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    kernel = tmp_path / "wrong.cu"
    kernel.write_text(replaced(source("naive"), "#define THREADS 128", "#define THREADS 4096"), encoding="utf-8")
    before = set(Path(tempfile.gettempdir()).glob("minserve-cuda-*"))
    assert check(str(kernel), "--only", "float32", "--json") == 1
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert [finding["kind"] for finding in document["findings"]] == ["launch failure"]
    assert err == ""
    assert set(Path(tempfile.gettempdir()).glob("minserve-cuda-*")) <= before


@needs_compiler
def test_a_kernel_that_does_not_compile(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    kernel = tmp_path / "typo.cu"
    kernel.write_text(replaced(source("naive"), "float mixed = 0.0f;", "flot mixed = 0.0f;"), encoding="utf-8")
    line = next(n for n, text in enumerate(kernel.read_text().splitlines(), 1) if "flot" in text)
    assert check(str(kernel)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"{kernel}:{line}:" in err
    assert err.count("flot") <= 3  # said once, although four programs are compiled
    assert "does not compile it" in err.splitlines()[-1]
    kernel.write_text("int x;\n", encoding="utf-8")
    assert check(str(kernel)) == 2
    assert 'must #include "paged_attention.h" and define launch_paged_attention' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing.cu"], "there is no file 'nothing.cu'; fast and naive are"),
        (["naive", "--compiler", "no-such-compiler"], "--compiler: there is no program 'no-such-compiler'"),
        (["naive", "--gdb", "2-37"], "--gdb: must be BLOCK:THREAD"),
        (["naive", "--timeout", "0"], "--timeout: must be a number of seconds above 0"),
        (["naive", "--only", "bfloat16"], "--only cannot be 'bfloat16'"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def test_without_a_compiler_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(KernelError, match=r"no g\+\+ and no clang\+\+: install one"):
        find_compiler(cuda_sources())


@needs_compiler
@pytest.mark.skipif(shutil.which("gdb") is None, reason="there is no gdb")
def test_gdb_stops_at_the_thread(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "minserve", "cuda-check", "naive", "--gdb", "2:37", "--keep", str(tmp_path)]
    asks = "print threadIdx.x\nprint blockIdx.x\nquit\n"
    said = subprocess.run(command, input=asks, capture_output=True, text=True, timeout=120)
    if "ptrace" in said.stdout + said.stderr:
        pytest.skip("this machine lets nobody debug")
    assert "Breakpoint 1" in said.stdout, said
    assert "$1 = 37\n" in said.stdout
    assert "$2 = 2\n" in said.stdout


@needs_compiler
@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_nothing_behind(number: int, tmp_path: Path) -> None:
    """They ended minserve alone: compilers ran on, and the folder stayed."""
    command = [sys.executable, "-m", "minserve", "cuda-check", "naive", "--only", "float32"]
    with subprocess.Popen(command, env={**os.environ, "TMPDIR": str(tmp_path)}, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 30
        while not list(tmp_path.glob("minserve-cuda-*/translated.cu")) and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.3)
        process.send_signal(number)
        assert process.wait(30) == 128 + number
    assert not list(tmp_path.glob("minserve-cuda-*"))


def test_a_compiler_that_is_no_command() -> None:
    with pytest.raises(KernelError, match='--compiler: "\'" is no command: No closing quotation'):
        find_compiler(cuda_sources(), "'")
