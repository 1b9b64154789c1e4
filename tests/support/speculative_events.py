"""The events of steps with drafts, written down by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minserve.events import Accepted, Drafted, Event, Finished, RejectedDraft, StepFinished, StepStarted, Token


def step(
    number: int, *answers: tuple[int, int | None], ends: Sequence[str] = (), prefill: int = 0, gamma: int = 3
) -> list[Event]:
    """The events of a step of 1 second, of which 0.25 went into guessing, if it did, and 0.5 into verifying.

    answers: for each of the requests "a", "b", ... (tokens that it got, right guesses of gamma; None: it had no draft).
    ends: of these requests it is the last step. prefill: prompt tokens that it computed, too.
    """
    begin, end = float(number), number + 1.0
    events: list[Event] = [StepStarted(begin, number, len(answers), 0)]
    pairs = [(chr(ord("a") + place), *answer) for place, answer in enumerate(answers)]
    drafted = [right for _, _, right in pairs if right is not None]
    events += [Drafted(begin, number, name, 0, (7,) * gamma) for name, _, right in pairs if right is not None]
    for name, got, right in pairs:
        if right is not None and right:
            events.append(Accepted(end, number, name, 0, right, gamma))
        if right is not None and right < gamma:
            events.append(RejectedDraft(end, number, name, 0, right, 7))
        events += [Token(end, number, name, 0, 7, None)] * got
        if name in ends:
            events.append(Finished(end, number, name, ("stop",), 4, 0, 9, 0))
    standing = ("preempted", "running", "waiting", "free_blocks", "cached_blocks", "used_blocks", "kv_tokens")
    counts: dict[str, Any] = dict.fromkeys((*standing, "step_used_blocks", "step_kv_tokens"), 0)
    counts |= {"sequences": len(answers), "decode_tokens": len(answers), "prefill_tokens": prefill}
    counts |= {"draft_tokens": gamma * len(drafted), "accepted_tokens": sum(drafted)}
    seconds = {"schedule_seconds": 0.0, "forward_seconds": 0.375, "sample_seconds": 0.125}
    seconds["draft_seconds"] = 0.25 if drafted else 0.0
    return [*events, StepFinished(end, number, **counts, **seconds)]
