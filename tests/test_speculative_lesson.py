"""The lesson's own proposer, as docs/speculative.md has it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from minserve.ops import native

LESSON = Path(__file__).parent.parent / "docs" / "speculative.md"


def test_a_proposer_of_the_readers_own(capsys: pytest.CaptureFixture[str]) -> None:
    if reason := native.why_unavailable():
        pytest.skip(reason)
    blocks = re.findall(r"^```python\n(.*?)^```$", LESSON.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (block,) = (block for block in blocks if "(Proposer)" in block)
    variables: dict[str, object] = {}
    exec(block, variables)
    figures = variables["figures"]
    assert figures.num_drafts > 0  # type: ignore[attr-defined]
    assert 0 < figures.alpha < 1  # type: ignore[attr-defined]
    assert "guesses were right: alpha 0." in capsys.readouterr().out
