"""Who goes first: a policy is one small class with one method.

`key(seq)`: the sequence with the smallest key is admitted first, served first in a step, and preempted last.
A sequence's key must not change while it is in the engine.

A policy may also have `may_overtake(waiting, running)`: may a short prompt at the head of the queue be computed beside
the chunks of a long one that began before it? FCFS says yes, since all of it fits into what a chunk leaves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from minserve.errors import ParameterError, did_you_mean, shown
from minserve.request import Sequence


class SchedulingPolicy(Protocol):
    """Anything with such a `key`."""

    def key(self, seq: Sequence) -> Any:
        """What sequences are sorted by, ascending."""


class FCFS:
    """First come, first served; the answers of one request in their order."""

    def key(self, seq: Sequence) -> tuple[int, int]:
        """(arrival order, answer)."""
        return (seq.order, seq.index)

    @staticmethod
    def may_overtake(waiting: Sequence, running: Sequence) -> bool:
        """A short prompt does not wait until a long one is computed."""
        return True


class Priority:
    """The lowest priority number first, then first come, first served.

    Under a load of important requests that never ends, unimportant ones wait for as long as it lasts.
    """

    def key(self, seq: Sequence) -> tuple[int, int, int]:
        """(priority, arrival order, answer)."""
        return (seq.request.priority, seq.order, seq.index)

    @staticmethod
    def may_overtake(waiting: Sequence, running: Sequence) -> bool:
        """Only if it is not less important."""
        return waiting.request.priority <= running.request.priority


POLICIES: Mapping[str, type[FCFS] | type[Priority]] = {"fcfs": FCFS, "priority": Priority}


def scheduling_policy(policy: str | SchedulingPolicy) -> SchedulingPolicy:
    """The policy of this name, or the object itself if it has a `key`. Raises ParameterError."""
    if isinstance(policy, str):
        if policy not in POLICIES:
            names = ", ".join(POLICIES)
            raise ParameterError(
                f"there is no scheduling_policy {shown(policy)}{did_you_mean(policy, POLICIES)}; there are {names}"
            )
        return POLICIES[policy]()
    if isinstance(policy, type):
        raise ParameterError(f"a scheduling_policy is an object: give {policy.__name__}(), not the class")
    if not callable(getattr(policy, "key", None)):
        raise ParameterError(f"a scheduling_policy is a name or an object with key(seq), not {shown(policy)}")
    return policy
