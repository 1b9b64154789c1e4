"""export: trained weights as the GGUF file that minserve ships and opens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from minserve.model.config import ModelConfig
from minserve.model.gguf_llama_writer import write_llama
from minserve.ops.dtypes import F16
from minserve.text.vocabulary import Vocabulary

LICENCE = "Apache-2.0"


def export(
    path: Path,
    state: Mapping[str, torch.Tensor],
    config: ModelConfig,
    vocabulary: Vocabulary,
    *,
    name: str,
    description: str,
) -> None:
    """Write `path`, whole or not at all: matrices in float16, norms in float32.

    state: a Network's state_dict (a checkpoint has it under "network"); its names and order are Hugging Face's.
    Raises MinserveError if a weight is missing, or beyond float16; OSError.
    """
    weights = {key: tensor.detach().to("cpu", torch.float32).numpy() for key, tensor in state.items()}
    write_llama(path, config, weights, vocabulary, dtype=F16, name=name, licence=LICENCE, description=description)
