"""The machine's limits in C: what is read and computed is right, and wrong arguments are errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minserve.errors import BackendError
from minserve.ops import native_limits
from minserve.ops.native import NativeBackend
from minserve.ops.native_limits import LimitMeasurer, free_memory, last_cache_bytes
from tests.support.native_cases import BACKENDS

ids = [f"{backend.isa}-{backend.threads}" for backend in BACKENDS]
every_backend = pytest.mark.parametrize("backend", BACKENDS, ids=ids)
BACKEND = BACKENDS[-1]
LIB, FFI = BACKEND._core.lib, BACKEND._core.ffi
EXEC = BACKEND._exec
MIB = 1 << 20


@every_backend
@pytest.mark.parametrize("lines", [0, 1, 2, 3, 4, 7, 1000, 16384, 16385, 3 * 16384 + 5])
def test_every_byte_is_read_once(backend: NativeBackend, lines: int) -> None:
    words = np.random.default_rng(lines).integers(0, 2**64, 8 * lines + 1, np.uint64)[1:]  # not at a line's start
    total = FFI.new("uint64_t *", 1)
    data = FFI.from_buffer("uint8_t[]", words)
    assert LIB.ms_measure_read(backend._exec, data, words.nbytes, total) == LIB.MS_OK
    assert total[0] == int(words.sum(dtype=np.uint64))


@every_backend
@pytest.mark.parametrize("measure", [LIB.ms_measure_int8, LIB.ms_measure_float], ids=["int8", "float"])
def test_every_operation_is_done(backend: NativeBackend, measure: Any) -> None:
    """Each product is 1, and has a multiplication and an addition."""
    operations, total = FFI.new("int64_t *"), FFI.new("int64_t *")
    assert measure(backend._exec, 1, operations, total) == LIB.MS_OK
    one_round = operations[0]
    assert one_round > 0
    for rounds in (1, 2, 47, 5000):
        assert measure(backend._exec, rounds, operations, total) == LIB.MS_OK
        assert operations[0] == rounds * one_round == 2 * total[0]


def test_the_largest_number_of_rounds_is_still_exact() -> None:
    operations, total = FFI.new("int64_t *"), FFI.new("int64_t *")
    for measure in (LIB.ms_measure_int8, LIB.ms_measure_float):
        alone = FFI.new("ms_exec *", {"threads": 1, "isa": EXEC.isa})
        assert measure(alone, 1 << 24, operations, total) == LIB.MS_OK
        assert operations[0] == 2 * total[0]


DATA = FFI.from_buffer("uint8_t[]", bytearray(128))
TOTAL, COUNT, COUNT_2 = FFI.new("uint64_t *"), FFI.new("int64_t *"), FFI.new("int64_t *")
ALONE = {"isa": EXEC.isa, "threads": 1}
MISTAKES: list[tuple[str, Any, tuple[Any, ...], int]] = [
    ("exec NULL", LIB.ms_measure_read, (FFI.NULL, DATA, 128, TOTAL), LIB.MS_NULL_POINTER),
    ("data NULL", LIB.ms_measure_read, (EXEC, FFI.NULL, 128, TOTAL), LIB.MS_NULL_POINTER),
    ("sum NULL", LIB.ms_measure_read, (EXEC, DATA, 128, FFI.NULL), LIB.MS_NULL_POINTER),
    ("half a line", LIB.ms_measure_read, (EXEC, DATA, 96, TOTAL), LIB.MS_BAD_SIZE),
    ("too many bytes", LIB.ms_measure_read, (EXEC, DATA, 2**64 - 64, TOTAL), LIB.MS_BAD_SIZE),
    ("isa", LIB.ms_measure_read, (FFI.new("ms_exec *", {**ALONE, "isa": 3}), DATA, 128, TOTAL), LIB.MS_BAD_ISA),
    ("threads", LIB.ms_measure_read, (FFI.new("ms_exec *", {**ALONE, "threads": 0}), DATA, 128, TOTAL), 5),
]
for name, function in (("int8", LIB.ms_measure_int8), ("float", LIB.ms_measure_float)):
    for what, changed, code in (
        ("exec NULL", {0: FFI.NULL}, LIB.MS_NULL_POINTER),
        ("operations NULL", {2: FFI.NULL}, LIB.MS_NULL_POINTER),
        ("sum NULL", {3: FFI.NULL}, LIB.MS_NULL_POINTER),
        ("no rounds", {1: 0}, LIB.MS_BAD_SIZE),
        ("rounds below 0", {1: -1}, LIB.MS_BAD_SIZE),
        ("too many rounds", {1: (1 << 24) + 1}, LIB.MS_BAD_SIZE),
        ("threads", {0: FFI.new("ms_exec *", {**ALONE, "threads": 1025})}, LIB.MS_BAD_THREADS),
    ):
        right = (EXEC, 10, COUNT, COUNT_2)
        MISTAKES.append((f"{name}: {what}", function, tuple(changed.get(i, a) for i, a in enumerate(right)), code))


@pytest.mark.parametrize(("what", "function", "arguments", "code"), MISTAKES, ids=[case[0] for case in MISTAKES])
def test_a_wrong_argument_is_an_error(what: str, function: Any, arguments: tuple[Any, ...], code: int) -> None:
    assert function(*arguments) == code


@every_backend
def test_limits_are_rates(backend: NativeBackend) -> None:
    measurer = LimitMeasurer(backend, nbytes=5 * MIB)
    assert (measurer.nbytes, measurer.threads, measurer.isa) == (5 * MIB, backend.threads, backend.isa)
    for _ in range(2):
        turn = measurer.turn()
        assert list(turn)[-2:] == ["int8", "float32"]
        assert next(iter(turn)) == "read_small_pages"
        assert len(turn["read_small_pages"]) == -(-5 // (4 * backend.threads))
        for rates in turn.values():
            assert min(rates) > 1e4  # a second; also where somebody else has the processor
        assert max(turn["int8"]) > max(turn["float32"]) / 8


def test_memory_that_is_not_there_is_an_error_before_it_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_limits, "free_memory", lambda: 9 * MIB)
    with pytest.raises(BackendError, match=r"reading memory is measured on 10 MiB, and only 9 MiB are free; end other"):
        LimitMeasurer(BACKEND, nbytes=5 * MIB)


def test_memory_that_the_system_refuses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(native_limits.mmap, "mmap", refuse)
    with pytest.raises(BackendError, match=r"10 MiB, which the system does not give \(.*Cannot allocate memory\); end"):
        LimitMeasurer(BACKEND, nbytes=5 * MIB)


def test_a_system_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were asked for, and small ones came: their rate must not be shown as that of huge ones."""
    monkeypatch.setattr(native_limits, "_huge_bytes", lambda address: 0)
    assert list(LimitMeasurer(BACKEND, nbytes=5 * MIB).turn()) == ["read_small_pages", "int8", "float32"]


