"""How far training has come: exact answers to held-out tasks, and bits a byte of held-out text."""

from __future__ import annotations

import math
import random

import numpy as np
import torch
from torch.nn import functional

from minserve.tasks.families import FAMILIES
from minserve.text.tokenizer import Tokenizer

from .data import BEGIN, END, plays, question
from .network import Network

_LENGTH = 256  # of a piece of text


class Evaluation:
    """Held-out questions and text, the same ones at every call."""

    def __init__(self, tokenizer: Tokenizer, *, num_tasks: int = 60, num_pieces: int = 80, seed: int = 1) -> None:
        rng = random.Random(seed)
        self._cells: dict[str, list[tuple[list[int], list[int]]]] = {}
        for family in FAMILIES.values():
            for level in family.levels:
                tasks = [family.task(rng, level, held_out=True) for _ in range(num_tasks)]
                self._cells[f"{family.name} {level}"] = [
                    (question(tokenizer, task.prompt), [*tokenizer.encode(task.answer), END]) for task in tasks
                ]
        text = plays()[1]
        ids = np.array(tokenizer.encode(text), np.int64)
        count = min(num_pieces, len(ids) // _LENGTH)
        pieces = ids[: count * _LENGTH].reshape(count, _LENGTH)
        self._pieces = np.concatenate([np.full((count, 1), BEGIN), pieces], axis=1)  # (pieces, 257)
        self._bytes_per_token = len(text.encode("utf-8")) / len(ids)

    @torch.no_grad()
    def __call__(self, network: Network) -> dict[str, float]:
        """Share of exact answers a family and level, their mean ("tasks"), and "bits_per_byte"."""
        rates = {name: self._exact(network, pairs) for name, pairs in self._cells.items()}
        loss = 0.0
        for rows in np.array_split(self._pieces, 5):
            tokens = torch.from_numpy(rows)
            logits = network(tokens[:, :-1]).float()
            loss += functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum").item()
        nats = loss / self._pieces[:, 1:].size
        mean = sum(rates.values()) / len(rates)
        return {**rates, "tasks": mean, "bits_per_byte": nats / math.log(2) / self._bytes_per_token}

    @staticmethod
    def _exact(network: Network, pairs: list[tuple[list[int], list[int]]]) -> float:
        """The most probable token is the answer's at every place: what greedy decoding would have written."""
        width = max(len(prompt) + len(answer) for prompt, answer in pairs)
        tokens = torch.zeros((len(pairs), width), dtype=torch.long)
        for row, (prompt, answer) in zip(tokens, pairs, strict=True):
            row[: len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        best = network(tokens).argmax(-1)  # (pairs, T)
        right = [
            best[i, len(prompt) - 1 : len(prompt) + len(answer) - 1].tolist() == answer
            for i, (prompt, answer) in enumerate(pairs)
        ]
        return sum(right) / len(right)
