"""Compiler: the C++ compiler that makes programs of a kernel file, plain and under each sanitizer."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from minserve.errors import KernelError
from minserve.kernel_check.process import run_process

# What each program is for, and what it is compiled with beside the common flags.
_UNDEFINED = "alignment,bounds,signed-integer-overflow,shift,integer-divide-by-zero,float-cast-overflow"
# Without optimisation where a line is asked for, since a compiler that moves code forgets where it was, and may take
# what is undefined as leave to do without a check. The account is of what an optimising compiler leaves to be read.
VARIANTS: Mapping[str, tuple[str, ...]] = {
    "plain": ("-O0", "-g"),
    "address": (
        *("-O0", "-g", "-fno-omit-frame-pointer", f"-fsanitize=address,{_UNDEFINED}"),
        f"-fno-sanitize-recover={_UNDEFINED}",
    ),
    "thread": ("-O0", "-g", "-fsanitize=thread"),
    "account": ("-O1", "-g", "-fno-unroll-loops", "-DMS_ACCOUNT", "-fsanitize=thread"),
    "lines": ("-O0", "-g", "-DMS_ACCOUNT", "-fsanitize=thread"),  # the account's findings again, with exact lines
}
_COMMON: tuple[str, ...] = ("-std=c++17", "-fno-strict-aliasing", "-Wno-unknown-pragmas")
# A launch that forgets to return a value would never end.
_COMMON += ("-Werror=return-type", "-fdiagnostics-color=never")
COMPILE_SECONDS = 300.0
INSTALL = "install one, for example with `apt install g++` or `xcode-select --install`"


class CompileError(KernelError):
    """A kernel file that does not compile. said: the compiler's first errors, in its own lines."""

    def __init__(self, message: str, said: str = "") -> None:
        super().__init__(message)
        self.said = said


@dataclass(frozen=True)
class Compiler:
    """command: as one would type it, with its own options. sources: csrc/cuda. account_options: for those variants."""

    command: tuple[str, ...]
    sources: Path
    account_options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """For people: what was typed."""
        return shlex.join(self.command)

    def build(
        self, variant: str, kernel: Path, program: Path, include: Path, stop: threading.Event | None = None
    ) -> None:
        """Compile a translated kernel file with the project's main program into `program`.

        include: the folder that the student's file is in. stop: ends it, once it is set. Raises CompileError.
        """
        flags = [*_COMMON, *VARIANTS[variant], "-iquote", str(include)]
        flags += ["-I", str(self.sources), "-I", str(self.sources / "on_cpu"), f'-DMS_KERNEL_FILE="{kernel}"']
        is_account = "-DMS_ACCOUNT" in flags
        if is_account:
            flags += self.account_options
        made = program.with_suffix(".o")
        compiled = [*self.command, "-x", "c++", *flags, "-c", str(self.sources / "check_main.cu"), "-o", str(made)]
        # Accesses are instrumented as for ThreadSanitizer, but received by account.h: its library must stay away.
        linked = [flag for flag in VARIANTS[variant] if not is_account or flag != "-fsanitize=thread"]
        for command in (compiled, [*self.command, *linked, str(made), "-o", str(program)]):
            ended = run_process(command, seconds=COMPILE_SECONDS, environment={"LC_ALL": "C"}, stop=stop)
            if ended.timed_out:
                raise CompileError(f"{self.name}: compiling took more than {COMPILE_SECONDS:.0f} s and was stopped")
            if ended.code:
                said = first_errors(ended.stderr)
                is_ours = "check_main.cu" in said or "launch_paged_attention" in said
                why = '; it must #include "paged_attention.h" and define launch_paged_attention' if is_ours else ""
                raise CompileError(f"{self.name} does not compile it{why}", said)
        made.unlink(missing_ok=True)


def find_compiler(sources: Path, wanted: str | None = None) -> Compiler:
    """The compiler that was asked for, that $CXX names, or g++ or clang++. Raises KernelError: what to install."""
    for origin, text in (("--compiler", wanted), ("CXX", os.environ.get("CXX"))):
        if text:
            try:
                command = shlex.split(text)
            except ValueError as error:  # a quotation mark without its fellow
                raise KernelError(f"{origin}: {text!r} is no command: {error}") from None
            if not command or shutil.which(command[0]) is None:
                raise KernelError(f"{origin}: there is no program {text!r}; leave it out to use g++ or clang++")
            return _made(command, sources)
    for name in ("g++", "clang++"):
        if shutil.which(name):
            return _made([name], sources)
    raise KernelError(f"a kernel is compiled by a C++ compiler, and there is no g++ and no clang++: {INSTALL}")


def _made(command: list[str], sources: Path) -> Compiler:
    """clang leaves a read without a call where a write of the same place follows, unless it is told not to."""
    option = ("-mllvm", "-tsan-instrument-read-before-write=1")
    trial = [*command, *option, "-x", "c++", "-fsanitize=thread", "-S", "-o", os.devnull, os.devnull]
    takes = run_process(trial, seconds=COMPILE_SECONDS).code == 0
    return Compiler(tuple(command), sources, option if takes else ())


def first_errors(text: str, most: int = 3) -> str:
    """The first errors among what a compiler said, with the lines that belong to them; notes and warnings left out."""
    lines = text.splitlines()
    kept: list[str] = []
    errors = 0
    taking = False
    for line in lines:
        if re.match(r".*:(\d+:)* (fatal )?error:", line) or "undefined reference" in line:
            errors += 1
            taking = True
        elif re.match(r".*:(\d+:)* (note|warning):|In file included|\s+from |.*: (In|At) ", line):
            taking = False
        if taking and errors <= most:
            kept.append(line)
    if errors > most:
        kept.append(f"({errors - most} more)")
    return "\n".join(kept or lines[:10] or ["it says nothing"])
