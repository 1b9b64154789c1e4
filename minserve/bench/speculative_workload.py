"""Workloads on which speculation is measured: where guessing is easy, where it is usual, and where it is hard."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minserve.errors import ChatTemplateError, ParameterError
from minserve.request import Request
from minserve.sampling_params import SamplingParams
from minserve.tasks.suite import held_out_tasks

if TYPE_CHECKING:
    from minserve.llm import LLM

# name -> requests of a turn, at least
WORKLOADS = {"repeat": 4, "tasks": 32, "text": 4}
_COPIES = 3  # of a paragraph, in a prompt that is to be repeated; the beginning of one more stands behind them
_MARGIN = 8  # tokens of a task's answer beyond the right one's
_LEAST_COPY = 4  # tokens; shorter ones are no paragraph
_SENTENCES = (
    "The ferry leaves the island at seven in the morning.",
    "My brother keeps bees behind the old stone house.",
    "Nobody had opened the library's back door since the war.",
    "A letter came from the north with three blue stamps.",
    "The baker's daughter sold bread to the soldiers.",
    "Rain fell on the market, and the traders packed up.",
    "We counted eleven ships before the fog came in.",
    "The king had promised the village a new bridge.",
    "Her garden was small, but every path in it was straight.",
    "They carried the piano up four flights of stairs.",
    "In the valley the wheat was already yellow.",
    "The clock in the tower was nine minutes late.",
    "An old map showed a road where there was only grass.",
    "The doctor asked him to breathe in and to count to ten.",
    "Two foxes crossed the field and looked back once.",
    "The captain wrote down the wind and went below.",
    "Children drew houses with chalk on the pavement.",
    "The train to the coast stops at every farm.",
    "She learned to read from the labels of tea chests.",
    "There was snow on the roof and smoke above it.",
    "The judge had heard the story before.",
    "A lamp burned all night in the miller's window.",
    "He sold the horse and kept the saddle.",
    "The river is wide here, and slow, and brown.",
)


@dataclass(frozen=True)
class Prompt:
    """What one request asks: token ids, and how its answer ends: by itself, or at max_tokens alone."""

    token_ids: list[int]
    max_tokens: int
    ignore_eos: bool


@dataclass(frozen=True)
class SpeculativeWorkload:
    """Prompts that are served `batch_size` at a time: a batch, and when all its answers are there, the next one.

    temperature: above 0, each request has a seed of its own, drawn from `seed`.
    """

    name: str
    prompts: list[Prompt]
    batch_size: int
    temperature: float = 0.0
    seed: int = 0

    @property
    def longest(self) -> int:
        """Most tokens of a prompt and its answer together."""
        return max(len(prompt.token_ids) + prompt.max_tokens for prompt in self.prompts)

    @property
    def most_prompt_tokens(self) -> int:
        """Most tokens of the prompts of a batch together."""
        return max(sum(len(prompt.token_ids) for prompt in batch) for batch in self._batches())

    def _batches(self) -> list[list[Prompt]]:
        size = self.batch_size
        return [self.prompts[first : first + size] for first in range(0, len(self.prompts), size)]

    def batches(self, *, seeded: bool = True) -> list[list[Request]]:
        """New requests, always the same ones. seeded false: without seeds, so that no request insists on its drafts."""
        batches = []
        for number, batch in enumerate(self._batches()):
            requests = []
            for place, prompt in enumerate(batch):
                index = number * self.batch_size + place
                params = SamplingParams(
                    temperature=self.temperature,
                    seed=self.seed + index if seeded and self.temperature > 0 else None,
                    max_tokens=prompt.max_tokens,
                    ignore_eos=prompt.ignore_eos,
                )
                requests.append(Request(f"request-{index}", prompt.token_ids, params))
            batches.append(requests)
        return batches


def speculative_workload(
    llm: LLM, name: str, batch_size: int, *, answer_tokens: int = 128, temperature: float = 0.0, seed: int = 0
) -> SpeculativeWorkload:
    """A workload for this model: whole batches of so many requests.

    name: "repeat", a paragraph three times and a quarter, and the model goes on: most models finish the fourth, and
    repeat it again. "tasks", held-out tasks through the chat template, of each family and level; such as have answers
    of about the same length share a batch, so that it stays full. "text", a sentence, and the model goes on.
    answer_tokens: of each answer, but tasks end when the model ends them.

    Raises ParameterError for prompts that do not fit the context, ChatTemplateError for tasks without a template.
    """
    count = -(-max(WORKLOADS[name], batch_size) // batch_size) * batch_size
    prompts = _tasks(llm, count, seed) if name == "tasks" else _text(llm, name, count, answer_tokens, seed)
    return SpeculativeWorkload(name, prompts, batch_size, temperature, seed)


def _text(llm: LLM, name: str, count: int, answer_tokens: int, seed: int) -> list[Prompt]:
    tokenizer, rng = llm.tokenizer, random.Random(seed)
    prefix = [] if not tokenizer.add_bos or tokenizer.bos_id is None else [tokenizer.bos_id]
    room = llm.max_model_len - len(prefix) - answer_tokens
    copies, sentences = (_COPIES, 4) if name == "repeat" else (0, 1)
    if room // (copies + 1) < _LEAST_COPY:
        raise ParameterError(
            f"answers of {answer_tokens} tokens leave no room for their prompts in a context of {llm.max_model_len}; "
            "give fewer --answer-tokens"
        )
    prompts = []
    for _ in range(count):
        text = " ".join(rng.sample(_SENTENCES, sentences))
        ids = tokenizer.encode(text + "\n" if copies else text)[: room // (copies + 1)]
        begun = ids[: -(-len(ids) // 4)] if copies else ids
        prompts.append(Prompt(prefix + ids * copies + begun, answer_tokens, ignore_eos=True))
    return prompts


def _tasks(llm: LLM, count: int, seed: int) -> list[Prompt]:
    if not llm.tokenizer.chat_template:
        raise ChatTemplateError(
            f"{llm.model_file.name} has no chat template, and tasks are put as a user's messages; "
            "take another --speculative-workload"
        )
    prompts: list[Prompt] = []
    num = 1  # of each family and level
    while len(prompts) < count:
        tasks = held_out_tasks(num, seed=seed)
        prompts = []
        for task in tasks:
            ids = llm.chat_template.encode([{"role": "user", "content": task.prompt}], llm.tokenizer)
            max_tokens = len(llm.tokenizer.encode(task.answer)) + _MARGIN
            if len(ids) + max_tokens <= llm.max_model_len:
                prompts.append(Prompt(ids, max_tokens, ignore_eos=False))
        if not prompts:
            raise ParameterError(f"no task fits a context of {llm.max_model_len} tokens; give more --max-model-len")
        num += -(-(count - len(prompts)) // len(prompts))
    return sorted(prompts[:count], key=lambda prompt: prompt.max_tokens)
