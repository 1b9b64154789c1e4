"""Whole answers on cuda-on-cpu: the same text as on `c`, whatever the scheduler does with the KV blocks."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from minserve import LLM, RequestOutput, SamplingParams
from minserve.cli import main
from minserve.errors import BackendError
from minserve.ops import native
from minserve.ops.device_array import DeviceArray
from minserve.ops.quantized_kv import QuantizedKV
from tests.support.cuda import needs_library

pytestmark = [needs_library, pytest.mark.skipif(native.why_unavailable() is not None, reason="no C core")]
PROMPTS = [
    "add 463+958=",
    "The king said",
    "reverse hello",
    "sort 5 3 1",
    "ROMEO:\nO Romeo, O Romeo, O",
    "Once upon a time there was a king, and the king had three sons, and",
]
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
# How an engine is squeezed. Blocks of 8 tokens; chunks of at most 24 tokens of all sequences together.
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "without chunks": {"enable_chunked_prefill": False},
    "preemption": {"num_kv_blocks": 14, "max_model_len": 100},
    "ngram drafts": {"speculative_config": {"method": "ngram", "prompt_lookup_min": 1, "adaptive": False}},
    "a draft model": {"speculative_config": {"model": "tiny-draft", "adaptive": False}},
}


def llm_of(backend: str, **options: Any) -> LLM:
    defaults = {"threads": 1, "block_size": 8, "num_kv_blocks": 128, "max_num_batched_tokens": 24}
    return LLM("tiny", backend=backend, **{**defaults, **options})


def token_ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(answer.token_ids) for output in outputs for answer in output.outputs]


@pytest.mark.parametrize("dtype", ["float16", "int8"])
@pytest.mark.parametrize("name", ENGINES)
def test_greedy_text_is_that_of_c(name: str, dtype: str) -> None:
    outputs = {
        backend: llm_of(backend, kv_cache_dtype=dtype, **ENGINES[name]).generate(PROMPTS, GREEDY)
        for backend in ("c", "cuda-on-cpu")
    }
    mine = outputs["cuda-on-cpu"]
    assert token_ids(mine) == token_ids(outputs["c"])
    assert any(output.metrics.num_preemptions for output in mine) == (name == "preemption")
    assert any(output.metrics.num_accepted_tokens for output in mine) == ("draft" in name)


def test_the_caches_lie_on_the_device_and_are_as_asked() -> None:
    cache = llm_of("cuda-on-cpu").engine.runner.kv_cache
    assert cache.dtype == "float16"  # the backend's own
    assert all(isinstance(layer, DeviceArray) for layer in (*cache.k, *cache.v))
    cache = llm_of("cuda-on-cpu", kv_cache_dtype="int8").engine.runner.kv_cache
    for layer in (*cache.k, *cache.v):
        assert isinstance(layer, QuantizedKV)
        assert isinstance(layer.q, DeviceArray)
        assert isinstance(layer.scale, DeviceArray)


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_prefix_cache_and_copy_on_write(dtype: str) -> None:
    """Four answers share the prompt's blocks, the last of which is not full: three of them copy it before they write.
    With blocks of one token nothing is copied, and the draws must be the same. Then prompts that begin so find those
    blocks, and get what they would get from an empty cache."""
    sampled = SamplingParams(n=4, temperature=1.0, seed=7, max_tokens=12, ignore_eos=True)
    prompts = [PROMPTS[-1], PROMPTS[-1] + " the eldest"]
    llm = llm_of("cuda-on-cpu", kv_cache_dtype=dtype)
    several = llm.generate(prompts[0], sampled)
    assert len(several[0].prompt_token_ids) % 8, "the last block of the prompt is full: nothing is copied"
    assert len(set(map(tuple, token_ids(several)))) == 4
    uncopied = llm_of("cuda-on-cpu", kv_cache_dtype=dtype, block_size=1, num_kv_blocks=1024)
    assert token_ids(several) == token_ids(uncopied.generate(prompts[0], sampled))
    found = llm.generate(prompts, GREEDY)
    assert all(output.metrics.num_cached_tokens >= 8 for output in found)
    for prompt, output in zip(prompts, found, strict=True):
        cold = llm_of("cuda-on-cpu", kv_cache_dtype=dtype, enable_prefix_caching=False)
        assert token_ids([output]) == token_ids(cold.generate(prompt, GREEDY))


def test_batched_and_alone_have_the_same_logprobs() -> None:
    """Bit for bit: the batch, its chunks, and the cut into parts do not reach a sequence's numbers."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
    llm = llm_of("cuda-on-cpu")
    together = llm.generate(PROMPTS, params)
    for prompt, output in zip(PROMPTS, together, strict=True):
        alone = llm_of("cuda-on-cpu", max_num_batched_tokens=512).generate(prompt, params)[0]
        assert alone.outputs[0].logprobs == output.outputs[0].logprobs


def test_a_model_whose_heads_the_kernels_do_not_take(tmp_path: Any) -> None:
    from tests.support.tiny_llama import tiny_llama

    path = tiny_llama(seed=0).write_gguf(tmp_path / "model.gguf", "F32")
    with pytest.raises(BackendError, match=r"computes heads of 32, 64, 128 values, and this model's have \d+: use"):
        LLM(path, backend="cuda-on-cpu")


def test_generate_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for backend in ("c", "cuda-on-cpu"):
        command = ["generate", "add 463+958=", "-m", "tiny", "--backend", backend, "--temperature", "0", "--json"]
        assert main(command) == 0
        texts.append(json.loads(capsys.readouterr().out)["outputs"][0]["text"])
    assert texts[0] == texts[1]


def test_cuda_without_a_driver_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever this machine has: a library that says what nvcc's says where there is no driver."""
    from types import SimpleNamespace

    from minserve.ops import cuda_device, cuda_library

    real = cuda_library.load("cuda-on-cpu")
    assert not isinstance(real, str)
    lib = SimpleNamespace(
        ms_cuda_open=lambda handle: real.lib.MS_CUDA_NO_DRIVER,
        ms_cuda_error_text=real.lib.ms_cuda_error_text,
        MS_CUDA_NO_DRIVER=real.lib.MS_CUDA_NO_DRIVER,
    )
    monkeypatch.setattr(cuda_device, "load", lambda name: cuda_library.CudaLibrary(lib, real.ffi))
    assert main(["generate", "Hi", "-m", "tiny", "--backend", "cuda"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "minserve: error: the backend cuda cannot run: this machine has no NVIDIA driver: "
        "use --backend cuda-on-cpu, which needs none, or c\n"
    )


def test_a_thread_that_still_computes_at_the_end_does_no_harm() -> None:
    """Its KV cache was freed under it: the process ended by a bad address."""
    program = """
import threading, time
from minserve import LLM, SamplingParams
llm = LLM("tiny", backend="cuda-on-cpu", threads=1, num_kv_blocks=2000)
params = SamplingParams(max_tokens=400, ignore_eos=True)
threading.Thread(target=lambda: [llm.generate("Once upon", params) for _ in range(99)], daemon=True).start()
time.sleep(0.5)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
