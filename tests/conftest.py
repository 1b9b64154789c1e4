"""Fixtures that all tests share."""

from __future__ import annotations

from pathlib import Path

import hypothesis
import pytest

from minserve.model import catalog
from minserve.model.loader import open_model
from minserve.text.vocabulary import Vocabulary

# The same examples in every run, and no time limit an example: shared machines stall now and then.
hypothesis.settings.register_profile("minserve", derandomize=True, deadline=None, max_examples=50)
hypothesis.settings.load_profile("minserve")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real model's GGUF file; tests that ask for it are skipped where it is not in the cache."""
    path = catalog.cached("smollm2")
    if path is None:
        pytest.skip("SmolLM2 is not in the cache; fetch it with: minserve models pull smollm2")
    return path


@pytest.fixture(scope="session")
def smollm2_vocabulary(smollm2_path: Path) -> Vocabulary:
    """The real model's tokenizer, as data."""
    return open_model(smollm2_path).vocabulary
