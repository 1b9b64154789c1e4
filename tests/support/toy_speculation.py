"""Speculative sampling over 8 tokens, many thousand times: a target and a draft model that are tables, real verifying.

Everything that decides a token is the package's: the Verifier, its rule, the settings' definition in ops/sampling.py,
the keys of the random numbers. What is computed for one row is remembered for all rows like it.
"""

from __future__ import annotations

import copy
import itertools
from array import array
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from minserve import SamplingParams
from minserve.engine.sampler import SampledToken, Sampler
from minserve.engine.sampling_row import SamplingRow, settings_of
from minserve.engine.speculative import verifier
from minserve.engine.speculative.draft import Draft
from minserve.engine.speculative.ngram_proposer import NgramProposer
from minserve.engine.speculative.verifier import Verifier
from minserve.ops import reference
from minserve.ops.sampling import SamplingSettings

from .chi_square import Counts
from .fast_uniform import Uniform

V = 8
PROMPT = array("i", [5, 2, 6, 5])  # its last token stood before: prompt lookup guesses 2, 6
NUM_DRAFTS, NUM_TOKENS = 2, 2
_rng = np.random.default_rng(11)
TARGET = (_rng.standard_normal((V, V)) * 1.3).astype(np.float32)  # (last token, V) logits
DRAFT = (TARGET + _rng.standard_normal((V, V)) * 1.1).astype(np.float32)


class RememberingOps:
    """The operations of the reference that sampling needs, for requests that all have the same settings.

    `sample` draws from what `probabilities` gives, with the number that belongs to the row.
    """

    def __init__(self, uniform: Uniform) -> None:
        self._uniform = uniform
        self._known: dict[bytes, np.ndarray] = {}

    def probabilities(self, logits: np.ndarray, settings: SamplingSettings) -> tuple[np.ndarray, np.ndarray]:
        starts = settings.token_starts
        tokens = [settings.token_ids[begin:end] for begin, end in itertools.pairwise(starts)]
        keys = [row.tobytes() + history.tobytes() for row, history in zip(logits, tokens, strict=True)]
        new = {key: r for r, key in enumerate(keys) if key not in self._known}
        for key, r in new.items():
            distributions, status = reference.probabilities(logits[r : r + 1], _only(settings, r, tokens[r]))
            assert not status.any()
            self._known[key] = distributions[0]
        return np.stack([self._known[key] for key in keys]), np.zeros(len(keys), np.int32)

    def sample(self, logits: np.ndarray, settings: SamplingSettings) -> tuple[np.ndarray, np.ndarray]:
        distributions, status = self.probabilities(logits, settings)
        numbers = np.array([self._uniform(*key) for key in settings.draw_keys.tolist()])
        return _drawn(distributions, numbers).astype(np.int32), status


def _only(settings: SamplingSettings, r: int, tokens: np.ndarray) -> SamplingSettings:
    """The settings of one row; all rows have the same bias."""
    one = slice(r, r + 1)
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    count = int(settings.bias_starts[1])
    return SamplingSettings(
        **{name: getattr(settings, name)[one] for name in names},
        draw_keys=settings.draw_keys[one],
        token_ids=tokens,
        token_starts=np.array([0, tokens.size], np.int32),
        num_prompt_tokens=settings.num_prompt_tokens[one],
        bias_ids=settings.bias_ids[:count],
        biases=settings.biases[:count],
        bias_starts=np.array([0, count], np.int32),
        ruled_out_ids=settings.ruled_out_ids[:0],
        ruled_out_starts=np.zeros(2, np.int32),
        masked=settings.masked[one],
    )


class Table:
    """A model that is a table of logits (last token, V), under one request's settings, by the definition alone."""

    def __init__(self, logits: np.ndarray, params: SamplingParams) -> None:
        self._logits, self._params = logits, params
        self._known: dict[bytes, np.ndarray] = {}

    def distributions(self, histories: Sequence[array[int]]) -> np.ndarray:
        """What it draws from after each of R histories, float64 (R, V)."""
        keys = [history.tobytes() for history in histories]
        for key, history in dict(zip(keys, histories, strict=True)).items():
            if key not in self._known:
                row = SamplingRow(self._params, 0, 0, history[:], len(PROMPT))
                self._known[key] = reference.probabilities(self._logits[history[-1]][None], settings_of([row]))[0][0]
        return np.stack([self._known[key] for key in keys])