def test_huge_pages_are_found_in_the_list_of_mappings(tmp_path: Path) -> None:
    smaps = tmp_path / "smaps"
    smaps.write_text(
        "1000-2000 rw-p 00000000 00:00 0 \nSize: 4 kB\nAnonHugePages:      64 kB\n"
        "7f00000-8f00000 rw-p 00000000 00:00 0  [heap]\nAnonHugePages:    4096 kB\nVmFlags: rd wr\n"
    )
    cases = [(0x1000, 64 << 10), (0x1FFF, 64 << 10), (0x2000, 0), (0x7F00000, 4 * MIB), (0x8F00000, 0)]
    assert [native_limits._huge_bytes(address, str(smaps)) for address, _ in cases] == [size for _, size in cases]
    assert native_limits._huge_bytes(0x1000, str(tmp_path / "nothing")) == 0


def test_last_caches_are_counted_once_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four processors, of which two share a last cache; the fourth is not ours."""
    monkeypatch.setattr(native_limits.os, "sched_getaffinity", lambda pid: {0, 1, 2}, raising=False)
    assert last_cache_bytes(str(tmp_path)) == 64 * MIB  # nobody tells
    for cpu, owners, size in ((0, "0-1", "32768K"), (1, "0-1", "32768K"), (2, "2", "8M"), (3, "3", "1G")):
        for index, (shared, amount) in enumerate((("-", "32K"), (owners, size))):
            cache = tmp_path / f"cpu{cpu}" / "cache" / f"index{index}"
            cache.mkdir(parents=True)
            (cache / "size").write_text(amount + "\n")
            (cache / "shared_cpu_list").write_text(shared + "\n")
    assert last_cache_bytes(str(tmp_path)) == 40 * MIB


def test_free_memory_is_the_less_of_the_machines_and_the_containers(tmp_path: Path) -> None:
    meminfo, group = tmp_path / "meminfo", tmp_path / "group"
    group.mkdir()
    assert free_memory(str(meminfo), str(group)) is None
    meminfo.write_text("MemTotal:       16000 kB\nMemFree:  1 kB\nMemAvailable:    9000 kB\n")
    assert free_memory(str(meminfo), str(group)) == 9000 << 10
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("1000\n")
    assert free_memory(str(meminfo), str(group)) == 9000 << 10
    (group / "memory.stat").write_text("anon 7\ninactive_anon 50\ninactive_file 300\n")
    assert free_memory(str(meminfo), str(group)) == 9000 << 10
    (group / "memory.max").write_text("5000\n")
    assert free_memory(str(meminfo), str(group)) == 4300
    (group / "memory.current").write_text("6000\n")
    assert free_memory(str(meminfo), str(group)) == 0
