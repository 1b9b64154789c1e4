"""A stand-in for a peer, in the form that minserve/bench/peers/child.py runs. What it does is in FAKE_PEER, as JSON.

chatter: print to stdout as native libraries do. missing: a module that is not there. fail_at, die_at: the run (from 1)
that raises, or that the process dies in, if the name of the peer's file type is in `only` (None: of each). short: a
token fewer than was asked for. slow: seconds of a step. pids: a file to which the process's id is added.
litter: leave a temporary file behind.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def open_engine(options: dict[str, Any]) -> FakeEngine:
    return FakeEngine(options, json.loads(os.environ.get("FAKE_PEER", "{}")))


class FakeEngine:
    def __init__(self, options: dict[str, Any], plan: dict[str, Any]) -> None:
        if "missing" in plan:
            importlib.import_module(plan["missing"])
        if "litter" in plan:
            (Path(tempfile.mkdtemp()) / "requantized.gguf").write_bytes(b"GGUF")
        if "pids" in plan:
            with Path(plan["pids"]).open("a") as file:
                file.write(f"{os.getpid()}\n")
        self._plan, self._runs, self._chosen = plan, 0, 0
        self._faulty = plan.get("only") in (None, options.get("requantize"))
        self.about = {"version": "fake 1.0", "settings": json.dumps(options, sort_keys=True)}

    def prepare(self, prompts: list[list[int]], num_steps: int) -> None:
        self._runs += 1
        self._prompts, self._chosen = prompts, 0

    def start(self) -> None:
        if "chatter" in self._plan:
            print("a library says hello", flush=True)
            os.write(1, b"past Python's streams too\n")
        if self._faulty and self._runs == self._plan.get("fail_at"):
            raise ValueError("out of luck")
        if self._faulty and self._runs == self._plan.get("die_at"):
            sys.stderr.write("fatal: the roof is on fire\n\n")
            sys.stderr.flush()
            os._exit(7)
        self.step()

    def step(self) -> None:
        time.sleep(self._plan.get("slow", 0.0002))
        self._chosen += 1

    def finish(self) -> list[list[int]]:
        return [[prompt[0]] * (self._chosen - bool(self._plan.get("short"))) for prompt in self._prompts]
