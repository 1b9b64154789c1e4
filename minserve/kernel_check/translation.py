"""translate: a CUDA kernel file as C++. Only what C++ has no grammar for is changed, and lines keep their numbers."""

from __future__ import annotations

import re
from pathlib import Path

from minserve.errors import KernelError

# Comments and literals, in the order in which they may begin. A raw string ends at its own delimiter.
_NOT_CODE = re.compile(
    r'//(?:\\\n|[^\n])*|/\*.*?\*/|R"(?P<mark>[^()\\\s]{0,16})\(.*?\)(?P=mark)"'
    r"|\"(?:\\.|[^\"\\\n])*\"|(?<![0-9a-zA-Z_])'(?:\\.|[^'\\\n])*'",
    re.DOTALL,
)
# `static` or `extern "C"` before __global__, which itself means `static` on a CPU. (Literals are blanks by now.)
_LINKAGE = re.compile(r"\b(static|extern)\b(?=\s+(?:inline\s+)?__global__\b)")
_LINKAGE_BEHIND = re.compile(r"(?<=\b__global__)(\s+)(static)\b")


def translate(source: str, path: Path) -> str:
    """The file's text for a C++ compiler with csrc/cuda/on_cpu among its include folders.

    `kernel<<<grid, block>>>(arguments)` becomes LAUNCH((kernel), (grid), (block))(arguments), and what declares a
    kernel's linkage goes. path: the file that compilers and sanitizers name in what they say. Raises KernelError,
    which begins with path and line, for what the CPU form does not have: shared memory whose size the launch says,
    and streams.
    """
    code = code_only(source)
    edits = [*_launches(code, source, path), *_linkages(code, source)]
    if found := re.search(r"\bextern\s+(?:__align__\s*\([^)]*\)\s*)?__shared__", code):
        raise _refusal(
            path, code, found.start(), "`extern __shared__`, shared memory whose size the launch says, is not there on "
            "a CPU: give the array a size that is known when it is compiled"
        )  # fmt: skip
    text = source
    for begin, end, new in sorted(edits, reverse=True):
        text = text[:begin] + new + "\n" * source.count("\n", begin, end) + text[end:]
    name = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'#line 1 "{name}"\n{text}\n'


def code_only(source: str) -> str:
    """The source with blanks in the place of comments and literals."""
    return _NOT_CODE.sub(_blanks, source)


def _blanks(found: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", found[0])


def _refusal(path: Path, code: str, place: int, what: str) -> KernelError:
    return KernelError(f"{path}:{code.count(chr(10), 0, place) + 1}: {what}")


def _linkages(code: str, source: str) -> list[tuple[int, int, str]]:
    edits = [(found.start(2), found.end(2), "") for found in _LINKAGE_BEHIND.finditer(code)]
    for found in _LINKAGE.finditer(code):
        end = code.index("__global__", found.start())
        edits.append((found.start(), end, "inline " if "inline" in code[found.start() : end] else ""))
    return edits


def _launches(code: str, source: str, path: Path) -> list[tuple[int, int, str]]:
    """An edit for each `kernel<<<...>>>`."""
    edits, place = [], 0
    while (begin := code.find("<<<", place)) >= 0:
        end = code.find(">>>", begin)
        if end < 0:
            raise _refusal(path, code, begin, "a launch begins with <<< and has no >>>")
        kernel = _start_of_name(code, begin)
        if kernel == begin:
            raise _refusal(path, code, begin, "there is no kernel's name before <<<")
        arguments = _arguments(code, source, begin + 3, end)
        if not 2 <= len(arguments) <= 4:
            raise _refusal(
                path, code, begin, f"a launch has a grid and a block: <<<grid, block>>>, not {len(arguments)}"
            )
        for value, what in zip(arguments[2:], ("shared memory whose size the launch says", "a stream"), strict=False):
            if not re.fullmatch(r"0[uUlL]*|nullptr|NULL", value):
                raise _refusal(
                    path, code, begin, f"{what} ({value}) is not there on a CPU: launch with <<<grid, block>>>"
                )
        grid, block = (f"dim3{value}" if value.startswith("{") else value for value in arguments[:2])
        edits.append((kernel, end + 3, f"LAUNCH(({source[kernel:begin].strip()}), ({grid}), ({block}))"))
        place = end + 3
    # What an edit replaces had line ends in it; they are put behind it, so those inside must go.
    return [(begin, end, " ".join(new.split())) for begin, end, new in edits]


def _start_of_name(code: str, end: int) -> int:
    """Where the expression before <<< begins: a name with its namespaces, and template arguments behind it."""
    at = end
    while at and code[at - 1].isspace():
        at -= 1
    if at and code[at - 1] == ">":  # template arguments, which may have some of their own
        depth = 0
        while at:
            at -= 1
            depth += {">": 1, "<": -1}.get(code[at], 0)
            if depth == 0:
                break
        while at and code[at - 1].isspace():
            at -= 1
    if at and code[at - 1] == ")":
        depth = 0
        while at:
            at -= 1
            depth += {")": 1, "(": -1}.get(code[at], 0)
            if depth == 0:
                return at
    name = re.search(r"(?:::\s*)?(?:\b(?!return\b|else\b|do\b)[A-Za-z_]\w*\s*::\s*)*\b[A-Za-z_]\w*$", code[:at])
    return name.start() if name else end


def _arguments(code: str, source: str, begin: int, end: int) -> list[str]:
    """What stands between commas that are inside no bracket, without comments."""
    depth, start, found = 0, begin, []
    for at in range(begin, end + 1):
        if at == end or (code[at] == "," and depth == 0):
            found.append(" ".join(code[start:at].split()))
            start = at + 1
        elif code[at] in "([{":
            depth += 1
        elif code[at] in ")]}":
            depth -= 1
    return found
