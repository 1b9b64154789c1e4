"""DeviceArray and CudaDevice: blocks to and from a device's memory, which is freed with the array."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import minserve
from minserve.errors import BackendError, ParameterError
from minserve.kv.kv_cache import KVCache
from minserve.ops import load_backend
from minserve.ops.device_array import DeviceArray
from minserve.ops.quantized_kv import QuantizedKV, quantize_rows
from tests.support.cuda import CUDA_ON_CPU, needs_library

INDICES = [0, 4, -1, np.int32(2), slice(None), slice(1, 4), slice(None, None, 2), slice(3, 3), [2, 3, 4, 0]]
INDICES += [np.array([4, 3, 3]), np.array([], np.intp), np.array([-1, 0], np.int64)]


class FakeDevice:
    """Keeps its memory in NumPy, and counts what is there and what is copied. An address is (array, offset)."""

    class Address:
        def __init__(self, memory: np.ndarray, offset: int = 0) -> None:
            self.memory, self.offset = memory, offset

        def __add__(self, nbytes: int) -> FakeDevice.Address:
            return FakeDevice.Address(self.memory, self.offset + nbytes)

    def __init__(self) -> None:
        self.live: list[int] = []
        self.copies = 0

    def allocate(self, nbytes: int) -> Any:
        self.live.append(nbytes)
        return self.Address(np.zeros(nbytes, np.uint8))

    def free(self, memory: Any) -> None:
        self.live.remove(memory.memory.nbytes)

    def upload(self, to: Any, values: np.ndarray) -> None:
        self.copies += 1
        to.memory[to.offset : to.offset + values.nbytes] = values.reshape(-1).view(np.uint8)

    def download(self, values: np.ndarray, address: Any) -> None:
        self.copies += 1
        part = address.memory[address.offset : address.offset + values.nbytes]
        values[...] = part.view(values.dtype).reshape(values.shape)


def devices() -> list[Any]:
    real = [pytest.param(CUDA_ON_CPU["auto"].device, id="cuda-on-cpu")] if CUDA_ON_CPU else []
    return [pytest.param(FakeDevice(), id="fake"), *real]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", [np.float16, np.int8, np.float32])
def test_blocks_are_read_and_written_as_numpys(device: Any, dtype: type) -> None:
    rng = np.random.default_rng(0)
    here = rng.integers(-100, 100, (5, 3, 2)).astype(dtype)
    there = DeviceArray(device, here.shape, dtype)
    assert (there.shape, there.ndim, there.dtype, len(there)) == ((5, 3, 2), 3, here.dtype, 5)
    assert there.nbytes == here.nbytes
    assert not np.asarray(there).any()
    there[:] = here
    np.testing.assert_array_equal(there, here)
    for index in INDICES:
        np.testing.assert_array_equal(there[index], here[index])
        assert there[index].shape == here[index].shape
        here[index] = there[index] = rng.integers(-100, 100, np.shape(here[index])).astype(dtype)
        np.testing.assert_array_equal(np.asarray(there), here)
    there[1:3] = here[1:3] = 7  # one number for all
    np.testing.assert_array_equal(np.asarray(there, np.float64), here)


@pytest.mark.parametrize("index", [(1, 2), (slice(None), 0), ..., None, "all", 1.5, [[0, 1]], [0.5], np.array([True])])
def test_an_index_of_another_kind_is_refused(index: Any) -> None:
    array = DeviceArray(FakeDevice(), (5, 3), np.float32)
    with pytest.raises(ParameterError, match="read and written by blocks"):
        array[index]
    with pytest.raises(ParameterError, match="read and written by blocks"):
        array[index] = 0.0


@pytest.mark.parametrize("index", [5, -6, [0, 5], np.array([-6])])
def test_a_block_outside_is_an_index_error(index: Any) -> None:
    with pytest.raises(IndexError):
        DeviceArray(FakeDevice(), (5, 3), np.float32)[index]


def test_neighbours_are_copied_at_once() -> None:
    device = FakeDevice()
    array = DeviceArray(device, (100, 3), np.float32)
    for index, copies in ((slice(None), 1), ([5, 6, 7, 20, 21, 3], 3), ([9, 8], 2), ([], 0)):
        device.copies = 0
        array[np.array(index, int) if isinstance(index, list) else index]
        assert device.copies == copies


def test_memory_is_freed_with_the_array_and_not_before() -> None:
    device = FakeDevice()
    cache = KVCache(2, 5, 8, 1, 4, "int8", lambda shape, dtype: DeviceArray(device, shape, dtype))
    assert sorted(device.live) == [160] * 8  # keys and values of two layers, and their scales: once each
    held = cache.k[0]
    del cache
    gc.collect()
    assert sorted(device.live) == [160, 160]
    del held
    assert device.live == []


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_copy_blocks_on_a_device(dtype: str) -> None:
    """As in NumPy's memory: all sources are read before a destination is written."""
    rng = np.random.default_rng(0)
    device = FakeDevice()
    caches = [
        KVCache(2, 6, 4, 2, 8, dtype),
        KVCache(2, 6, 4, 2, 8, dtype, lambda shape, dtype: DeviceArray(device, shape, dtype)),
    ]
    for layers in zip(*([*cache.k, *cache.v] for cache in caches), strict=True):
        values = rng.standard_normal((6, 2, 4, 8)).astype(np.float32)
        for layer in layers:
            layer[:] = values
    for cache in caches:
        cache.copy_blocks([0, 1, 2], [1, 2, 5])
        with pytest.raises(ParameterError):
            cache.copy_blocks([0], [6])
    for here, there in zip([*caches[0].k, *caches[0].v], [*caches[1].k, *caches[1].v], strict=True):
        np.testing.assert_array_equal(there[:], here[:])


