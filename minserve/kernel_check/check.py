"""check_kernel: compiles a kernel file in its forms, runs them on cases, and gathers what is wrong and the cost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from minserve.errors import KernelError
from minserve.kernel_check.case import Case
from minserve.kernel_check.compiler import Compiler
from minserve.kernel_check.finding import Finding, in_order
from minserve.kernel_check.program import CaseRun, ProgramRun, run_program
from minserve.kernel_check.program_report import TAKES_NOT, read_report
from minserve.kernel_check.results import Judgement, compare_orders, judge_runs
from minserve.kernel_check.score import Score, score_of
from minserve.kernel_check.translation import translate

VARIANTS = ("plain", "address", "thread", "account")  # in the order in which they run
ORDERS = (0, 1, 20260801)  # forward, backward, drawn
SECONDS = 60.0  # that a program may run,
_SLOWER: Mapping[str, float] = {"address": 3, "thread": 10, "account": 5}  # and how many times that under each tool
Progress = Callable[[str, int, int], None]


@dataclass
class Outcome:
    """What a check found. not_taken: cases that launch_paged_attention said it does not take."""

    kernel: Path
    compiler: str
    cases: Sequence[Case]
    findings: list[Finding] = field(default_factory=list)
    judgements: list[Judgement] = field(default_factory=list)
    not_taken: list[Case] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    variants: list[str] = field(default_factory=list)  # that ran

    @property
    def is_right(self) -> bool:
        """Whether nothing was found."""
        return not self.findings


def read_kernel(path: Path) -> str:
    """The kernel file's text. Raises KernelError for what is no text, OSError."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise KernelError(
            f"{path} is not UTF-8 text: byte 0x{error.object[error.start]:02x} at {error.start}"
        ) from None


def prepare(kernel: Path, folder: Path) -> Path:
    """Write the translated kernel file into the folder. Raises KernelError, OSError."""
    translated = folder / "translated.cu"
    translated.write_text(translate(read_kernel(kernel), kernel), encoding="utf-8")
    return translated


def check_kernel(
    kernel: Path,
    cases: Sequence[Case],
    compiler: Compiler,
    folder: Path,
    *,
    variants: Sequence[str] = VARIANTS,
    seconds: float = SECONDS,
    progress: Progress = lambda stage, done, total: None,
) -> Outcome:
    """Check a kernel file; its programs are left in the folder, which must be there.

    variants: which of VARIANTS to run. Two are compiled at a time. progress gets ("compile" or "run", done, total).
    Raises KernelError if it does not compile, OSError.
    """
    kernel = kernel.resolve()
    lines = read_kernel(kernel).splitlines()
    translated = prepare(kernel, folder)
    outcome = Outcome(kernel, compiler.name, cases)
    names = [name for name in VARIANTS if name in variants]
    programs = {name: folder / name for name in names}
    _build_all(compiler, translated, programs, kernel.parent, progress)
    taken = list(cases)
    steps = sum(len(ORDERS) if name == "plain" else 1 for name in names)
    done = 0
    for name in names:
        if any(finding.kind == "endless loop" for finding in outcome.findings):
            break  # it would not end under a sanitizer either
        runs: dict[int, list[CaseRun]] = {}
        for order in ORDERS if name == "plain" else ORDERS[:1]:
            progress("run", done, steps)
            run = run_program(name, programs[name], taken, order=order, seconds=seconds * _SLOWER.get(name, 1))
            done += 1
            runs[order] = run.cases
            found = read_report(run, kernel)
            if found and name == "account":
                found = _exact_lines(run, found, compiler, translated, kernel, seconds)
            outcome.findings += found
            if order == ORDERS[0] and not outcome.variants:
                outcome.not_taken = [each.case for each in run.cases if each.code == TAKES_NOT]
                taken = [case for case in taken if case not in outcome.not_taken]
            if found:
                break
        outcome.variants.append(name)
        _judge(name, runs, outcome)
        if not taken:
            outcome.findings.append(Finding("nothing taken", "it takes none of the cases", name))
            break
    if any(finding.kind == "past the context's end" for finding in outcome.findings) and "address" in outcome.variants:
        _find_line(outcome, programs["address"], taken, seconds)
    progress("run", steps, steps)
    outcome.findings = [finding.quoted(lines) for finding in in_order(outcome.findings)]
    return outcome


def _build_all(
    compiler: Compiler, translated: Path, programs: Mapping[str, Path], include: Path, progress: Progress
) -> None:
    """Compile, two at a time. The first error, or Ctrl-C, ends those that are under way."""
    stop = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        builds = [
            pool.submit(compiler.build, name, translated, program, include, stop) for name, program in programs.items()
        ]
        try:
            for done, build in enumerate(builds):
                progress("compile", done, len(builds))
                build.result()
        except BaseException:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _judge(name: str, runs: Mapping[int, Sequence[CaseRun]], outcome: Outcome) -> None:
    """Take a variant's results into the outcome."""
    first = runs[ORDERS[0]]
    if name == "account":
        right = {judgement.case.name for judgement in outcome.judgements if not judgement.kind}  # others cost nothing
        outcome.scores = [score_of(run.case, run.account) for run in first if run.account and run.case.name in right]
    if not outcome.judgements:
        outcome.judgements, findings = judge_runs(first)
        outcome.findings += findings
    if name == "plain" and (finding := compare_orders(runs)) is not None:
        outcome.findings.append(finding)


def _exact_lines(
    run: ProgramRun, found: list[Finding], compiler: Compiler, translated: Path, kernel: Path, seconds: float
) -> list[Finding]:
    """The account's findings from a program that is not optimised, on the first cases that showed them."""
    program = run.program.with_name("lines")
    names = {finding.case for finding in found}
    cases = [each.case for each in run.cases if each.case.name in names][:2]
    compiler.build("lines", translated, program, kernel.parent)
    again = read_report(run_program("lines", program, cases, seconds=seconds), kernel)
    return [replace(finding, found_by=run.variant) for finding in again] or found


def _find_line(outcome: Outcome, program: Path, cases: Sequence[Case], seconds: float) -> None:
    """Where slots are read that hold no token: a run in which they may not be touched. (A kernel that reads them and
    does not use what it read is right, so that this is asked only of one whose results are wrong.)
    """
    place = next(i for i, finding in enumerate(outcome.findings) if finding.kind == "past the context's end")
    wrong = outcome.findings[place]
    case = [case for case in cases if case.name == wrong.case] or list(cases)
    run: ProgramRun = run_program("address", program, case, seconds=seconds, environment={"MS_GUARD_UNSEEN": "1"})
    for finding in read_report(run, outcome.kernel):
        if finding.kind == "past the context's end":
            outcome.findings[place] = replace(
                wrong, line=finding.line, threads=finding.threads, block=finding.block, found_by="address"
            )
            return
