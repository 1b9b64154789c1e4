"""SamplingRow: what the sampler has to know of one answer; and the settings of a batch of them as arrays."""

from __future__ import annotations

import copy
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from minserve.ops.sampling import SamplingSettings
from minserve.sampling_params import SamplingParams


@dataclass(eq=False)
class SamplingRow:
    """One answer's standing facts: made once an answer, and used for each of its tokens.

    token_ids: the sequence's own, prompt and output so far; it grows, and nothing here is told.
    end_ids: the tokens that would end the answer; ruled out while it is shorter than min_tokens.
    """

    params: SamplingParams
    seed: int
    index: int  # which of the request's n answers
    token_ids: array[int]
    num_prompt_tokens: int
    end_ids: frozenset[int] = frozenset()

    # What of it does not change, in the form in which a batch needs it.
    numbers: tuple[float, ...] = field(init=False, repr=False)
    penalised: bool = field(init=False, repr=False)
    plain_greedy: bool = field(init=False, repr=False)  # the most probable token, and nothing more is asked for
    bias_ids: array[int] = field(init=False, repr=False)  # (B,)
    biases: np.ndarray = field(init=False, repr=False)  # float64 (B,)
    ids_to_rule_out: array[int] = field(init=False, repr=False)  # end_ids, if there is a min_tokens
    largest_id: int = field(init=False, repr=False)  # of the two lists above; -1: none

    def __post_init__(self) -> None:
        p = self.params
        top_k = min(p.top_k, 2**31 - 1)
        self.numbers = (
            p.temperature,
            top_k,
            p.top_p,
            p.min_p,
            p.repetition_penalty,
            p.presence_penalty,
            p.frequency_penalty,
        )
        self.penalised = bool(p.repetition_penalty != 1.0 or p.presence_penalty or p.frequency_penalty)
        bias = p.logit_bias or {}
        self.bias_ids = array("i", list(bias))
        self.biases = np.array(list(bias.values()), np.float64)
        self.ids_to_rule_out = array("i", sorted(self.end_ids) if p.min_tokens else [])
        self.largest_id = max([*bias, *self.ids_to_rule_out], default=-1)
        self.plain_greedy = p.temperature == 0 and not (
            self.penalised or bias or p.min_tokens or p.logits_processors or p.logprobs is not None
        )

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the answer so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    def after(self, more: array[int]) -> SamplingRow:
        """This row as it will be if its answer goes on with these tokens."""
        if not more or self.plain_greedy:  # which looks at nothing
            return self
        row = copy.copy(self)
        row.token_ids = self.token_ids + more
        return row


def settings_of(rows: Sequence[SamplingRow]) -> SamplingSettings:
    """The settings of R rows, as of now. Only histories that a penalty looks at are copied."""
    columns = np.array([row.numbers for row in rows], np.float64).reshape(-1, 7).T  # (7, R)
    temperature, top_k, top_p, min_p, repetition, presence, frequency = np.ascontiguousarray(columns)
    keys = [(row.seed & (2**64 - 1), row.index, len(row.token_ids)) for row in rows]
    token_ids, token_starts = _end_to_end([row.token_ids if row.penalised else b"" for row in rows])
    bias_ids, bias_starts = _end_to_end([row.bias_ids for row in rows])
    too_short = [row.params.min_tokens > row.num_output_tokens for row in rows]
    ruled_out = [row.ids_to_rule_out if short else b"" for row, short in zip(rows, too_short, strict=True)]
    ruled_out_ids, ruled_out_starts = _end_to_end(ruled_out)
    return SamplingSettings(
        temperature=temperature,
        top_k=top_k.astype(np.int32),
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        draw_keys=np.array(keys, np.uint64).reshape(-1, 3),
        token_ids=token_ids,
        token_starts=token_starts,
        num_prompt_tokens=np.array([row.num_prompt_tokens for row in rows], np.int32),
        bias_ids=bias_ids,
        biases=np.concatenate([row.biases for row in rows] or [np.zeros(0)]),
        bias_starts=bias_starts,
        ruled_out_ids=ruled_out_ids,
        ruled_out_starts=ruled_out_starts,
        masked=np.array([bool(row.params.logits_processors) for row in rows], np.uint8),
    )


def _end_to_end(pieces: Sequence[array[int] | bytes]) -> tuple[np.ndarray, np.ndarray]:
    """R arrays of C ints (b"": none) as one, int32 (N,), and where each begins, int32 (R + 1,)."""
    starts = np.zeros(len(pieces) + 1, np.int32)
    np.cumsum([len(piece) for piece in pieces], out=starts[1:])
    return np.frombuffer(b"".join(pieces), np.int32), starts
