"""A tiny target model and a draft model that often agrees with it, as files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .tiny_llama import TinyLlama, tiny_llama


def target_model(**options: int) -> TinyLlama:
    """Of the options of tiny_llama."""
    return tiny_llama(seed=3, intermediate_size=64, **options)


def draft_model(noise: float = 0.15) -> TinyLlama:
    """The target with noise on its layers' matrices; 0: its twin."""
    model, rng = target_model(), np.random.default_rng(1)
    for name, values in model.weights.items():
        if ".layers." in name and values.ndim == 2:
            values += noise * rng.standard_normal(values.shape).astype(np.float32) / np.sqrt(values.shape[1])
    return model


def write_pair(folder: Path, noise: float = 0.15, type_name: str = "F32") -> tuple[Path, Path]:
    """Writes both to the folder, matrices in that type: the paths of the target and of the draft model."""
    target, draft = folder / "target.gguf", folder / "draft.gguf"
    return target_model().write_gguf(target, type_name), draft_model(noise).write_gguf(draft, type_name)
