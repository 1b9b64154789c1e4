"""SamplingParams: how one request wants its tokens chosen, with the names vLLM uses."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from minserve.errors import ParameterError, check_whole_number, shown

if TYPE_CHECKING:  # --help and `minserve doctor` need no NumPy
    import numpy as np

# The answer's tokens so far and the logits float32 (V,), which it may change -> the logits (V,) to go on with.
LogitsProcessor = Callable[[list[int], "np.ndarray"], "np.ndarray"]

MOST_ANSWERS = 16_384  # to one request; each takes memory before the first token is computed


def _number(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    """Raise ParameterError unless value is a finite number in [low, high] (or (low, high])."""
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    if good and isinstance(value, (int, float)):  # NaN fails both comparisons, infinity the second
        good = (low < value if open_low else low <= value) and value <= high
    if not good:
        left = "(" if open_low else "["
        raise ParameterError(f"{name} must be a number in {left}{low:g}, {high:g}], not {shown(value)}")


def _list(name: str, value: object) -> tuple[Any, ...]:
    """The items of a list, tuple or set (None: none). Raises ParameterError for anything else."""
    if value is None:
        return ()
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Collection):
        raise ParameterError(f"{name} must be a list, not {shown(value)}")
    return tuple(value)


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens, when to stop, and what to report.

    temperature: 0 takes the most probable token; above 0 divides the logits.
    top_k: keep the k most probable tokens (0 or -1: all).
    top_p: keep the smallest set of tokens whose probabilities reach top_p (the nucleus,
        arXiv 1904.09751); the token that crosses the threshold is kept.
    min_p: drop tokens less probable than min_p times the most probable one.
    repetition_penalty: divide positive and multiply negative logits of tokens seen in prompt
        or output (arXiv 1909.05858, section 4.1); 1 is off.
    presence_penalty, frequency_penalty: subtract once, or once an occurrence, from logits of
        tokens in the output so far.
    logit_bias: token id -> number in [-100, 100], added to that token's logit.
    seed: makes a request repeatable whatever else runs beside it.
    stop: string or strings that end the text; stop_token_ids: ids that end it. What ended the text is
        not part of it unless include_stop_str_in_output. ignore_eos: do not end at the model's own end token.
    max_tokens: None means up to the context's end. min_tokens: nothing ends the text before that many.
    logprobs: report the chosen token's log probability and this many of the most probable
        (of the model's own distribution, before any of the settings above). prompt_logprobs: the
        same for each prompt token.
    detokenize: False makes no text, only token ids; stop strings need text.
    logits_processors: functions that are called in turn, before all of the settings above, with the answer's
        token ids so far and a copy of the logits float32 (V,); each returns the logits (V,) to go on with, where
        -infinity rules a token out. One that raises, or returns anything else, ends its own request.
    n: number of answers, up to 16,384.

    Raises ParameterError for a value out of range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    logits_processors: Sequence[LogitsProcessor] | None = None

    # The stop strings as a tuple, whatever form they came in.
    stop_strings: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_whole_number("n", self.n, 1, MOST_ANSWERS)
        _number("temperature", self.temperature, 0.0, 1e6)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        check_whole_number("top_k", self.top_k, -1)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            check_whole_number("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            check_whole_number("max_tokens", self.max_tokens, 1)
        check_whole_number("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            least, most = shown(self.min_tokens), shown(self.max_tokens)
            raise ParameterError(f"min_tokens ({least}) is above max_tokens ({most})")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_whole_number(name, getattr(self, name), 0)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                raise ParameterError(f"{name} must be True or False, not {shown(getattr(self, name))}")
        stop = (self.stop,) if isinstance(self.stop, str) else _list("stop", self.stop)
        if not all(isinstance(s, str) and s for s in stop):
            raise ParameterError(f"stop must be a non-empty string or a list of them, not {shown(self.stop)}")
        if stop and not self.detokenize:
            raise ParameterError("stop needs the text that detokenize=False does not make: use stop_token_ids")
        object.__setattr__(self, "stop_strings", stop)
        for processor in _list("logits_processors", self.logits_processors):
            if not callable(processor):
                raise ParameterError(f"logits_processors must be a list of functions; {shown(processor)} is none")
        for token_id in _list("stop_token_ids", self.stop_token_ids):
            check_whole_number("a stop_token_id", token_id, 0)
        if not isinstance(self.logit_bias, (Mapping, type(None))):
            raise ParameterError(f"logit_bias must map token ids to numbers, not {shown(self.logit_bias)}")
        for token_id, bias in (self.logit_bias or {}).items():
            check_whole_number("a logit_bias key", token_id, 0)
            _number(f"logit_bias of token {token_id}", bias, -100.0, 100.0)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ParameterError if a token id in here does not exist in a vocabulary of this size."""
        for name, ids in (("stop_token_ids", self.stop_token_ids or ()), ("logit_bias", self.logit_bias or ())):
            for token_id in ids:
                if token_id >= vocab_size:
                    given = shown(token_id)
                    raise ParameterError(f"{name}: token {given} is outside the vocabulary (0 to {vocab_size - 1})")
