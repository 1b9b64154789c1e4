"""llama.cpp through the low-level functions of llama-cpp-python, as its own llama-batched-bench uses them.

Run by child.py, perhaps in an interpreter without minserve. The settings are the fastest that leave its results as
they are, and each is one that its own tools offer:

- flash attention on; on a CPU it is off by default.
- keys and values in float16, its default.
- n_threads (one token a sequence) and n_threads_batch (prompts) are the same number.
- kv_unified off: each sequence has a cache of its own, and attention does not look at the other sequences' cells.
- n_batch as large as the prompts together, n_ubatch its default of 512: a prompt of 512 is one pass.
- use_extra_bufts, its default: weights of the types that have a repacked kernel (Q4_0 is one) are repacked at load.
- logits only for the last token of each prompt, and for each token of a step.
"""

from __future__ import annotations

import ctypes
import importlib
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

_CELLS = 256  # llama.cpp rounds a sequence's context up to a multiple of this
_UBATCH = 512


def open_engine(options: dict[str, Any]) -> LlamaCppEngine:
    """options: model (a GGUF file), threads, requantize (the name of a file type such as "Q4_0", or None)."""
    return LlamaCppEngine(**options)


class LlamaCppEngine:
    """One model, and a context for each shape of work."""

    def __init__(self, model: str, threads: int, requantize: str | None = None) -> None:
        llama: Any = importlib.import_module("llama_cpp")
        llama.llama_backend_init()
        self._llama, self._threads = llama, threads
        params = llama.llama_model_default_params()
        params.n_gpu_layers = 0
        if requantize is None:
            self._model = llama.llama_model_load_from_file(model.encode(), params)
        else:
            path = str(Path(tempfile.mkdtemp()) / "requantized.gguf")  # the parent removes what is left there
            _quantize(llama, model, path, requantize, threads)
            self._model = llama.llama_model_load_from_file(path.encode(), params)
        if not self._model:
            raise RuntimeError("llama.cpp could not load the model")
        self._vocab_size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
        self._contexts: dict[tuple[int, int, int], Any] = {}
        description = ctypes.create_string_buffer(128)
        llama.llama_model_desc(self._model, description, len(description))
        file_type = description.value.decode("utf-8", "replace").split(maxsplit=2)[-1]  # of "llama 256M Q4_0"
        self.about = {
            "version": f"llama-cpp-python {llama.__version__}",
            "weights": f"{file_type}, {llama.llama_model_size(self._model) / 1e6:.1f} MB",
            "settings": "flash attention, KV float16",
        }

    def prepare(self, prompts: list[list[int]], num_steps: int) -> None:
        """Take an empty context of the right size, and lay out two batches: the prompts, and a step."""
        llama = self._llama
        num_tokens, longest = sum(map(len, prompts)), max(map(len, prompts)) + num_steps + 1
        self._context = self._context_for(len(prompts), -(-longest // _CELLS) * _CELLS, num_tokens)
        llama.llama_memory_clear(llama.llama_get_memory(self._context), False)
        self._tokens: list[list[int]] = [[] for _ in prompts]
        self._positions = np.array([len(prompt) for prompt in prompts], np.int32)  # (B,) of the next token
        self._prompts = _Batch(llama, [(seq, at) for seq, prompt in enumerate(prompts) for at in range(len(prompt))])
        self._prompts.tokens[:] = [token for prompt in prompts for token in prompt]
        self._prompts.wants_logits[np.cumsum(self._positions) - 1] = 1
        self._step = _Batch(llama, [(seq, len(prompt)) for seq, prompt in enumerate(prompts)])
        self._step.wants_logits[:] = 1

    def start(self) -> None:
        """Run the prompts; logits for the last token of each."""
        self._decode(self._prompts)

    def step(self) -> None:
        """Run the last chosen token of each sequence."""
        self._step.tokens[:] = self._chosen
        self._step.positions[:] = self._positions
        self._positions += 1
        self._decode(self._step)

    def finish(self) -> list[list[int]]:
        """The chosen tokens."""
        self._prompts.free()
        self._step.free()
        return self._tokens

    def _decode(self, batch: _Batch) -> None:
        llama = self._llama
        if (code := llama.llama_decode(self._context, batch.struct)) != 0:
            raise RuntimeError(f"llama_decode returned {code}")
        rows = (len(self._tokens), self._vocab_size)
        logits = np.ctypeslib.as_array(llama.llama_get_logits(self._context), rows)  # (B, V), float32
        self._chosen = logits.argmax(axis=1)  # (B,)
        for tokens, token in zip(self._tokens, self._chosen.tolist(), strict=True):
            tokens.append(token)

    def _context_for(self, num_seqs: int, seq_len: int, num_tokens: int) -> Any:
        """A context for num_seqs sequences of seq_len, prompts of num_tokens together; kept, so that it is warm."""
        key = num_seqs, seq_len, num_tokens
        if key not in self._contexts:
            llama = self._llama
            params = llama.llama_context_default_params()
            params.n_ctx = num_seqs * seq_len
            params.n_batch = max(num_tokens, _UBATCH)
            params.n_ubatch = _UBATCH
            params.n_seq_max = num_seqs
            params.n_threads = params.n_threads_batch = self._threads
            params.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_ENABLED
            params.kv_unified = False
            params.no_perf = True
            context = llama.llama_init_from_model(self._model, params)
            if not context:
                raise RuntimeError(f"llama.cpp could not make a context for {num_seqs} x {seq_len} tokens")
            self._contexts[key] = context
        return self._contexts[key]


class _Batch:
    """A llama_batch of a token for each (sequence, position) of `places`, and its arrays as NumPy sees them.

    tokens, positions int32 and wants_logits int8, (T,) each: filled in Python loops, they would count as decoding.
    """

    def __init__(self, llama: Any, places: list[tuple[int, int]]) -> None:
        self._llama = llama
        self.struct = llama.llama_batch_init(len(places), 0, 1)
        self.struct.n_tokens = len(places)
        self.tokens, self.positions, self.wants_logits, seqs_per_token = (
            np.ctypeslib.as_array(array, (len(places),))
            for array in (self.struct.token, self.struct.pos, self.struct.logits, self.struct.n_seq_id)
        )
        for i, (seq, position) in enumerate(places):
            self.positions[i] = position
            self.struct.seq_id[i][0] = seq
        seqs_per_token[:] = 1
        self.wants_logits[:] = 0

    def free(self) -> None:
        """Give the memory back; the arrays must not be used any more."""
        self._llama.llama_batch_free(self.struct)


def _quantize(llama: Any, source: str, target: str, file_type: str, threads: int) -> None:
    """Write the model again with its matrices as file_type, with what llama-quantize does by default otherwise."""
    params = llama.llama_model_quantize_default_params()
    params.nthread = threads
    params.ftype = getattr(llama, f"LLAMA_FTYPE_MOSTLY_{file_type}")
    params.allow_requantize = True
    if (code := llama.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params))) != 0:
        raise RuntimeError(f"llama_model_quantize to {file_type} returned {code}")
