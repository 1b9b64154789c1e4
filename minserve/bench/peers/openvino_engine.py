"""OpenVINO GenAI: its continuous batching pipeline over paged attention, given the GGUF file itself.

Run by child.py, perhaps in an interpreter without minserve. The settings:

- ContinuousBatchingPipeline: add_request and step are its low level, one token a sequence and step, so prefill is timed
  apart from decode. (Measured beside it, its other path, LLMPipeline with ATTENTION_BACKEND=SDPA, takes twice as long.)
- enable_prefix_caching off, so that no cache answers.
- INFERENCE_NUM_THREADS threads; hint LATENCY with one stream: all threads work on the one batch.
- max_num_batched_tokens as large as the prompts together may be, so that they are one pass, as elsewhere; its default
  of 256 cuts a prompt of 512 in two, which is no faster. num_kv_blocks fixed: a cache that grows is copied meanwhile.
- What it does by default on a CPU, and does best: 4-bit weights from the file, activations quantized to int8 as it
  goes (DYNAMIC_QUANTIZATION_GROUP_SIZE 32), keys and values in 8 bits.
- Requests are token ids, and nothing is read from a handle before the clock stops: no text is made.
"""

from __future__ import annotations

import importlib
import itertools
from typing import Any

import numpy as np

_BLOCK_SIZE = 32  # tokens in a KV block, on a CPU


def open_engine(options: dict[str, Any]) -> OpenVINOEngine:
    """options: model (a GGUF file), threads, shapes: (sequences, prompt tokens, tokens at the end) of each work."""
    return OpenVINOEngine(**options)


class OpenVINOEngine:
    """One pipeline, whose requests all come at once."""

    def __init__(self, model: str, threads: int, shapes: list[tuple[int, int, int]]) -> None:
        self._genai: Any = importlib.import_module("openvino_genai")
        self._openvino: Any = importlib.import_module("openvino")
        scheduler = self._genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.max_num_batched_tokens = max(seqs * prompt_len for seqs, prompt_len, _ in shapes)
        scheduler.max_num_seqs = max(seqs for seqs, _, _ in shapes)
        scheduler.num_kv_blocks = max(seqs * (-(-seq_len // _BLOCK_SIZE) + 1) for seqs, _, seq_len in shapes)
        properties = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": 1}
        self._pipeline = self._genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self._ids = itertools.count()
        self.about = {
            "version": f"openvino-genai {self._genai.__version__.split('-')[0]}",
            "weights": "as the file's",
            "settings": "one stream, no prefix cache, its own choice of types for activations and KV",
        }

    def prepare(self, prompts: list[list[int]], num_steps: int) -> None:
        """Make the requests' parts."""
        self._inputs = [self._openvino.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
        config = self._genai.GenerationConfig()
        config.max_new_tokens = num_steps + 1
        config.ignore_eos = True
        config.do_sample = False
        config.apply_chat_template = False
        self._config = config

    def start(self) -> None:
        """Add the requests, and step until each has its first token."""
        self._handles = [self._pipeline.add_request(next(self._ids), ids, self._config) for ids in self._inputs]
        self.step()
        while not all(handle.can_read() for handle in self._handles):
            self.step()

    def step(self) -> None:
        """One step of the pipeline."""
        self._pipeline.step()

    def finish(self) -> list[list[int]]:
        """The chosen tokens; requests that are still there are ended."""
        answers = []
        for handle in self._handles:
            outputs = handle.read_all() if handle.can_read() else []
            answers.append([int(token) for output in outputs for token in output.generated_ids])
            handle.cancel()
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        return answers