def test_int8_on_a_device_reads_and_writes_blocks() -> None:
    device = FakeDevice()
    cache = QuantizedKV(DeviceArray(device, (4, 2, 3, 8), np.int8), DeviceArray(device, (4, 2, 3), np.float32))
    x = np.random.default_rng(0).standard_normal((2, 2, 3, 8)).astype(np.float32)
    cache[np.array([3, 1])] = x
    q, scale = quantize_rows(x)
    np.testing.assert_array_equal(cache[np.array([3, 1])], q * scale[..., None])
    assert not cache[0].any()
    with pytest.raises(ParameterError, match="scale must be a NumPy array of float32 with 3 dim"):
        QuantizedKV(cache.q, DeviceArray(device, (4, 2, 3), np.float16))
    with pytest.raises(ParameterError, match="scale must have the shape"):
        QuantizedKV(cache.q, DeviceArray(device, (4, 2, 4), np.float32))


@needs_library
def test_more_memory_than_there_is_is_refused_by_name() -> None:
    backend = CUDA_ON_CPU["auto"]
    for kv_heads in (2**14, 2**30):  # more than a processor can address; more than a size_t can say
        with pytest.raises(ParameterError, match=r"the KV cache needs [\d.]+ GiB and that much memory is not to be"):
            KVCache(1, 2**25, 32, kv_heads, 64, "float32", backend.allocate_kv)
    KVCache(1, 2, 8, 1, 64, "float32", backend.allocate_kv)  # the device goes on


@needs_library
def test_a_forked_process_is_refused_by_name() -> None:
    """On a GPU it would get errors that say nothing, or hang; and it must not free its parent's memory."""
    code = """
        import os, sys
        import numpy as np
        from minserve.errors import BackendError
        from minserve.ops import load_backend
        backend = load_backend("cuda-on-cpu", threads=1)
        k_cache, v_cache = (backend.allocate_kv((2, 1, 8, 32), np.float16) for _ in range(2))
        k, slots = np.ones((1, 1, 32), np.float32), np.array([3], np.int32)
        child = os.fork()
        if not child:
            try:
                backend.write_kv(k, k, k_cache, v_cache, slots)
            except BackendError as error:
                print(error, flush=True)
            fresh = load_backend("cuda-on-cpu", threads=1)
            fresh.write_kv(k, k, *(fresh.allocate_kv((2, 1, 8, 32), np.float16) for _ in range(2)), slots)
            sys.exit(5)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
        backend.write_kv(k, k, k_cache, v_cache, slots)
        print(k_cache[0][0, 3].sum())
    """
    result = run_python(code)
    assert result.returncode == 0, result.stderr
    first, second = result.stdout.splitlines()
    assert first.startswith("write_kv: the backend cuda-on-cpu was opened in another process, and does not survive a")
    assert second == "32.0"


@needs_library
def test_what_is_left_at_the_end_of_the_process_is_closed_quietly() -> None:
    code = """
        import numpy as np
        from minserve import LLM
        from minserve.ops import load_backend
        llm = LLM("tiny", backend="cuda-on-cpu", num_kv_blocks=4)
        llm.generate("Hi")
        backend = load_backend("cuda-on-cpu")
        cycle = [backend, backend.allocate_kv((2, 1, 8, 32), np.int8)]
        cycle.append(cycle)
    """
    result = run_python(code)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)]
    root = Path(minserve.__file__).parent.parent
    return subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=120)


def test_without_the_library_the_backends_say_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from minserve.ops import compiled_module, cuda_device, cuda_library

    def load(name: str) -> Any:
        return cuda_library.load.__wrapped__(name)

    monkeypatch.setattr(cuda_device, "load", load)
    package = tmp_path / "minserve"
    package.mkdir()
    for module in (compiled_module, cuda_library):
        monkeypatch.setattr(module, "__file__", str(package / "ops" / "module.py"))
    monkeypatch.delattr(minserve, "_cuda_on_cpu", raising=False)
    monkeypatch.setitem(sys.modules, "minserve._cuda_on_cpu", None)
    with pytest.raises(BackendError, match=r"cuda-on-cpu cannot run: minserve was installed without a C\+\+ compil"):
        load_backend("cuda-on-cpu")
    (tmp_path / "setup.py").touch()
    with pytest.raises(BackendError, match=r"holds no compiled cuda-on-cpu library: run `pip install -e \.` in it"):
        load_backend("cuda-on-cpu")
    with pytest.raises(BackendError, match="cuda cannot run: its library was not built: run `MINSERVE_CUDA=1 p"):
        load_backend("cuda")
    with pytest.raises(BackendError, match="came without its CUDA sources"):
        cuda_library.cuda_sources()
    (package / "csrc_cuda").mkdir()
    (package / "csrc_cuda" / "minserve_cuda.h").write_text("int ms_cuda_abi_version(void);\n", "ascii")
    assert cuda_library.cuda_sources() == package / "csrc_cuda"
    (package / "libminserve_cuda.so").write_bytes(b"no library")
    with pytest.raises(BackendError, match=r"libminserve_cuda.so does not load \(.*\): run `MINSERVE_CUDA=1") as error:
        load_backend("cuda")
    assert "\n" not in str(error.value)
