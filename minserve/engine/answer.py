"""Answer: one of a request's n answers while it grows."""

from __future__ import annotations

from dataclasses import dataclass

from minserve.engine.output_text import OutputText
from minserve.engine.sampler import SamplingRow
from minserve.request import CompletionOutput, FinishReason, Sequence


@dataclass(eq=False, slots=True)
class Answer:
    """A sequence, what the sampler must know of it, and what the caller sees of it.

    text: None if the request wants token ids alone (SamplingParams.detokenize).
    """

    seq: Sequence
    row: SamplingRow
    completion: CompletionOutput
    text: OutputText | None

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None, error: str | None = None) -> None:
        """End it; text that was held back is text after all."""
        if self.text is not None:
            self.text.finish()
            self.completion.text = self.text.text
        self.completion.finish_reason, self.completion.stop_reason = reason.value, stop_reason
        self.completion.error = error
