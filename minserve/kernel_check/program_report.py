"""What a program's run says is wrong: reports of sanitizers and of the emulation, as findings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from minserve.kernel_check.finding import Finding
from minserve.kernel_check.program import CaseRun, ProgramRun, places_of

TAKES_NOT = 1  # cudaErrorInvalidValue: the kernel does not take this case
_THREAD = r"block \((\d+),(\d+),(\d+)\), thread (\d+)"
# What the emulation says, and which kind that is.
_WORDS = (
    ("waits at this __syncthreads", "divergent barrier"),
    ("waits at __syncthreads, but", "divergent barrier"),
    ("deadlock:", "deadlock"),
    ("in a shuffle with mask", "bad mask"),
    ("which leaves its own lane", "bad mask"),
    ("reads lane", "bad mask"),  # that has returned
    ("cannot be launched", "launch failure"),
)
_SIGNALS = {4: "an illegal instruction", 6: "abort()", 7: "a bus error", 8: "a division by zero", 11: "a bad address"}


def read_report(run: ProgramRun, kernel: Path) -> list[Finding]:
    """The findings in what a program said, without source lines. kernel: as the compiler was told its name."""
    findings = [
        *(_failure(case_run, run, kernel) for case_run in run.cases if case_run.code not in (None, 0, TAKES_NOT)),
        *_races(run, kernel),
        *_account(run, kernel),
    ]
    unfinished = run.unfinished
    if unfinished is not None:
        findings.append(_end(run, unfinished, kernel))
    elif not findings and run.ended_early:
        what = f"the program ended after {len(run.cases)} of {run.num_cases} cases, without a result of the last one"
        findings.append(Finding("crash", what, run.variant))
    elif not findings and (run.ended.code or run.ended.timed_out):
        said = (run.ended.stderr.strip().splitlines() or ["nothing"])[-1]
        findings.append(Finding("crash", f"the program ended with code {run.ended.code}; it said: {said}", run.variant))
    return findings


def _failure(case_run: CaseRun, run: ProgramRun, kernel: Path) -> Finding:
    """What the emulation reported: "block (2,0,0), thread 37, kernel.cu:61: why"."""
    message = case_run.message
    kind = next((kind for words, kind in _WORDS if words in message), "launch failure")
    found = re.match(_THREAD + r"(?:, (\S+):(\d+))?: (.*)", message, re.DOTALL)
    if found is None:
        words = f"launch_paged_attention gave the error {case_run.code}: {message}"
        return Finding(kind, words, run.variant, case=case_run.case.name)
    if kind == "launch failure":  # before there was a thread
        return Finding(kind, found[7], run.variant, case=case_run.case.name)
    line = int(found[6]) if found[6] and found[5] == kernel.name else None
    other = re.search(r"in line (\d+)", found[7])
    return Finding(
        kind,
        found[7],
        run.variant,
        line=line,
        other_line=int(other[1]) if other else None,
        threads=(int(found[4]),),
        block=(int(found[1]), int(found[2]), int(found[3])),
        case=case_run.case.name,
    )


def _end(run: ProgramRun, case_run: CaseRun, kernel: Path) -> Finding:
    """Why a program ended in the middle of a case."""
    text, line, kind = run.ended.stderr, None, "crash"
    who = re.search(r"^CUDA: " + _THREAD, text, re.MULTILINE)
    if run.ended.timed_out:
        kind, what = "endless loop", "still ran when its time was over"
    elif (undefined := re.search(re.escape(str(kernel)) + r":(\d+)(?::\d+)?: runtime error: (.*)", text)) is not None:
        kind, what, line = _kind_of_undefined(undefined[2]), undefined[2], int(undefined[1])
    elif (undefined := re.search(r": runtime error: (.*)", text)) is not None:  # in a header, called by the kernel
        kind, what, line = _kind_of_undefined(undefined[1]), undefined[1], _line(text, kernel)
    elif (address := re.search(r"ERROR: AddressSanitizer: (.*)", text)) is not None:
        kind, what = _kind_of_address(text), _words_of_address(address[1], text)
        line = _line(text[address.start() :], kernel)
    else:
        what = f"ended by {_SIGNALS.get(-run.ended.code, f'exit code {run.ended.code}')}"
    if line is None:
        stack = re.findall(r"^AT: (0x[0-9a-f]+)", text, re.MULTILINE)
        places = places_of(run.program, stack, kernel)
        line = next((places[address] for address in stack if address in places), None)
    return Finding(
        kind,
        what,
        run.variant,
        line=line,
        threads=(int(who[4]),) if who else (),
        block=(int(who[1]), int(who[2]), int(who[3])) if who else None,
        case=case_run.case.name,
    )


def _kind_of_undefined(words: str) -> str:
    if "misaligned" in words:
        return "misaligned access"
    return "out of bounds in shared memory" if "out of bounds" in words else "arithmetic"


def _kind_of_address(text: str) -> str:
    if "global-buffer-overflow" in text or "of global variable" in text:
        return "out of bounds in shared memory"
    return "past the context's end" if "use-after-poison" in text else "out of bounds in global memory"


def _words_of_address(error: str, text: str) -> str:
    """What was done, how many bytes, and how far from which array."""
    access = re.search(r"^(READ|WRITE) of size (\d+)", text, re.MULTILINE)
    signal = re.search(r"caused by a (READ|WRITE) memory access", text)
    if access:
        words = f"{'reads' if access[1] == 'READ' else 'writes'} {access[2]} bytes"
    elif signal:
        words = f"{'reads' if signal[1] == 'READ' else 'writes'} at an address far from all arrays"
    else:
        words = error.split(" on ")[0].split(" (pc")[0]
    if "use-after-free" in error:
        return f"{words} far from all arrays, where one of an earlier case was"
    if "use-after-poison" in error:
        return f"{words} of a slot that holds no token"
    variable = re.search(r"(\d+) bytes ([a-z ]+?)(?: of)? global variable '([^']*)'", text)
    if variable:
        name = re.sub(r"\(.*\)", "", variable[3]).split("::")[-1]
        return f"{words}, {variable[1]} bytes {_side(variable[2])} shared array `{name}`"
    region = re.search(r"(\d+) bytes ([a-z ]+?)(?: of)? (?:a )?(\d+)-byte region", text)
    return f"{words}, {region[1]} bytes {_side(region[2])} array of {region[3]} bytes" if region else words


def _side(words: str) -> str:
    if "right" in words or "after" in words:
        return "after the end of the"
    return "before the beginning of the" if "left" in words or "before" in words else "inside the"


def _line(text: str, kernel: Path) -> int | None:
    """The line of the first stack frame that is in the kernel file."""
    for line in text.splitlines():
        if re.match(r"\s*#\d+ ", line) and (found := re.findall(re.escape(str(kernel)) + r":(\d+)", line)):
            return int(found[-1])
    return None


def _races(run: ProgramRun, kernel: Path) -> Iterator[Finding]:
    """Each of ThreadSanitizer's reports."""
    for report in re.split(r"^={18}$", run.ended.stderr, flags=re.MULTILINE):
        if "WARNING: ThreadSanitizer: data race" not in report:
            continue
        accesses = re.split(r"(?im)^  (?=(?:previous )?(?:atomic )?(?:read|write) of size)", report)[1:3]
        lines = [_line(access, kernel) for access in accesses]
        does = ["writes" if "write of" in access.split("\n")[0].lower() else "reads" for access in accesses]
        names = dict(re.findall(r"^  Thread T(\d+) '([^']*)'", report, re.MULTILINE))
        who = [
            re.search(_THREAD, names.get(number[1], "") if (number := re.search(r"by thread T(\d+)", access)) else "")
            for access in accesses
        ]
        threads = tuple(int(name[4]) for name in who if name)
        first = next((name for name in who if name), None)
        array = re.search(r"Location is global '([^']*)'", report)
        memory = f"the shared array `{re.sub(r'[(].*[)]', '', array[1]).split('::')[-1]}`" if array else "global memory"
        sentence = _race_sentence(threads, does, lines, memory)
        if len(lines) == 2 and lines[0] is None:
            lines.reverse()
        yield Finding(
            "data race",
            sentence,
            run.variant,
            line=lines[0] if lines else None,
            other_line=lines[1] if len(lines) == 2 else None,
            threads=threads,
            block=(int(first[1]), int(first[2]), int(first[3])) if first else None,
        )


