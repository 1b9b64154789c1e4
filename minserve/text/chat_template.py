"""ChatTemplate: a conversation to the text, and to the tokens, that a model was trained on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2

from minserve.errors import ChatTemplateError, ParameterError
from minserve.text.pretokenizer import replace_surrogates
from minserve.text.stand_ins import StandIns
from minserve.text.template_sandbox import TemplateSandbox
from minserve.text.tokenizer import Tokenizer

Message = Mapping[str, Any]


class ChatTemplate:
    """A model's chat template: Jinja source, run in a sandbox.

    source: the template. bos_token, eos_token: text that it may write under these names.
    now: tells the time to templates that ask (strftime_now).

    Templates get what Hugging Face gives them: messages, tools, add_generation_prompt, bos_token, eos_token,
    raise_exception, strftime_now, the tojson filter, and the break, continue and generation tags.

    Raises ChatTemplateError if the source does not compile.
    """

    def __init__(
        self,
        source: str | None,
        bos_token: str = "",
        eos_token: str = "",
        *,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        if not source:
            raise ChatTemplateError(
                "this model has no chat template; use it on plain text (generate --raw, or LLM.generate)"
            )
        self.source = source
        self.digest = hashlib.sha256(repr((source, bos_token, eos_token)).encode("utf-8", "surrogatepass")).hexdigest()
        self._variables = {
            "bos_token": bos_token,
            "eos_token": eos_token,
            "raise_exception": _raise_exception,
            "strftime_now": lambda form: now().strftime(form),
        }
        self._sandbox = TemplateSandbox()
        try:
            self._template = self._sandbox.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(
                f"the chat template does not compile: line {error.lineno}: {error.message}"
            ) from None
        except Exception as error:  # it is a program of unknown origin: nothing that it does may surprise
            raise ChatTemplateError(f"the chat template does not compile: {_one_line(error)}") from None

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, tools: Sequence[Message] | None = None
    ) -> str:
        """The conversation as text, to be read; `encode` is what makes tokens of it.

        messages: dictionaries with "role" (text) and "content": text, None (taken as ""), or a list of
            {"type": "text", "text": ...}, which are joined with nothing between. "content" may be missing beside
            "tool_calls". Other entries are passed to the template.
        add_generation_prompt: end with what begins the model's own turn.
        tools: JSON descriptions of functions that the model may call.

        Raises ParameterError naming the message that has another form; ChatTemplateError if the template refuses
        the messages, fails, or goes beyond the sandbox.
        """
        return self._render(_checked_messages(messages), _checked_tools(tools), add_generation_prompt)

    def encode(
        self,
        messages: Sequence[Message],
        tokenizer: Tokenizer,
        add_generation_prompt: bool = True,
        tools: Sequence[Message] | None = None,
    ) -> list[int]:
        """The conversation as token ids. Arguments and errors as in `render`.

        Control tokens come from the template alone; what users wrote is plain text, whatever it looks like (see
        stand_ins.py). Otherwise the ids are those of render's text. If the vocabulary asks for BOS and the
        template has not written it, it is put first; it is never there twice.
        """
        checked, checked_tools = _checked_messages(messages), _checked_tools(tools)
        stand_ins = StandIns(tokenizer.special_tokens, [self.source, *_strings(checked), *_strings(checked_tools)])
        text = self._render(stand_ins.protect(checked), stand_ins.protect(checked_tools), add_generation_prompt)
        ids: list[int] = []
        for part, special_id in tokenizer.split_special(text):
            ids += tokenizer.encode(stand_ins.restore(part)) if special_id is None else [special_id]
        if tokenizer.add_bos and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
            ids.insert(0, tokenizer.bos_id)
        return ids

    def _render(self, messages: list[Any], tools: list[Any] | None, add_generation_prompt: bool) -> str:
        variables = {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        try:
            return self._sandbox.render(self._template, {**self._variables, **variables})
        except ChatTemplateError:  # raise_exception
            raise
        except Exception as error:  # see __init__
            raise ChatTemplateError(f"the chat template failed on these messages: {_one_line(error)}") from None


def _raise_exception(message: object) -> None:
    raise ChatTemplateError(f"the chat template refuses these messages: {' '.join(str(message).split())[:300]}")


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())[:300]
    return text if isinstance(error, jinja2.TemplateError) and text else f"{type(error).__name__}: {text}"


def _checked_messages(messages: Any) -> list[dict[str, Any]]:
    """The messages in the one form that templates know. Raises ParameterError naming the bad one."""
    if not isinstance(messages, (list, tuple)):
        raise ParameterError(f"messages must be a list of messages, not {type(messages).__name__}")
    if not messages:
        raise ParameterError("messages is empty; give at least one message")
    return [_checked_message(message, f"message {number}") for number, message in enumerate(messages, start=1)]


def _checked_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ParameterError(f'{where} must be {{"role": ..., "content": ...}}, not {type(message).__name__}')
    if not isinstance(message.get("role"), str):
        raise ParameterError(f'{where} needs a "role" that is text, such as "user"; it has {message.get("role")!r:.80}')
    if "content" not in message and not message.get("tool_calls"):
        raise ParameterError(f'{where} has no "content"')
    content = message.get("content")
    if content is None:
        content = ""
    elif isinstance(content, (list, tuple)):
        content = "".join(_text_of(part, f"{where}, part {i}") for i, part in enumerate(content, start=1))
    elif not isinstance(content, str):
        raise ParameterError(f"{where}: content must be text or a list of text parts, not {type(content).__name__}")
    checked: dict[str, Any] = _checked_json({**message, "content": content}, where)
    return checked


def _text_of(part: Any, where: str) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise ParameterError(f'{where} must be {{"type": "text", "text": ...}}; {kind!r:.80} is not supported')
    text: str = part["text"]
    return text


def _checked_tools(tools: Any) -> list[Any] | None:
    if tools is None:
        return None
    if not isinstance(tools, (list, tuple)) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ParameterError("tools must be a list of dictionaries, each the JSON description of one tool")
    return [_checked_json(tool, f"tool {number}") for number, tool in enumerate(tools, start=1)]


def _checked_json(value: Any, where: str, depth: int = 0) -> Any:
    """A copy made of dict, list, str, numbers, bool and None only, all text such that UTF-8 can carry it."""
    if depth > 100:
        raise ParameterError(f"{where} is nested more than 100 levels deep")
    if isinstance(value, str):
        return replace_surrogates(str(value))
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Mapping):
        if not all(isinstance(name, str) for name in value):
            raise ParameterError(f"{where} has a key that is not text")
        return {replace_surrogates(name): _checked_json(item, where, depth + 1) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_checked_json(item, where, depth + 1) for item in value]
    raise ParameterError(f"{where} holds a {type(value).__name__}, which is not JSON")


def _strings(value: Any) -> Iterator[str]:
    """Every string in it, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
