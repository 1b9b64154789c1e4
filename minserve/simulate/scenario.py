"""Scenario: a situation of the engine in which steps are measured."""

from __future__ import annotations

from dataclasses import dataclass

from minserve.engine.engine_config import EngineConfig

DECODE_STEPS = 4  # measured one after another, where no prompt is in the step
_CONTEXTS = (16, 256, 768, 1536)  # tokens behind which decodes are measured, as far as they fit
_MOST_CACHED = 24_576  # tokens of keys and values in one batch; what is beyond is extrapolated


@dataclass(frozen=True)
class Scenario:
    """A situation to be measured: sequences that decode, and prompts that arrive in the same step.

    residents: sequences that have `context` tokens each before the first measured step. newcomers: tokens of each
    arriving prompt that the step computes. If there is only one, `start` more of it were computed before, and `rest`
    are left for a later step, so that no token comes of it yet (and no row of logits).
    """

    residents: int
    context: int
    newcomers: tuple[int, ...] = ()
    start: int = 0
    rest: int = 0

    def __str__(self) -> str:
        parts = []
        if self.residents:
            parts.append(f"{self.residents} decode{'s' * (self.residents > 1)} behind {self.context}")
        if self.newcomers:
            where = (f" behind {self.start}" if self.start else "") + (" with a rest" if self.rest else "")
            parts.append(f"prompt{'s' * (len(self.newcomers) > 1)} of {'+'.join(map(str, self.newcomers))}{where}")
        return ", ".join(parts)

    @property
    def num_seqs(self) -> int:
        """Sequences in it."""
        return self.residents + len(self.newcomers)

    @property
    def cached_tokens(self) -> int:
        """Tokens of all sequences at its end, about."""
        per_resident = self.context + DECODE_STEPS + 2
        return self.residents * per_resident + sum(self.newcomers) + (self.start + self.rest) * len(self.newcomers)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence in it, its answer included."""
        prompts = self.start + max(self.newcomers, default=0) + self.rest
        return max(self.context, prompts) + DECODE_STEPS + 4


def scenarios(config: EngineConfig) -> list[Scenario]:
    """What to measure for an engine of this size: decodes of 1, 2, 4, ... sequences behind several contexts, pieces of
    prompts of 2, 4, 8, ... tokens with and without a beginning, several prompts at once, and prompts beside decodes.
    """
    most, budget = min(config.max_num_seqs, config.max_num_batched_tokens), config.max_num_batched_tokens
    counts, pieces = _doubling(1, most), _doubling(2, budget)
    found = [Scenario(n, context) for n in counts for context in _CONTEXTS]
    found += [Scenario(0, 0, (t,), start) for t in pieces for start in (0, 3 * budget) if t < 512 or not start]
    found += [Scenario(0, 0, (t,), rest=16) for t in pieces if t <= 32]
    found += [Scenario(0, 0, (t,) * n) for n, t in ((2, 16), (8, 16), (4, budget // 4))]
    found += [Scenario(n, 256, (t,)) for n in (1, most // 2, most - 1) for t in (8, 64, 192)]
    found += [Scenario(most // 2, 256, (budget - most // 2,))]
    room = (config.num_kv_blocks - config.max_num_seqs) * config.block_size  # a sequence's last block may be half empty
    fitting = [
        each
        for each in dict.fromkeys(found)
        if each.longest <= config.longest_sequence
        and each.num_seqs <= config.max_num_seqs
        and each.residents + sum(each.newcomers) <= budget
        and all(t > 1 for t in each.newcomers)
        and each.cached_tokens <= min(_MOST_CACHED, room)
    ]
    return [each for each in fitting if each.num_seqs]


def blocks_needed(config: EngineConfig) -> int:
    """KV blocks that are enough to measure an engine of this size; never more than it has."""
    return min(config.num_kv_blocks, -(-_MOST_CACHED // config.block_size) + config.max_num_seqs)


def _doubling(first: int, last: int) -> list[int]:
    """first, twice that, ... and last."""
    found = []
    while first < last:
        found.append(first)
        first *= 2
    return [*found, last] if last >= 1 else found
