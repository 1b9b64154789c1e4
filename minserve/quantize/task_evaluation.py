"""evaluate_tasks: put tasks to a model and look which of its answers are right."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from minserve.errors import ChatTemplateError, ParameterError
from minserve.llm import LLM
from minserve.quantize.task_report import TaskOutcome, TaskReport
from minserve.request import FinishReason, Request, RequestOutput
from minserve.sampling_params import SamplingParams
from minserve.tasks.task import Task

# progress(tasks answered, tasks in all)
Progress = Callable[[int, int], None]
MARGIN = 8  # tokens beyond the right answer's; whoever has not ended by then is wrong

_ENDED = (FinishReason.STOP.value, FinishReason.LENGTH.value, FinishReason.ERROR.value)


def evaluate_tasks(llm: LLM, tasks: Sequence[Task], *, progress: Progress | None = None) -> TaskReport:
    """Ask each task as a user's message, all of them together, and take the most probable answer (temperature 0).

    The engine batches them as it batches any load; they share no more than its steps. An answer may be as long as
    the right one, in this model's tokens, and MARGIN more. It is right if it is the task's answer, character by
    character, and the model ended it itself. progress(done, total) counts tasks.

    Ctrl-C ends the evaluation; the report then has what was answered, and `interrupted`. A request that fails while
    it runs is a wrong answer with an `error`.

    Raises ParameterError if there are no tasks or one does not fit the context, ChatTemplateError for a model
    without a chat template; then nothing has run.
    """
    if not tasks:
        raise ParameterError("there are no tasks to evaluate")
    started = time.perf_counter()
    engine = llm.engine
    requests = [_request(llm, task) for task in tasks]
    for request in requests:
        engine.check(request)
    outputs: list[RequestOutput] = []
    interrupted = False
    try:
        outputs += map(engine.add_request, requests)
        growing, done = outputs, 0
        while growing:
            engine.step()
            growing = [output for output in growing if not output.finished]
            if progress is not None and len(outputs) - len(growing) > done:
                done = len(outputs) - len(growing)
                progress(done, len(outputs))
    except KeyboardInterrupt:
        interrupted = True
    finally:
        for request in requests:
            engine.abort(request.request_id)
    answered = [_outcome(task, output) for task, output in zip(tasks, outputs, strict=False) if _has_ended(output)]
    return TaskReport(tuple(answered), tuple(tasks), time.perf_counter() - started, interrupted)


def _request(llm: LLM, task: Task) -> Request:
    if not llm.tokenizer.chat_template:
        raise ChatTemplateError(
            f"{llm.model_file.name} has no chat template, and tasks are put as a user's messages: "
            "evaluate a model that was made to chat"
        )
    messages = [{"role": "user", "content": task.prompt}]
    ids = llm.chat_template.encode(messages, llm.tokenizer)
    params = SamplingParams(temperature=0.0, max_tokens=len(llm.tokenizer.encode(task.answer)) + MARGIN, logprobs=0)
    return Request(llm.engine.new_request_id(), ids, params, template=llm.chat_template.digest)


def _has_ended(output: RequestOutput) -> bool:
    return output.outputs[0].finish_reason in _ENDED


def _outcome(task: Task, output: RequestOutput) -> TaskOutcome:
    answer = output.outputs[0]
    chosen = zip(answer.token_ids, answer.logprobs or (), strict=False)
    lowest = min((entries[token_id].logprob for token_id, entries in chosen), default=None)
    return TaskOutcome(
        task,
        answer.text,
        right=answer.finish_reason == FinishReason.STOP.value and task.verify(answer.text),
        confidence=None if lowest is None else math.exp(lowest),
        num_prompt_tokens=len(output.prompt_token_ids),
        num_output_tokens=output.metrics.num_output_tokens,
        error=answer.error,
    )
