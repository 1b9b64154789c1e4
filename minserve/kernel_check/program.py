"""Program: the compiled kernel file; runs it on cases and reads what it says."""

from __future__ import annotations

import json
import platform
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from minserve.kernel_check.case import Case, write_cases
from minserve.kernel_check.process import Ended, run_process

_OPTIONS: Mapping[str, Mapping[str, str]] = {
    "address": {
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:allow_addr2line=1:color=never:exitcode=99",
        "UBSAN_OPTIONS": "print_stacktrace=1:abort_on_error=1:allow_addr2line=1:color=never",
    },
    # Several races are reported; a report needs a long memory of what the other thread did.
    "thread": {
        "TSAN_OPTIONS": "halt_on_error=0:history_size=7:report_bugs=1:allow_addr2line=1:color=never:exitcode=66"
    },
}


@dataclass
class CaseRun:
    """What became of one case. code: a cudaError_t, None if the program ended before it was known."""

    case: Case
    order: int
    code: int | None = None
    message: str = ""
    account: dict[str, Any] | None = None
    changed: str = ""  # the input that the kernel wrote to
    out: np.ndarray | None = None  # float32 (T, H, d), where code is 0


@dataclass
class ProgramRun:
    """One run of a program. cases: those that were begun, in order."""

    variant: str
    program: Path
    ended: Ended
    cases: list[CaseRun] = field(default_factory=list)
    num_cases: int = 0  # that it was given

    @property
    def ended_early(self) -> bool:
        """Whether it ended as if all were well, before all cases had a result."""
        has_results = all(run.code is None or run.code != 0 or run.out is not None for run in self.cases)
        return self.ended.code == 0 and (len(self.cases) < self.num_cases or not has_results)

    @property
    def unfinished(self) -> CaseRun | None:
        """The case that was under way when the program ended before its time."""
        return next((run for run in self.cases if run.code is None), None)


def run_program(
    variant: str,
    program: Path,
    cases: Sequence[Case],
    *,
    order: int = 0,
    seconds: float,
    environment: Mapping[str, str] | None = None,
) -> ProgramRun:
    """Run a program on cases, with its files beside it. order: of the threads, as in Case.encode. Raises OSError."""
    case_file, result_file = program.with_suffix(".cases"), program.with_suffix(".out")
    write_cases(case_file, cases, order)
    result_file.unlink(missing_ok=True)
    # ThreadSanitizer knows where memory may lie, and newer kernels choose from more than that.
    fixed = ["setarch", platform.machine(), "-R"] if variant == "thread" and _has_setarch() else []
    ended = run_process(
        [*fixed, str(program), str(case_file), str(result_file)],
        seconds=seconds,
        environment={**_OPTIONS.get(variant, {}), **(environment or {})},
    )
    run = ProgramRun(variant, program, ended, num_cases=len(cases))
    for said in _said(ended.stdout):
        # A kernel can print such a line as well: what does not fit is not believed.
        if said.get("started") is True and said["case"] == len(run.cases) < len(cases):
            run.cases.append(CaseRun(cases[said["case"]], order))
        elif isinstance(said.get("code"), int) and run.cases and said["case"] == len(run.cases) - 1:
            last = run.cases[-1]
            last.code, last.message, last.account = said["code"], said.get("message", ""), said.get("account")
            last.changed = said.get("changed", "")
    results = result_file.read_bytes() if result_file.exists() else b""
    at = 0
    for case_run in run.cases:
        end = at + case_run.case.q.nbytes
        if case_run.code == 0 and end <= len(results):
            case_run.out = np.frombuffer(results[at:end], "<f4").reshape(case_run.case.q.shape)
        at = end
    return run


def _has_setarch() -> bool:
    return sys.platform == "linux" and shutil.which("setarch") is not None


def _said(stdout: str) -> list[dict[str, Any]]:
    """The program's JSON lines. A kernel may print as well, before them in a line and between them."""
    found = []
    for line in stdout.splitlines():
        text = re.search(r'\{"case": \d+, .*\}$', line)
        try:
            said = json.loads(text[0]) if text else None
        except ValueError:
            continue
        if said is not None:
            found.append(said)
    return found


def places_of(program: Path, addresses: Sequence[str], kernel: Path) -> dict[str, int]:
    """The kernel file's line at each address of the program, innermost first; nothing for those that are not in it."""
    tool = next((name for name in ("addr2line", "llvm-addr2line") if shutil.which(name)), None)
    wanted = list(dict.fromkeys(addresses))
    if tool is None or not wanted:
        return {}
    said = run_process([tool, "-a", "-i", "-e", str(program), *wanted], seconds=60).stdout
    places: dict[str, int] = {}
    address = ""
    for line in said.splitlines():
        if re.fullmatch(r"0x[0-9a-f]+", line):
            address = hex(int(line, 16))
        elif (found := re.match(re.escape(str(kernel)) + r":(\d+)", line)) is not None:
            places.setdefault(address, int(found[1]))
    return {name: places[hex(int(name, 16))] for name in wanted if hex(int(name, 16)) in places}
