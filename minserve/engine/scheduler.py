"""Scheduler: which tokens of which sequences the next step computes.

There is no prefill phase and no decode phase (Orca, OSDI'22, section 3; vLLM v1): each step gives every running
sequence some of the tokens that it has not computed yet, under one budget. A decode is the case of one token.

    max_num_batched_tokens:  [ 1 each for the decodes ][ chunks of running prefills ][ chunks of new sequences ]

Decodes come first, so a long prompt delays nobody's next token by more than one budget's worth of work (Sarathi-Serve,
arXiv 2403.02310, section 4).

A prompt that takes several steps does not hold up a short one either: where the head of the queue would fit whole into
half of what the decodes leave, the long prompt's chunk leaves it that much. Longer ones wait for their turn.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import insort
from collections.abc import Mapping
from typing import Any

from minserve.engine.engine_config import EngineConfig
from minserve.engine.scheduled_batch import ScheduledBatch, ScheduledSequence
from minserve.engine.scheduling_policy import FCFS, scheduling_policy
from minserve.engine.speculative.draft import NO_DRAFTS, Draft
from minserve.events import EventStream, Preempted
from minserve.kv.block_manager import BlockManager
from minserve.request import Sequence, SequenceStatus

WAITING = (SequenceStatus.WAITING, SequenceStatus.PREEMPTED)


class Scheduler:
    """The running sequences, the waiting ones, and the decision of each step.

    Nobody waits for ever: a sequence at the head of the queue that does not fit now holds back those behind it, so the
    running ones end without successors and it gets its turn, and every sequence fits the pool when it is alone.
    """

    def __init__(self, config: EngineConfig, blocks: BlockManager, events: EventStream) -> None:
        self.config = config
        self.blocks = blocks
        policy = scheduling_policy(config.scheduling_policy)
        self.key = policy.key
        self.may_overtake = getattr(policy, "may_overtake", FCFS.may_overtake)
        self.token_budget = config.token_budget
        self.max_num_seqs = config.seats
        self._events = events
        self.clear()

    def clear(self) -> None:
        """Forget every sequence."""
        self.running: list[Sequence] = []  # in the policy's order
        self._waiting: list[tuple[Any, int, Sequence]] = []  # a heap; those that have ended are dropped at its head
        self._added = itertools.count()  # decides where a policy's keys are equal
        self.num_waiting = 0
        self._filling = False  # static batching: the batch is not complete yet

    def add(self, seq: Sequence) -> None:
        """Queue a sequence that owns no blocks. Raises what the policy's key raises, or comparing it."""
        entry = (self.key(seq), next(self._added), seq)
        try:
            heapq.heappush(self._waiting, entry)
        except Exception:
            self._waiting.remove(entry)
            heapq.heapify(self._waiting)
            raise
        self.num_waiting += 1

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        """Let a new sequence run on from its parent's blocks; False, and nothing changed, if there is no seat."""
        if len(self.running) >= self.max_num_seqs:
            return False
        self.blocks.fork(parent, child)
        child.status = SequenceStatus.RUNNING
        insort(self.running, child, key=self.key)
        return True

    def remove(self, seq: Sequence) -> None:
        """Take a sequence out, wherever it stands, and free its blocks."""
        if seq.status is SequenceStatus.RUNNING:
            self.running.remove(seq)
            self.blocks.free(seq)
        elif seq.status in WAITING:
            self.num_waiting -= 1
        seq.status = SequenceStatus.FINISHED
        if len(self._waiting) > 2 * self.num_waiting + 100:  # most of them were aborted
            self._waiting = [entry for entry in self._waiting if entry[-1].status in WAITING]
            heapq.heapify(self._waiting)

    def schedule(self, drafts: Mapping[Sequence, Draft] = NO_DRAFTS) -> ScheduledBatch:
        """Decide a step. Allocates blocks; changes who is running and who is waiting.

        drafts: guesses for running sequences that have one token to compute; they are verified behind it.
        """
        batch = ScheduledBatch(self.token_budget)
        prefills = []
        for seq in tuple(self.running):
            if len(seq.token_ids) - seq.num_computed_tokens > 1:
                prefills.append(seq)
            elif seq.status is SequenceStatus.RUNNING:  # else it was preempted for one before it
                self._give(seq, 1, batch, drafts.get(seq))
        for seq in prefills:
            if seq.status is SequenceStatus.RUNNING and batch.budget > 0:
                most = batch.budget - self._kept_for_the_next(seq, batch)
                self._give(seq, min(self._missing(seq), most), batch)
        if not batch.preempted:  # else there is no room for anybody new
            self._admit(batch)
        return batch

    def _kept_for_the_next(self, running: Sequence, batch: ScheduledBatch) -> int:
        """Tokens of the budget that a long prompt's chunk leaves to the head of the queue.

        A prompt that is short, at most half of what is left, does not wait until a long one before it is computed,
        unless the policy says so.
        """
        while self._waiting and self._waiting[0][-1].status not in WAITING:
            heapq.heappop(self._waiting)
        no_entry = batch.preempted or self.config.static_batching or len(self.running) >= self.max_num_seqs
        if no_entry or not self._waiting:
            return 0
        head = self._waiting[0][-1]
        if not self.may_overtake(head, running):
            return 0
        hits = self._find_prefix(head)
        num_tokens = len(head.token_ids) - len(hits) * self.blocks.block_size
        short = num_tokens <= batch.budget // 2
        return num_tokens if short and self.blocks.fits(hits, len(head.token_ids) + self._promised_slots()) else 0

    def _promised_slots(self) -> int:
        """Token slots of the whole blocks that the prompts which are being computed have yet to get."""
        blocks_for = self.blocks.blocks_for
        missing = sum(max(0, blocks_for(len(seq.token_ids)) - len(seq.block_table)) for seq in self.running)
        return missing * self.blocks.block_size

    def _resumes_with_a_draft(self, seq: Sequence) -> bool:
        """Was a sequence preempted in its answer, and may it get drafts?

        Then what it had is computed again but for its last token. That one has a step of its own, as if nothing had
        happened, with the draft that it would have had: a seeded request draws the same tokens.
        """
        return self.config.num_speculative_tokens > 0 and seq.num_output_tokens > 0

    def _known_length(self, seq: Sequence) -> int:
        """Tokens that a sequence is known to need slots for: its own, and a draft if that is what preempted it."""
        most = self.config.num_speculative_tokens if self._resumes_with_a_draft(seq) else 0
        return min(len(seq.token_ids) + most, seq.max_num_tokens)

    def _find_prefix(self, seq: Sequence) -> list[int]:
        return self.blocks.find_prefix(seq, leave=2 if self._resumes_with_a_draft(seq) else 1)

    def _missing(self, seq: Sequence) -> int:
        """How many tokens a sequence is to compute before it decodes."""
        return len(seq.token_ids) - seq.num_computed_tokens - self._resumes_with_a_draft(seq)

    def _give(self, seq: Sequence, num_tokens: int, batch: ScheduledBatch, draft: Draft | None = None) -> None:
        """Put a running sequence's next tokens into the batch, at the cost of the last in order if need be."""
        while (copies := self.blocks.allocate(seq, num_tokens + len(draft or ()))) is None:
            if draft is not None and draft.optional:  # guesses are not worth another one's blocks
                end = seq.num_computed_tokens + num_tokens
                own_blocks = max(len(seq.block_table), self.blocks.blocks_for(end))  # that it needs anyway
                draft = draft.first(min(own_blocks * self.blocks.block_size - end, len(draft) - 1))
                continue
            victim = self.running[-1]
            self._preempt(victim, batch)
            if victim is seq:
                return
        missing = len(seq.token_ids) - seq.num_computed_tokens - num_tokens
        num_logits = num_tokens if seq.needs_prompt_logits else int(missing == 0)
        if draft is not None:
            num_tokens, num_logits = num_tokens + len(draft), num_logits + len(draft)
        batch.items.append(ScheduledSequence(seq, num_tokens, num_logits, copies, draft))
        batch.budget -= num_tokens

    def _preempt(self, seq: Sequence, batch: ScheduledBatch) -> None:
        """Take a running sequence's blocks away; it will be computed again, its output tokens included."""
        self.running.remove(seq)
        for i, item in enumerate(batch.items):
            if item.seq is seq:  # it had its place in this batch already
                batch.budget += item.num_tokens
                del batch.items[i]
                break
        seq.num_preemptions += 1
        seq.most_blocks = max(seq.most_blocks, len(seq.block_table))
        self._events.emit(Preempted, seq.request.request_id, seq.index, seq.num_computed_tokens, seq.num_preemptions)
        self.blocks.free(seq)
        seq.status = SequenceStatus.PREEMPTED
        self.add(seq)
        batch.preempted.append(seq)

    def _admit(self, batch: ScheduledBatch) -> None:
        """Start waiting sequences, in order, while there are seats, budget and blocks."""
        # A static batch takes newcomers only in its first step, and in the next ones while the budget cuts it short.
        if self.config.static_batching and self.running and not self._filling:
            return
        self._start_waiting(batch)
        self._filling = batch.budget == 0

    def _start_waiting(self, batch: ScheduledBatch) -> None:
        if not self._waiting or batch.budget == 0 or len(self.running) >= self.max_num_seqs:
            return
        promised = self._promised_slots()  # only the last one admitted can add to them: its chunk ends the budget
        while self._waiting and batch.budget > 0 and len(self.running) < self.max_num_seqs:
            seq = self._waiting[0][-1]
            if seq.status not in WAITING:
                heapq.heappop(self._waiting)
                continue
            hits = self._find_prefix(seq)
            reserve = self.config.reserved_tokens(seq.max_num_tokens)
            missing = len(seq.token_ids) - len(hits) * self.blocks.block_size
            whole = self.config.enable_chunked_prefill or missing <= batch.budget
            # All that is known of it must fit, not only the first chunk: else it would be preempted half-way.
            if not whole or not self.blocks.fits(hits, max(self._known_length(seq), reserve) + promised):
                return
            heapq.heappop(self._waiting)
            self.num_waiting -= 1
            self.blocks.start(seq, hits, reserve)
            seq.status = SequenceStatus.RUNNING
            insort(self.running, seq, key=self.key)
            self._give(seq, min(self._missing(seq), batch.budget), batch)
