"""The sandbox that chat templates run in: Jinja2's immutable one, with limits on time and memory.

A chat template is a program that came with a model file, so it is not trusted. Jinja2's
ImmutableSandboxedEnvironment keeps it from Python's internals and from changing what it is given, and
refuses a range of more than 100,000 numbers. What a template could still do is to run for ever or to
fill the memory. So one rendering has a budget of steps (a turn of a loop, or a call), and there is a
limit on what +, ~, *, ** and % build and on the text that comes out.

Not bounded: what one filter or method makes at once ("a" | center(10000000000), "a".ljust(10000000000)),
what {% set %} and macros collect within the steps, and the work inside a single step. A hostile template
can still use up memory or minutes; it cannot read, write or run anything.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.visitor

MAX_STEPS = 300_000  # turns of loops and calls, in one rendering
MAX_LENGTH = 10_000_000  # characters of a text, items of a list
_MAX_BITS = 10_000  # of a whole number

# Names that no template can write, because of the dot.
_BUDGET, _COUNTED, _JOINED = "minserve.budget", "minserve.counted", "minserve.joined"


class _Budget:
    """The steps that one rendering may still take."""

    def __init__(self) -> None:
        self._left = MAX_STEPS

    def spend(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise jinja2.sandbox.SecurityError(f"it takes more than {MAX_STEPS:,} steps")


def _check_length(length: int) -> None:
    if length > MAX_LENGTH:
        raise jinja2.sandbox.SecurityError(f"it makes a text or a list of more than {MAX_LENGTH:,} items")


@jinja2.pass_context
def _counted(context: jinja2.runtime.Context, items: Iterable[Any]) -> Iterator[Any]:
    """The items of a for loop, each paid for."""
    budget = context[_BUDGET]
    for item in items:
        budget.spend()
        yield item


@jinja2.pass_context
def _joined(context: jinja2.runtime.Context, parts: Iterable[Any]) -> str:
    """What the ~ operator makes. (The context only keeps Jinja2 from running it at compile time.)"""
    texts = [str(part) for part in parts]
    _check_length(sum(map(len, texts)))
    return "".join(texts)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as Hugging Face's templates expect it. (Jinja2's own filter escapes < and > for web pages.)"""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _AddLimits(jinja2.visitor.NodeTransformer):
    """Sends the loops and the ~ operators of a parsed template through the filters above."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:  # noqa: N802  (Jinja2's name)
        self.generic_visit(node)
        node.iter = jinja2.nodes.Filter(node.iter, _COUNTED, [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:  # noqa: N802
        self.generic_visit(node)
        parts = jinja2.nodes.List(node.nodes, lineno=node.lineno)
        return jinja2.nodes.Filter(parts, _JOINED, [], [], None, None, lineno=node.lineno)


class _GenerationBlock(jinja2.ext.Extension):
    """{% generation %}...{% endgeneration %}: marks, for training, what the model wrote. Here: its contents."""

    tags = {"generation"}  # noqa: RUF012  (Jinja2 reads it from the class)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateSandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Compiles and renders templates as Hugging Face does: its whitespace rules, filters and tags."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        # Without trim_blocks and lstrip_blocks every tag on a line of its own leaves an empty line behind.
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock])
        del self.globals["lipsum"]  # random filler text, as much as asked for
        self.filters.update({_COUNTED: _counted, _JOINED: _joined, "tojson": _tojson})

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        template: jinja2.nodes.Template = _AddLimits().visit(super()._parse(source, name, filename))
        return template

    def call(__self, __context: jinja2.runtime.Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call something that a template names. Counts as a step."""
        __context[_BUDGET].spend()
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """left operator right, if the result is not too large."""
        if isinstance(left, int) and isinstance(right, int):
            if operator == "**" and left.bit_length() * max(right, 0) > _MAX_BITS:
                raise jinja2.sandbox.SecurityError("it computes a number that is too large")
            if operator == "*" and left.bit_length() + right.bit_length() > _MAX_BITS:
                raise jinja2.sandbox.SecurityError("it computes a number that is too large")
        elif operator == "*":
            items, times = (right, left) if isinstance(left, int) else (left, right)
            if isinstance(times, int) and hasattr(items, "__len__"):
                _check_length(len(items) * times)
        elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            _check_length(len(left) + len(right))
        elif operator == "%" and isinstance(left, str) and re.search(r"\d{5}|\*", left):
            raise jinja2.sandbox.SecurityError("it formats to a width that is too large")
        return super().call_binop(context, operator, left, right)

    def render(self, template: jinja2.Template, variables: Mapping[str, Any]) -> str:
        """The template's text. Raises what the template raises, and SecurityError beyond the limits."""
        parts: list[str] = []
        length = 0
        for part in template.generate({**variables, _BUDGET: _Budget()}):
            length += len(part)
            _check_length(length)
            parts.append(part)
        return "".join(parts)