def _drawn(distributions: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Where distributions float64 (R, V) reach random numbers (R,): int64 (R,)."""
    return (distributions.cumsum(axis=1) <= numbers[:, None]).sum(axis=1).clip(max=V - 1)


class Toy:
    """Answers of requests that differ in nothing but their seeds: 0, 1, 2, ...

    method: "draft model" or "ngram". make_verifier: from a Sampler. told: the settings under which the draft model
    tells its q (None: those under which it guesses, as it must be).
    """

    def __init__(
        self,
        params: SamplingParams,
        method: str,
        num_sequences: int,
        make_verifier: Callable[[Sampler], Verifier] = Verifier,
        told: SamplingParams | None = None,
    ) -> None:
        self.uniform = Uniform(num_sequences)
        self.template = SamplingRow(params, 0, 0, PROMPT, len(PROMPT))
        self._truth, self._drafting = Table(TARGET, params), Table(DRAFT, params)
        self._telling = None if told is None else Table(DRAFT, told)
        self._ngram = NgramProposer(3) if method == "ngram" else None
        self._verifier = make_verifier(Sampler(RememberingOps(self.uniform)))  # type: ignore[arg-type]
        self.answers, self.first_verdicts = self._run(num_sequences)

    def _row(self, seed: int) -> SamplingRow:
        row = copy.copy(self.template)
        row.seed, row.token_ids = seed, PROMPT[:]
        return row

    def _run(self, count: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """Step all until each has NUM_TOKENS tokens; their answers, and what the first step gave."""
        rows = [self._row(seed) for seed in range(count)]
        first: list[tuple[int, ...]] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(verifier, "uniform", self.uniform)
            while growing := [row for row in rows if row.num_output_tokens < NUM_TOKENS]:
                verdicts = self._step(growing)
                first = first or [tuple(token_ids) for token_ids in verdicts]
                for row, token_ids in zip(growing, verdicts, strict=True):
                    row.token_ids.extend(token_ids)
        return [tuple(row.token_ids[len(PROMPT) :][:NUM_TOKENS]) for row in rows], first

    def _step(self, rows: Sequence[SamplingRow]) -> list[list[int]]:
        drafts = self._drafts(rows)
        lasts = [i for row, draft in zip(rows, drafts, strict=True) for i in (row.token_ids[-1], *_ids(draft))]
        verdicts = self._verifier.verify(TARGET[lasts], rows, drafts)
        return [[token.token_id for token in verdict if isinstance(token, SampledToken)] for verdict in verdicts]

    def _drafts(self, rows: Sequence[SamplingRow]) -> list[Draft | None]:
        if self._ngram is not None:
            answers: list[Any] = [SimpleNamespace(seq=row) for row in rows]
            return self._ngram.propose(answers, [NUM_DRAFTS] * len(rows))
        histories = [row.token_ids[:] for row in rows]
        probs: list[np.ndarray] = []
        for _ in range(NUM_DRAFTS):
            q = self._drafting.distributions(histories)  # (R, V)
            numbers = [self.uniform(row.seed, 0, len(h)) for row, h in zip(rows, histories, strict=True)]
            for history, token_id in zip(histories, _drawn(q, np.array(numbers)).tolist(), strict=True):
                history.append(token_id)
            probs.append(q if self._telling is None else self._telling.distributions([h[:-1] for h in histories]))
        together = np.stack(probs, axis=1)  # (R, k, V)
        return [Draft(h[-NUM_DRAFTS:], q) for h, q in zip(histories, together, strict=True)]

    def exact(self, output: Any) -> np.ndarray:
        """The target's distribution after these tokens of an answer, float64 (V,)."""
        return self._truth.distributions([PROMPT + array("i", output)])[0]

    def exact_pair(self, _: Any) -> np.ndarray:
        """The target's distribution of an answer's first two tokens, float64 (V * V,)."""
        return np.concatenate([p * self.exact((i,)) if p else np.zeros(V) for i, p in enumerate(self.exact(()))])

    def p_values(self) -> dict[str, float]:
        """Of every look at the answers: by place in the answer, by pair, and by row of the first step's verdict."""
        looks = {f"token {i}": (Counts(), self.exact) for i in range(NUM_TOKENS)}
        looks |= {f"row {i}, if reached": (Counts(), self.exact) for i in range(NUM_DRAFTS + 1)}
        looks["tokens 0 and 1"] = Counts(), self.exact_pair
        for answer, verdict in zip(self.answers, self.first_verdicts, strict=True):
            for i, token_id in enumerate(answer):
                looks[f"token {i}"][0].add(answer[:i], token_id)
            for i, token_id in enumerate(verdict):
                looks[f"row {i}, if reached"][0].add(verdict[:i], token_id)
            looks["tokens 0 and 1"][0].add((), answer[0] * V + answer[1])
        return {name: counts.p_value(exact) for name, (counts, exact) in looks.items()}


def _ids(draft: Draft | None) -> array[int] | tuple[int, ...]:
    return () if draft is None else draft.token_ids
