"""Ctrl-C at a line that the test chooses."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import FrameType, ModuleType
from typing import Any


class InterruptAt:
    """A trace function that raises KeyboardInterrupt at the n-th line that is executed of these modules."""

    def __init__(self, number: int, modules: Iterable[ModuleType]) -> None:
        self.left = number
        self.where: str | None = None
        self._files = {module.__file__ for module in modules}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in self._files:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self


def interrupted(run: Callable[[], object], number: int, modules: Iterable[ModuleType]) -> str | None:
    """Run with an interrupt at that line: where it came, or None if the run ended before."""
    trace, before = InterruptAt(number, modules), sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return trace.where
