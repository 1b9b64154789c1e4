"""The training loop: Muon on matrices, AdamW on the rest, a checkpoint now and then, and on from the last one."""

from __future__ import annotations

import dataclasses
import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from minserve.errors import ParameterError
from minserve.model.config import ModelConfig

from .data import Batch, TrainingData
from .evaluate import Evaluation
from .network import Network

_WARM_UP = 40  # steps
_FLAT = 0.3  # share of the steps before the rate begins to fall
_LAST_RATE = 0.02
_LONG = 0.75  # share of the steps after which rows have the whole context
_TEXT_WEIGHT = 0.5  # of a token of a play, beside one of an answer


@contextmanager
def interrupt_noted() -> Iterator[Callable[[], bool]]:
    """Ctrl-C does not break into a step, which would leave half of it in a checkpoint; it is asked for between two."""
    noted: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: noted.append(number))
    try:
        yield lambda: bool(noted)
    finally:
        signal.signal(signal.SIGINT, before)


@dataclass(frozen=True)
class Recipe:
    """How one model is trained.

    text_share: of the rows, those of text. distil: from this share of the steps on, text is learned from the teacher.
    """

    config: ModelConfig
    steps: int
    rows: int
    rate: float
    text_share: float = 0.3
    distil: float = 1.0

    def shortened(self, steps: int) -> Recipe:
        """The same with so many steps."""
        return dataclasses.replace(self, steps=steps)


class Training:
    """One model on its way. folder: where its checkpoint is kept and where its log goes.

    Goes on from the checkpoint if there is one. Raises ParameterError if that is of another recipe or seed.
    """

    def __init__(self, name: str, recipe: Recipe, folder: Path, seed: int) -> None:
        torch.manual_seed(seed)
        self.name, self.recipe, self.folder = name, recipe, folder
        self.network = Network(recipe.config)
        named = list(self.network.named_parameters())
        matrices = [p for n, p in named if p.ndim == 2 and "embed_tokens" not in n]
        others = [p for n, p in named if p.ndim != 2 or "embed_tokens" in n]
        self._optimizers = [
            torch.optim.Muon(matrices, lr=recipe.rate, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=recipe.rate, betas=(0.9, 0.98), weight_decay=0.0),
        ]
        self.step, self.seconds = 0, 0.0  # done so far, and what they took
        self._checkpoint = folder / f"{name}.pt"
        self._made_by = f"seed {seed}, {recipe}"
        if self._checkpoint.exists():
            state = self._load()
            if state["made_by"] != self._made_by:
                raise ParameterError(
                    f"{self._checkpoint} was made with another seed, number of steps or recipe; give another --out, or "
                    "delete it"
                )
            self.network.load_state_dict(state["network"])
            for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            self.step, self.seconds = state["step"], state["seconds"]

    def _load(self) -> dict[str, Any]:
        """The checkpoint. Raises ParameterError if it is none."""
        try:
            state = torch.load(self._checkpoint, weights_only=True)
            if not isinstance(state, dict) or not {"made_by", "network", "optimizers", "step", "seconds"} <= set(state):
                raise ValueError("it is another file")
            return state
        except Exception as error:  # PyTorch raises what it likes
            raise ParameterError(f"{self._checkpoint} cannot be read; delete it to begin anew ({error})") from None

    def save(self) -> None:
        """Write the checkpoint, whole or not at all."""
        state = {
            "network": self.network.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "made_by": self._made_by,
            "step": self.step,
            "seconds": self.seconds,
        }
        part = self._checkpoint.with_suffix(".part")
        torch.save(state, part)
        part.replace(self._checkpoint)

    def run(
        self,
        data: Callable[[int], TrainingData],
        evaluation: Evaluation,
        progress: Callable[[str, int, int], None],
        *,
        teacher: Network | None = None,
        every: int = 250,
    ) -> None:
        """Train to the last step. data(length): the source of rows of that many tokens.

        Saves, evaluates and logs every so many steps, and at Ctrl-C saves what there is.
        """
        recipe = self.recipe
        long = recipe.config.max_position_embeddings
        sources = {False: data(long // 2), True: data(long)}
        losses: list[float] = []
        with interrupt_noted() as interrupted:
            while self.step < recipe.steps:
                began, part = time.perf_counter(), self.step / recipe.steps
                batch = sources[part >= _LONG].batch(self.step)
                losses.append(self._learn(batch, part, teacher if part >= recipe.distil else None))
                self.step, self.seconds = self.step + 1, self.seconds + time.perf_counter() - began
                progress("train", self.step, recipe.steps)
                if self.step % every == 0 or self.step == recipe.steps:
                    self.save()
                    figures = {"loss": sum(losses) / len(losses), "seconds": self.seconds}
                    self._log({**figures, **evaluation(self.network)})
                    losses.clear()
                if interrupted():
                    self.save()
                    raise KeyboardInterrupt

    def _log(self, figures: dict[str, float]) -> None:
        entry = {"step": self.step, **{name: round(value, 4) for name, value in figures.items()}}
        with (self.folder / f"{self.name}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def _learn(self, batch: Batch, part: float, teacher: Network | None) -> float:
        """One step; returns its loss in nats a token."""
        warm = min(1.0, (self.step + 1) / _WARM_UP)
        falling = 1.0 if part < _FLAT else max(_LAST_RATE, (1.0 - part) / (1.0 - _FLAT))
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.recipe.rate * warm * falling
        tokens, documents = torch.from_numpy(batch.token_ids), torch.from_numpy(batch.documents)
        weights = torch.from_numpy(batch.weights)
        weights[torch.from_numpy(batch.is_text)] *= _TEXT_WEIGHT
        chosen = weights[:, 1:].flatten().nonzero()[:, 0]  # (S,) places where a token is learned
        with torch.autocast("cpu", torch.bfloat16):
            logits = self.network(tokens[:, :-1], documents[:, :-1])  # (B, T, V)
        logits = logits.flatten(0, 1)[chosen].float()  # (S, V)
        loss = functional.cross_entropy(logits, tokens[:, 1:].flatten()[chosen], reduction="none")  # (S,)
        if teacher is not None:
            loss = self._distilled(loss, logits, batch, chosen, teacher)
        weights = weights[:, 1:].flatten()[chosen]
        mean = (loss * weights).sum() / weights.sum()
        mean.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return mean.item()

    @staticmethod
    def _distilled(
        loss: torch.Tensor, logits: torch.Tensor, batch: Batch, chosen: torch.Tensor, teacher: Network
    ) -> torch.Tensor:
        """Where the row is text, mostly the divergence from the teacher instead (arXiv 1503.02531, section 2)."""
        rows = torch.from_numpy(batch.is_text.nonzero()[0])
        tokens, documents = torch.from_numpy(batch.token_ids)[rows], torch.from_numpy(batch.documents)[rows]
        length = tokens.shape[1] - 1
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            taught = teacher(tokens[:, :-1], documents[:, :-1])  # (text rows, T, V)
        is_text = torch.from_numpy(batch.is_text)[chosen // length]  # (S,)
        row_of = torch.cumsum(torch.from_numpy(batch.is_text), 0) - 1  # (B,) a row's place among the text rows
        places = chosen[is_text]
        target = taught[row_of[places // length], places % length].float().softmax(-1)  # (S of text, V)
        divergence = -(target * logits[is_text].log_softmax(-1)).sum(-1)  # (S of text,)
        mixed = loss.clone()
        mixed[is_text] = 0.1 * loss[is_text] + 0.9 * divergence
        return mixed
