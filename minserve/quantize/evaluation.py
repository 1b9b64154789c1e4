"""How good a model or a backend is on a text: perplexity, and divergence from the float32 reference."""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from minserve.engine.sampler import check_logits, log_softmax
from minserve.engine.scheduled_batch import ScheduledSequence
from minserve.errors import ParameterError
from minserve.llm import LLM
from minserve.request import Request, Sequence
from minserve.sampling_params import SamplingParams

# progress(tokens done, tokens in all)
Progress = Callable[[int, int], None]
CHUNK = 128  # positions whose logits are held at once: 128 * 49,152 float32 values are 25 MB


@dataclass(frozen=True)
class PerplexityResult:
    """perplexity = exp(negative_log_likelihood / num_tokens); num_tokens are the predicted ones."""

    perplexity: float
    bits_per_byte: float
    negative_log_likelihood: float  # nats, summed over the text
    num_tokens: int
    num_bytes: int  # UTF-8 bytes of the text that those tokens spell
    seconds: float


@dataclass(frozen=True)
class KLResult:
    """KL(reference || model) of the next-token distributions, in nats, over the positions of a text."""

    mean: float
    standard_error: float
    median: float
    p99: float
    maximum: float
    top1_agreement: float  # share of positions at which both find the same token most probable
    num_tokens: int
    perplexity: float
    reference_perplexity: float
    seconds: float


def _windows(llm: LLM, text: str, max_tokens: int | None) -> list[list[int]]:
    """The text's tokens cut into windows that fit the context; each window starts afresh."""
    ids = llm.tokenizer.encode(text, add_bos=llm.tokenizer.add_bos)[:max_tokens]
    if len(ids) < 2:
        raise ParameterError(f"the text has {len(ids)} tokens; at least 2 are needed to predict one from another")
    size = llm.max_model_len
    if size < 2:
        raise ParameterError("max_model_len must be at least 2 to predict one token from another")
    windows = [ids[i : i + size] for i in range(0, len(ids), size)]
    return [w for w in windows if len(w) > 1]


def _logprobs(llm: LLM, ids: list[int]) -> Iterator[np.ndarray]:
    """Log probabilities of the next token after each of ids, in chunks: float64 (positions, V).

    Raises NonFiniteLogitsError if the model gives any that are not finite.
    """
    config = llm.engine_config
    blocks = -(-len(ids) // config.block_size)
    runner = llm.new_runner(num_kv_blocks=blocks)
    seq = Sequence(Request("evaluation", ids, SamplingParams()), 0, array("i", ids), array("i", range(blocks)))
    while seq.num_computed_tokens < len(ids):
        count = min(CHUNK, len(ids) - seq.num_computed_tokens)
        logits = runner.run([ScheduledSequence(seq, count, count)])  # (count, V)
        seq.num_computed_tokens += count
        check_logits(logits)
        yield log_softmax(logits)


def _scored(logprobs: np.ndarray, ids: list[int], start: int) -> np.ndarray:
    """Log probability of each token that follows position start, start + 1, ...; (rows that have a next token,)."""
    targets = np.asarray(ids[start + 1 : start + 1 + len(logprobs)])
    return logprobs[np.arange(len(targets)), targets]


def _exp(loss: float) -> float:
    """e to the power of a loss; infinity where that is larger than any float."""
    return math.exp(loss) if loss < 709 else math.inf


def perplexity(
    llm: LLM, text: str, *, max_tokens: int | None = None, progress: Progress | None = None
) -> PerplexityResult:
    """How surprised the model is by a text; every token but a window's first is predicted.

    A text longer than the context is cut into windows without overlap. progress(done, total) counts tokens.
    Raises ParameterError for a text of fewer than two tokens.
    """
    started = time.perf_counter()
    windows = _windows(llm, text, max_tokens)
    total, done, loss, num_tokens, num_bytes = sum(map(len, windows)), 0, 0.0, 0, 0
    for ids in windows:
        start = 0
        for logprobs in _logprobs(llm, ids):
            scored = _scored(logprobs, ids, start)
            loss -= float(scored.sum())
            num_tokens += len(scored)
            start += len(logprobs)
            done += len(logprobs)
            if progress is not None:
                progress(done, total)
        num_bytes += len(llm.tokenizer.decode_bytes(ids[1:]))
    return PerplexityResult(
        perplexity=_exp(loss / num_tokens),
        bits_per_byte=loss / math.log(2) / num_bytes,
        negative_log_likelihood=loss,
        num_tokens=num_tokens,
        num_bytes=num_bytes,
        seconds=time.perf_counter() - started,
    )


def kl_divergence(
    llm: LLM, reference: LLM, text: str, *, max_tokens: int | None = None, progress: Progress | None = None
) -> KLResult:
    """KL divergence of llm's next-token distribution from the reference's, at every position of a text.

    Both must be the same model: the reference on "numpy" computes with float32 weights, activations and KV,
    so that what is measured is what llm's backend adds. Raises ParameterError if their vocabularies differ in
    size or the text has fewer than two tokens.
    """
    if llm.config.vocab_size != reference.config.vocab_size:
        raise ParameterError("the two models have different vocabularies; compare one model on two backends")
    started = time.perf_counter()
    windows = _windows(llm, text, max_tokens)
    total = sum(map(len, windows))
    divergences: list[np.ndarray] = []
    agree, loss, reference_loss, num_predicted = 0, 0.0, 0.0, 0
    for ids in windows:
        start = 0
        for q, p in zip(_logprobs(llm, ids), _logprobs(reference, ids), strict=True):  # (positions, V) each
            divergences.append((np.exp(p) * (p - q)).sum(axis=-1))  # (positions,)
            agree += int((p.argmax(axis=-1) == q.argmax(axis=-1)).sum())
            scored = _scored(q, ids, start)
            loss -= float(scored.sum())
            reference_loss -= float(_scored(p, ids, start).sum())
            num_predicted += len(scored)
            start += len(q)
            if progress is not None:
                progress(sum(map(len, divergences)), total)
    kl = np.concatenate(divergences)  # (tokens,)
    return KLResult(
        mean=float(kl.mean()),
        standard_error=float(kl.std(ddof=1) / math.sqrt(kl.size)),
        median=float(np.median(kl)),
        p99=float(np.quantile(kl, 0.99)),
        maximum=float(kl.max()),
        top1_agreement=agree / kl.size,
        num_tokens=kl.size,
        perplexity=_exp(loss / num_predicted),
        reference_perplexity=_exp(reference_loss / num_predicted),
        seconds=time.perf_counter() - started,
    )