def _race_sentence(threads: tuple[int, ...], does: list[str], lines: list[int | None], memory: str) -> str:
    if len(threads) != 2 or len(lines) != 2:
        return f"two threads touch {memory} and one of them writes"
    warps = "of one warp" if threads[0] // 32 == threads[1] // 32 else "of different warps"
    at = [f" in line {line}" if line is not None else "" for line in lines]
    return (
        f"thread {threads[0]} {does[0]} {memory}{at[0]}, and thread {threads[1]} {does[1]} it{at[1]}, with nothing "
        f"between that orders them; the two are {warps}"
    )


def _account(run: ProgramRun, kernel: Path) -> Iterator[Finding]:
    """What account.h found, a finding for each place or pair of places."""
    noted = [
        (name, case_run, entry)
        for case_run in run.cases
        for name in ("uninitialised", "block_races")
        for entry in (case_run.account or {}).get(name, ())
    ]
    addresses = [entry[key] for _, _, entry in noted for key in ("address", "address2") if key in entry]
    places = places_of(run.program, addresses, kernel)
    for name, case_run, entry in noted:
        line, other = places.get(entry["address"]), places.get(entry.get("address2", ""))
        if name == "uninitialised":
            kind, what = "uninitialised shared memory", "reads shared memory that no thread of the block wrote before"
        else:
            kind, what = "race between blocks", "touches global memory that another thread block touches too"
            what += f", in line {other}" if other is not None else ""
        x, y, z = entry["block"]
        yield Finding(
            kind,
            what,
            run.variant,
            line=line,
            other_line=other,
            threads=(int(entry["thread"]),),
            block=(x, y, z),
            case=case_run.case.name,
        )
