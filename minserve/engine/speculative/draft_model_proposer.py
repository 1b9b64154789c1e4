"""DraftModelProposer: a smaller model guesses, with KV blocks of its own that follow the target's."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minserve.engine.answer import Answer
from minserve.engine.interfaces import Runner
from minserve.engine.run_isolated import rows_isolated
from minserve.engine.sampler import Result, SampledToken, Sampler
from minserve.engine.sampling_row import SamplingRow
from minserve.engine.scheduled_batch import ScheduledSequence
from minserve.engine.speculative.acceptance import draw
from minserve.engine.speculative.draft import Draft, Proposer, is_optional
from minserve.errors import ParameterError
from minserve.events import EventStream
from minserve.kv.block_manager import BlockManager
from minserve.ops.sampling import uniform
from minserve.request import Sequence


@dataclass(eq=False, slots=True)
class _Shadow:
    """What the draft model has of one of the target's sequences.

        target:  [ known                       ]
        shadow:  [ known, as of the last step  ][ guesses of the last step ]

    seq: a sequence of the draft model's own. row: the answer's, over the shadow's tokens.
    goal: tokens that are to be computed now. wanted: guesses that are still wanted; each moves the goal.
    stuck: there were no blocks for it. limit: tokens that the draft model can follow.
    """

    seq: Sequence
    row: SamplingRow
    limit: int
    num_guesses: int = 0
    probs: list[np.ndarray] = field(default_factory=list)  # of the guesses: q, float64 (V,) each; none if greedy
    goal: int = 0
    wanted: int = 0
    stuck: bool = False


class DraftModelProposer(Proposer):
    """Runs the draft model k times a step for all sequences together.

    runner: the draft model over a KV cache of num_blocks blocks. vocab_size: the target's; ids that only the draft
    model has (padding of its embedding) are never proposed. max_model_len: the draft model's context; beyond it there
    are no drafts. max_num_batched_tokens: most tokens of a run.
    """

    def __init__(
        self,
        runner: Runner,
        sampler: Sampler,
        *,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        enable_prefix_caching: bool,
        own_vocab_size: int | None = None,
    ) -> None:
        self.runner = runner
        self._sampler = sampler
        self._vocab_size, self._max_model_len = vocab_size, max_model_len
        self._own_vocab_size = vocab_size if own_vocab_size is None else own_vocab_size
        self._budget = max_num_batched_tokens
        # Their comings and goings are no events of the engine's, whose blocks are of another pool.
        self.blocks = BlockManager(
            num_blocks, block_size, enable_prefix_caching=enable_prefix_caching, events=EventStream()
        )
        self._shadows: dict[Sequence, _Shadow] = {}

    def reset(self) -> None:
        """Forget every sequence; all blocks are free."""
        self._shadows.clear()
        self.blocks.clear()

    def propose(self, answers: Seq[Answer], most: Seq[int], /) -> list[Draft | None]:
        """Up to most[i] tokens for each, drawn under the request's own settings. Raises what the runner raises.

        Every shadow first catches up with its sequence, also where nothing is wanted of it yet: so a long prompt
        is read in the pieces in which the target reads it, and not at once when its answer begins.
        """
        self._leave({answer.seq for answer in answers})
        shadows = [self._follow(answer, count) for answer, count in zip(answers, most, strict=True)]
        self._advance(shadows)
        drafts = [_draft(shadow) for shadow in shadows]
        for i, shadow in enumerate(shadows):
            if shadow.stuck and not is_optional(shadow.row):
                drafts[i] = self._alone(shadow)
        return drafts

    def rest(self) -> None:
        """Free every sequence's blocks; what is cached stays."""
        self._leave(set())

    def _alone(self, shadow: _Shadow) -> Draft | None:
        """The pool does not hold all shadows at once: the others give up their blocks, and compute again another time.

        Slow, but what is guessed for a seeded request must not depend on its neighbours.
        """
        for other in self._shadows.values():
            if other is not shadow:
                self.blocks.free(other.seq)
        shadow.stuck = False
        self._advance([shadow])
        return _draft(shadow)

    def _advance(self, shadows: Seq[_Shadow]) -> None:
        """Compute and guess until each of them is where it is wanted, or stuck."""
        while batch := self._next_batch(shadows):
            logits = self.runner.run([item for _, item in batch])  # (guesses of this run, V)
            for shadow, item in batch:
                shadow.seq.num_computed_tokens += item.num_tokens
            guessing = [shadow for shadow, item in batch if item.num_logits]
            if guessing:
                self._guess(guessing, logits)

    def _leave(self, running: set[Sequence]) -> None:
        """Free what belongs to sequences that do not run any more."""
        for seq in [seq for seq in self._shadows if seq not in running]:
            self.blocks.free(self._shadows.pop(seq).seq)

    def _follow(self, answer: Answer, most: int) -> _Shadow:
        """The answer's shadow, brought into step: it has the answer's tokens, and wrong guesses are rewound."""
        shadow = self._shadows.get(answer.seq)
        if shadow is None:
            shadow = self._shadows[answer.seq] = self._start(answer)
        target, own = answer.seq.token_ids, shadow.seq.token_ids
        same = len(own) - shadow.num_guesses
        while same < min(len(own), len(target)) and own[same] == target[same]:
            same += 1
        shadow.limit = min(shadow.limit, self._limit(target[same:]))
        own[same:] = target[same:]
        shadow.seq.num_computed_tokens = min(shadow.seq.num_computed_tokens, same)
        self.blocks.rewind(shadow.seq, shadow.seq.num_computed_tokens)
        self.blocks.commit(shadow.seq)  # now, while no guess is among what is computed
        shadow.num_guesses, shadow.probs, shadow.stuck = 0, [], False
        shadow.wanted = max(0, min(most, shadow.limit - len(own)))
        known = answer.seq.num_computed_tokens
        shadow.goal = len(own) if shadow.wanted else min(known, shadow.limit)
        return shadow

    def _limit(self, token_ids: array[int]) -> int:
        """How far the draft model can follow a sequence that has these tokens: nowhere, if it lacks one of them."""
        return self._max_model_len if max(token_ids, default=0) < self._own_vocab_size else 0

    def _start(self, answer: Answer) -> _Shadow:
        target = answer.seq
        seq = Sequence(
            target.request, target.index, target.token_ids[:], order=target.order, cache_root=target.cache_root
        )
        sibling = self._sibling(answer)
        if sibling is None:
            self.blocks.start(seq, self.blocks.find_prefix(seq))
        else:
            self.blocks.fork(sibling.seq, seq)
        row = answer.row
        own_row = SamplingRow(
            dataclasses.replace(row.params, logprobs=None),
            row.seed,
            row.index,
            seq.token_ids,
            row.num_prompt_tokens,
            row.end_ids,
        )
        return _Shadow(seq, own_row, self._limit(seq.token_ids))

    def _sibling(self, answer: Answer) -> _Shadow | None:
        """A shadow of the same request that has its prompt and no more: n answers read their prompt once."""
        prompt = answer.seq.num_prompt_tokens
        if answer.seq.num_computed_tokens < prompt:
            return None
        for shadow in self._shadows.values():
            if shadow.seq.request is answer.seq.request and shadow.seq.num_computed_tokens <= prompt:
                goal, wanted, shadow.goal, shadow.wanted = shadow.goal, shadow.wanted, prompt, 0
                self._advance([shadow])
                shadow.goal, shadow.wanted, shadow.stuck = goal, wanted, False
                return shadow if shadow.seq.num_computed_tokens == prompt else None
        return None

    def _next_batch(self, shadows: Seq[_Shadow]) -> list[tuple[_Shadow, ScheduledSequence]]:
        """What the next run computes: of each shadow all that it lacks, under the budget, while there are blocks."""
        batch: list[tuple[_Shadow, ScheduledSequence]] = []
        budget = self._budget
        for shadow in shadows:
            seq = shadow.seq
            missing = shadow.goal - seq.num_computed_tokens
            count = min(missing, budget)
            if count <= 0 or shadow.stuck:
                continue
            copies = self.blocks.allocate(seq, count)
            if copies is None:
                shadow.stuck = True
                continue
            num_logits = int(count == missing and shadow.wanted > 0)
            batch.append((shadow, ScheduledSequence(seq, count, num_logits, copies)))
            budget -= count
        return batch

    def _guess(self, shadows: Seq[_Shadow], logits: np.ndarray) -> None:
        """One token more for each. logits (shadows, V of the draft model)."""
        if logits.shape[1] > self._vocab_size:
            logits = np.ascontiguousarray(logits[:, : self._vocab_size])
        greedy = [i for i, shadow in enumerate(shadows) if shadow.row.params.temperature == 0]
        drawn = [i for i, shadow in enumerate(shadows) if shadow.row.params.temperature != 0]
        self._guess_by(self._sampler.sample, shadows, greedy, logits)
        self._guess_by(self._sampler.probabilities, shadows, drawn, logits)

    def _guess_by(
        self,
        compute: Callable[[np.ndarray, Seq[SamplingRow]], Seq[Result | Exception]],
        shadows: Seq[_Shadow],
        places: Seq[int],
        logits: np.ndarray,
    ) -> None:
        if not places:
            return
        used = logits if len(places) == len(shadows) else logits[places]  # (places, V)
        results: Seq[Any] = rows_isolated(compute, used, [shadows[i].row for i in places])
        for i, result in zip(places, results, strict=True):
            _take(shadows[i], result, self._vocab_size)


def _take(shadow: _Shadow, result: SampledToken | np.ndarray | Exception, vocab_size: int) -> None:
    """Add a guess: the token itself, or one drawn from a distribution float64 (V,)."""
    if isinstance(result, Exception):
        if not isinstance(result, ParameterError):  # the draft model or its backend is broken
            raise result
        shadow.wanted = 0  # the request's settings suit the target and not the draft model
        return
    if isinstance(result, np.ndarray):
        q = result if len(result) == vocab_size else np.pad(result, (0, vocab_size - len(result)))
        row = shadow.row
        # The number with which the target would draw at this place, so that where p is q its own choice is the guess.
        token_id = draw(q, uniform(row.seed, row.index, len(row.token_ids)))
        shadow.probs.append(q.copy())  # the backend may use its memory again
    else:
        token_id = result.token_id
    shadow.seq.token_ids.append(token_id)
    shadow.num_guesses += 1
    shadow.wanted -= 1
    shadow.goal += shadow.wanted > 0


def _draft(shadow: _Shadow) -> Draft | None:
    if not shadow.num_guesses:
        return None
    token_ids: array[int] = shadow.seq.token_ids[-shadow.num_guesses :]
    return Draft(token_ids, np.stack(shadow.probs) if shadow.probs else None)
