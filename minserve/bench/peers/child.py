"""The process of one engine: told over a pipe what to run, it answers with how long that took.

A script, run as `python child.py ENGINE.py OPTIONS`, where python may be another interpreter than minserve's: only the
standard library is used here, and ENGINE.py may use NumPy and the engine besides. OPTIONS is a JSON object.

ENGINE.py defines `open_engine(options)`, which returns an object with

    about                           a dict for people: version, settings, weights
    prepare(prompts, num_steps)     what may be made ready before the clock starts: arrays, memory for keys and values
    start()                         run all prompts, lists of token ids, and choose the most probable token after each
    step()                          run those tokens, one of each sequence, and choose the next ones
    finish()                        the chosen tokens of each sequence, num_steps + 1 of them; the engine is idle again

The clock is here, so that it is the same for all. One JSON object a line each way:

    child   {"ready": about}
    parent  {"prompts": [[1, 2, ...], ...], "num_steps": 128}
    child   {"prefill_seconds": 0.1, "decode_seconds": 0.9, "first_tokens": [7, ...]}

or {"error": text, "missing": module or null} in place of a child's line. The child ends when its stdin does.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import sys
import time
from typing import Any


def load(path: str) -> Any:
    """The engine's module, from its file."""
    spec = importlib.util.spec_from_file_location("engine_under_test", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measure(engine: Any, prompts: list[list[int]], num_steps: int) -> dict[str, Any]:
    """Run the prompts, then num_steps steps of one token a sequence. Raises RuntimeError if tokens are missing."""
    engine.prepare(prompts, num_steps)
    gc.collect()
    gc.disable()  # as timeit does: when Python tidies up is chance, and no part of the work
    try:
        begun = time.perf_counter()
        engine.start()
        prefilled = time.perf_counter()
        for _ in range(num_steps):
            engine.step()
        ended = time.perf_counter()
    finally:
        gc.enable()
    tokens = engine.finish()
    lengths = [len(each) for each in tokens]
    if lengths != [num_steps + 1] * len(prompts):  # an engine that ends early would look fast
        raise RuntimeError(f"{num_steps + 1} tokens were due for each of {len(prompts)} prompts, but came {lengths}")
    return {
        "prefill_seconds": prefilled - begun,
        "decode_seconds": ended - prefilled,
        "first_tokens": [int(each[0]) for each in tokens],
    }


def in_words(error: BaseException) -> dict[str, Any]:
    """An error as an answer. missing: the module that this interpreter does not have."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    return {"error": f"{type(error).__name__}: {error}", "missing": missing}


def main(engine_file: str, options: str) -> int:
    """Open the engine, then answer until stdin ends; 1 if the engine could not be opened."""
    # Native libraries print to stdout what they like. The pipe gets a number of its own, and stdout becomes stderr.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(document: dict[str, Any]) -> None:
        answers.write(json.dumps(document) + "\n")
        answers.flush()

    try:
        engine = load(engine_file).open_engine(json.loads(options))
    except Exception as error:
        answer(in_words(error))
        return 1
    answer({"ready": engine.about})
    for line in sys.stdin:
        try:
            answer(measure(engine, **json.loads(line)))
        except Exception as error:
            answer(in_words(error))
    return 0


if __name__ == "__main__":
    sys.path.pop(0)  # this folder: its files are not for engines to import
    sys.exit(main(*sys.argv[1:]))
