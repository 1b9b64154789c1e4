"""SpeculationWatch: what guesses brought to one answer, for the line and the document behind it."""

from __future__ import annotations

import dataclasses
from types import TracebackType
from typing import TYPE_CHECKING, Any

from minserve.bench.report import speculation_text
from minserve.bench.speculation_figures import SpeculationFigures
from minserve.commands.output import note

if TYPE_CHECKING:
    from minserve.engine.llm_engine import LLMEngine
    from minserve.llm import LLM


def warn_of_failed_draft(engine: LLMEngine) -> None:
    """Say on stderr if the engine's proposer has failed: what came then came without drafts."""
    if engine.speculation is not None and engine.speculation.error is not None:
        note(f"warning: nothing is guessed any more, because the draft failed: {engine.speculation.error}")


class SpeculationWatch:
    """A context manager: while it is open, it listens to the model's engine, if that speculates.

    line: the figures for people; document: for JSON; both None for an engine without speculation. When it closes, it
    tells on stderr if the proposer has failed, whose answers then came without drafts.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._figures: SpeculationFigures | None = None

    def __enter__(self) -> SpeculationWatch:
        if self._llm.engine.speculation is not None:
            self._figures, self._stop = SpeculationFigures.attach(self._llm.engine)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._figures is not None:
            self._stop()
            warn_of_failed_draft(self._llm.engine)

    @property
    def line(self) -> str | None:
        """The figures in one line."""
        return None if self._figures is None else f"speculation: {speculation_text(self._figures)}"

    @property
    def document(self) -> dict[str, Any] | None:
        """The options and the figures."""
        config = self._llm.speculative_config
        if self._figures is None or config is None:
            return None
        return {"config": dataclasses.asdict(config), **self._figures.document()}
