"""minserve cuda-check finds planted faults, with their lines, and nothing in the right kernels."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from minserve.kernel_check.case_set import make_cases
from minserve.kernel_check.check import VARIANTS, check_kernel
from minserve.kernel_check.compiler import find_compiler
from minserve.ops.cuda_library import cuda_sources
from tests.support.planted_fault import Fault, line_of, replaced, source
from tests.support.planted_faults import FAULTS

COMPILERS = ("g++", "clang++")
# Checked in every run, with whichever compiler is there first; all are checked with both in the slow one.
EVERY_RUN = {
    "a missing barrier",
    "a barrier in divergent code",
    "a shuffle with a wrong mask",
    "an out-of-range block index",
    "an overrun of shared memory",
    "a wrong softmax rescale of the values",
    "reading past the context's end",
    "a race between warps",
}
needs_compiler = pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="there is no g++ and no clang++")


def names(faults: list[Fault]) -> list[str]:
    return [fault.name for fault in faults]


def test_the_faults_of_every_run_are_there() -> None:
    assert set(names(FAULTS)) >= EVERY_RUN
    assert len(set(names(FAULTS))) == len(FAULTS)


def check_fault(fault: Fault, folder: Path, compiler: str | None) -> None:
    kernel = fault.write(folder)
    cases = make_cases("small", ("float32",))
    outcome = check_kernel(
        kernel, cases, find_compiler(cuda_sources(), compiler), folder, variants=fault.variants, seconds=fault.seconds
    )
    found = [finding for finding in outcome.findings if finding.kind == fault.kind and fault.says in finding.what]
    assert found, outcome.findings
    for finding in found:
        assert finding.line is None or finding.source, finding
    if not fault.at:
        assert {finding.line for finding in found} == {None}
        return
    line = line_of(kernel, fault.at)
    other = line_of(kernel, fault.other) if fault.other else None
    places = [{finding.line, finding.other_line} for finding in found]
    assert any(line in place and (other is None or other in place) for place in places), (line, other, found)
    assert all(finding.block is not None and finding.threads for finding in found), found


@needs_compiler
@pytest.mark.parametrize("fault", [f for f in FAULTS if f.name in EVERY_RUN], ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(fault: Fault, tmp_path: Path) -> None:
    check_fault(fault, tmp_path, None)


@pytest.mark.slow
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_planted_fault_is_found_with_both_compilers(fault: Fault, compiler: str, tmp_path: Path) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no {compiler}")
    check_fault(fault, tmp_path, compiler)


@pytest.mark.slow
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("name", ["paged_attention.cu", "paged_attention_naive.cu"])
def test_nothing_is_found_in_the_right_kernels(name: str, compiler: str, tmp_path: Path) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no {compiler}")
    cases = make_cases()
    outcome = check_kernel(cuda_sources() / name, cases, find_compiler(cuda_sources(), compiler), tmp_path)
    assert outcome.findings == []
    assert outcome.not_taken == []
    assert outcome.variants == list(VARIANTS)
    assert len(outcome.scores) == len(outcome.judgements) == len(cases)
    assert all(judgement.error < 0.2 for judgement in outcome.judgements)  # of what is tolerated
    low, high = (0.45, 1.0) if name == "paged_attention.cu" else (0.01, 0.4)
    assert all(low < score.share <= high for score in outcome.scores), [score.share for score in outcome.scores]


@needs_compiler
@pytest.mark.parametrize(
    "name",
    ["a barrier in divergent code", pytest.param("a shuffle with a wrong mask", marks=pytest.mark.slow)],
)
def test_a_launch_that_stops_half_way_is_no_race(name: str, tmp_path: Path) -> None:
    """The threads that were left where they stood seemed to race with whoever freed the memory."""
    fault = next(fault for fault in FAULTS if fault.name == name)
    cases = make_cases("small", ("float32",))
    compiler = find_compiler(cuda_sources())
    outcome = check_kernel(fault.write(tmp_path), cases, compiler, tmp_path, variants=("plain", "thread"), seconds=60)
    assert {finding.kind for finding in outcome.findings} == {fault.kind}


@needs_compiler
def test_a_kernel_that_reads_a_whole_block_and_masks_it_is_right(tmp_path: Path) -> None:
    """What lies beyond a context is NaN in the cases; only a kernel that uses it is wrong."""
    text = replaced(
        source("naive"), "scores[t] = score * a.scale;", "scores[t] = t < seen ? score * a.scale : -INFINITY;"
    )
    whole = "const int seen = a.context_lens[s] - (a.query_start_loc[s + 1] - 1 - token);\n    const int length = "
    whole += "(seen + a.block_size - 1) / a.block_size * a.block_size;"
    text = replaced(text, "const int length = a.context_lens[s] - (a.query_start_loc[s + 1] - 1 - token);", whole)
    text = replaced(text, "mixed += scores[t] * value(v", "if (t < seen) mixed += scores[t] * value(v")
    kernel = tmp_path / "masks.cu"
    kernel.write_text(text, encoding="utf-8")
    cases = make_cases("small", ("float32",))
    outcome = check_kernel(
        kernel, cases, find_compiler(cuda_sources()), tmp_path, variants=("plain", "address"), seconds=60
    )
    assert outcome.findings == []
    assert len(outcome.judgements) == len(cases)


@needs_compiler
def test_nobody_waits_for_lanes_that_there_are_not(tmp_path: Path) -> None:
    """Of 48 threads the second warp has 16; and of the first one half returns early, where no barrier follows."""
    text = replaced(source("naive"), "#define THREADS 128", "#define THREADS 48")
    end = "        out[i] = mixed / sum;\n    }\n"
    text = replaced(text, end, end + "    __syncwarp();\n    if (threadIdx.x < 16) return;\n    __syncwarp();\n")
    kernel = tmp_path / "surplus.cu"
    kernel.write_text(text, encoding="utf-8")
    cases = make_cases("small", ("float32",))
    outcome = check_kernel(kernel, cases, find_compiler(cuda_sources()), tmp_path, variants=("plain",))
    assert outcome.findings == []
    assert len(outcome.judgements) == len(cases)


@needs_compiler
def test_cases_that_a_kernel_does_not_take_are_told_and_the_others_judged(tmp_path: Path) -> None:
    kernel = tmp_path / "float32_64.cu"
    kernel.write_text(source("fast"), encoding="utf-8")
    cases = make_cases()
    outcome = check_kernel(kernel, cases, find_compiler(cuda_sources()), tmp_path, variants=("plain",))
    assert outcome.findings == []
    takes = [case for case in cases if case.dtype == "float32" and case.q.shape[2] == 64]
    assert [judgement.case for judgement in outcome.judgements] == takes
    assert outcome.not_taken == [case for case in cases if case not in takes]
