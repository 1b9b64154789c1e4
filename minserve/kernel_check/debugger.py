"""A kernel under gdb: a program for it, and a script that stops where one CUDA thread begins."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from minserve.kernel_check.case import Case, write_cases
from minserve.kernel_check.check import prepare, read_kernel
from minserve.kernel_check.compiler import Compiler
from minserve.kernel_check.translation import code_only


def debug_command(
    kernel: Path, cases: Sequence[Case], compiler: Compiler, folder: Path, block: tuple[int, int, int], thread: int
) -> list[str]:
    """Build the kernel in the folder and return the gdb command that runs it on the cases.

    block: (x, y, z); thread: its number in the block. Raises KernelError, OSError.
    """
    kernel = kernel.resolve()
    program, case_file, script = (folder / name for name in ("debug", "debug.cases", "debug.gdb"))
    compiler.build("plain", prepare(kernel, folder), program, kernel.parent)
    write_cases(case_file, cases)
    x, y, z = block
    number = "threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)"
    condition = f"blockIdx.x == {x} && blockIdx.y == {y} && blockIdx.z == {z} && {number} == {thread}"
    lines = first_lines(read_kernel(kernel))
    breaks = "".join(f"break {kernel.name}:{line} if {condition}\n" for line in lines)
    script.write_text(f"set confirm off\nset pagination off\n{breaks}run\n", encoding="utf-8")
    return ["gdb", "-q", "-x", str(script), "--args", str(program), str(case_file), str(folder / "debug.out")]


def first_lines(source: str) -> list[int]:
    """The line of the { of each __global__ function that has a body."""
    code = code_only(source)
    found = re.finditer(r"\b__global__\b[^;{]*\{", code)
    return [code.count("\n", 0, kernel.end() - 1) + 1 for kernel in found]
