"""The thread team: it lives with its backend, sleeps when there is nothing to do, and nobody waits for it in vain."""

from __future__ import annotations

import gc
import os
import threading
import time

import numpy as np
import pytest

from minserve.errors import KernelError
from minserve.ops import native
from minserve.ops.dtypes import Q4_1
from minserve.ops.native_core import load
from tests.support.native_cases import BACKENDS, random_tensor

has_threads = pytest.mark.skipif(not native.info()["threads"], reason="the core was built for one thread")
has_proc = pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="no /proc to count threads in")  # noqa: PTH112


def num_threads() -> int:
    """Threads of this process that the system knows."""
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208


def busy_seconds(seconds: float) -> float:
    """Processor time that this process takes while it sleeps."""
    started = time.process_time()
    time.sleep(seconds)
    return time.process_time() - started


@has_threads
@has_proc
def test_a_team_lives_as_long_as_its_backend() -> None:
    gc.collect()
    before = num_threads()
    backend = native.NativeBackend(4)
    assert num_threads() == before + 3  # whoever calls is the fourth
    x = np.ones((64, 320), np.float32)
    weight = backend.prepare(random_tensor(np.random.default_rng(0), Q4_1, 960, 320))
    for _ in range(3):
        backend.linear(x, weight)
    assert num_threads() == before + 3  # none is started for a job
    del backend, weight
    gc.collect()
    assert num_threads() == before


@has_threads
def test_waiting_threads_fall_asleep() -> None:
    """Threads that spin for ever take the processor from whoever has work: on a busy machine of two cores, 4
    tokens a second were left of 78."""
    backend = native.NativeBackend(3)
    x = np.ones((64, 320), np.float32)
    weight = backend.prepare(random_tensor(np.random.default_rng(0), Q4_1, 960, 320))
    backend.linear(x, weight)
    time.sleep(0.05)
    assert busy_seconds(0.3) < 0.1  # two that spin would take 0.6
    right = backend.linear(x, weight)
    np.testing.assert_array_equal(right, BACKENDS[0].linear(x, weight))


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_many_short_jobs_lose_no_piece(threads: int) -> None:
    """Workers fall asleep and wake between jobs of all sizes; a lost piece would leave old values in the result."""
    backend, alone = native.NativeBackend(threads), BACKENDS[0]
    rng = np.random.default_rng(threads)
    for i in range(400):
        n = int(rng.integers(1, 60_000))
        x = rng.standard_normal(n).astype(np.float32)
        np.testing.assert_array_equal(backend.add(x, x), x + x)
        if i % 50 == 0:
            time.sleep(0.01)  # long enough to fall asleep
            tokens = x[: n // 16 * 16].reshape(-1, 16)
            np.testing.assert_array_equal(backend.rms_norm(tokens, x[:16], 1e-5), alone.rms_norm(tokens, x[:16], 1e-5))


def test_callers_from_many_threads_at_once() -> None:
    """One of them has the team, the others compute alone; all get the right result."""
    backend = native.NativeBackend(3)
    rng = np.random.default_rng(0)
    weight = backend.prepare(random_tensor(rng, Q4_1, 640, 320))
    inputs = [rng.standard_normal((1 + 7 * i, 320)).astype(np.float32) for i in range(6)]
    right = [BACKENDS[0].linear(x, weight) for x in inputs]
    wrong: list[int] = []

    def call(i: int) -> None:
        for _ in range(30):
            if not (backend.linear(inputs[i], weight) == right[i]).all():
                wrong.append(i)

    callers = [threading.Thread(target=call, args=(i,)) for i in range(len(inputs))]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def test_a_team_of_no_possible_size_is_refused() -> None:
    core = load()
    assert not isinstance(core, str)
    team = core.ffi.new("ms_team **")
    for threads in (0, -1, 1025):
        assert core.lib.ms_team_new(threads, team) == core.lib.MS_BAD_THREADS
    assert core.lib.ms_team_new(2, core.ffi.NULL) == core.lib.MS_NULL_POINTER
    core.lib.ms_team_free(core.ffi.NULL)  # nothing to free


@has_threads
def test_a_system_that_gives_no_threads_is_an_error_with_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    core = load()
    assert not isinstance(core, str)

    lib = core.lib

    class Refusing:
        """The core's functions, on a system at its limit."""

        MS_NO_THREADS = lib.MS_NO_THREADS

        def __getattr__(self, name: str) -> object:
            return getattr(lib, name)

        def ms_team_new(self, threads: int, team: object) -> int:
            return lib.MS_NO_THREADS

    monkeypatch.setattr(core, "lib", Refusing())
    with pytest.raises(KernelError, match=r"start threads: the system gives .* \(2 threads: choose fewer\)"):
        native.NativeBackend(2)
