"""Where chat templates run. A template comes with a model and is not trusted.

Covered: it cannot reach Python's internals, change what it is given, read the clock, or run for
ever. One rendering may take MAX_STEPS loop rounds, macro calls and numbers of ``range``, print
MAX_RENDERED_CHARS characters, and build values of that length by ``+``, ``*`` and ``~``.

Not covered: memory and time of one single filter or string method (``replace``, ``join``, a format
with a huge width), which can still build a large value out of small ones. Where a model folder is
hostile, run the whole process in a container with a memory limit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, Final

from jinja2 import Template, Undefined, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_STEPS: Final = 200_000
MAX_RENDERED_CHARS: Final = 8_000_000
MAX_NUMBER_ARGUMENT: Final = 1_000_000
"""Largest width or count that a filter or string method takes."""
MAX_POWER_BITS: Final = 4096

NONCHARACTERS: Final = frozenset(
    [chr(code) for code in range(0xFDD0, 0xFDF0)]
    + [chr(plane << 16 | end) for plane in range(17) for end in (0xFFFE, 0xFFFF)]
)
"""The 66 code points that Unicode sets aside for private use inside programs."""


class _Budget:
    def __init__(self) -> None:
        self.steps = MAX_STEPS
        self.characters = MAX_RENDERED_CHARS

    def spend_steps(self, count: int) -> None:
        self.steps -= count
        if self.steps < 0:
            raise SecurityError(f"the template takes more than {MAX_STEPS} steps")

    def spend_characters(self, count: int) -> None:
        self.characters -= count
        if self.characters < 0:
            raise SecurityError(f"the template renders more than {MAX_RENDERED_CHARS} characters")


_current: ContextVar[_Budget | None] = ContextVar("template_budget", default=None)


@contextmanager
def template_budget() -> Iterator[None]:
    """Give the renderings inside a fresh budget."""
    token = _current.set(_Budget())
    try:
        yield
    finally:
        _current.reset(token)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The dialect of chat templates (trim_blocks, lstrip_blocks, loop controls), with limits."""

    intercepted_binops = frozenset(["+", "*", "**"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationTag],
            finalize=_count_printed,
        )
        # lipsum prints random text: no template of a chat needs it.
        del self.globals["lipsum"]
        self.globals.update(
            range=_bounded_range, namespace=_PlainNamespace, dict=_plain_dict, raise_exception=_raise_exception
        )
        for name in ("batch", "center", "indent", "slice", "truncate", "wordwrap"):
            self.filters[name] = _bounded_filter(self.filters[name])
        self.filters["tojson"] = tojson

    def load(self, source: str) -> Template:
        """Compile ``source`` with its loops and macros metered. Raises TemplateSyntaxError."""
        return self.from_string(_Metered().visit(self.parse(source)))

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        # The base class returns an undefined value, which prints as nothing.
        raise SecurityError(f"the template asks for {attribute!r} of a {type(obj).__name__}, which is out of bounds")

    def tick(self, num_literal_characters: int) -> None:
        """Called at each loop round and macro call."""
        budget = _current.get()
        if budget is not None:
            budget.spend_steps(1)
            budget.spend_characters(num_literal_characters)

    def concatenate(self, *values: object) -> str:
        """The ``~`` operator."""
        texts = [str(value) for value in values]
        _check_length(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
            _check_length(len(left) + len(right))
        elif operator == "*":
            for items, count in ((left, right), (right, left)):
                if isinstance(items, (str, list, tuple)) and isinstance(count, int):
                    _check_length(len(items) * max(count, 0))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):  # noqa: SIM102
            if left.bit_length() * right > MAX_POWER_BITS:
                raise SecurityError(f"the template computes a power of more than {MAX_POWER_BITS} bits")
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        # The odd names are the base class's: a template may pass `self` or `context` as keywords.
        if isinstance(getattr(__obj, "__self__", None), str):
            _check_numbers(args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)


class _Metered(NodeTransformer):
    """Puts a call of ``tick`` into each loop and macro body, and ``concatenate`` in place of ``~``."""

    def _meter(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        printed = sum(len(data.data) for part in node.body for data in _template_data(part))
        tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [nodes.Const(printed)], [], None, None)
        node.body.insert(0, nodes.ExprStmt(tick).set_lineno(node.lineno))
        return node  # type: ignore[no-any-return]

    visit_For = visit_Macro = visit_CallBlock = _meter

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        call = nodes.Call(nodes.EnvironmentAttribute("concatenate"), node.nodes, [], None, None)
        return call.set_lineno(node.lineno)


class _GenerationTag(Extension):
    """``{% generation %}``: marks what the assistant wrote; it prints its body unchanged."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _PlainNamespace(Namespace):
    """``namespace()`` without underscored names, which would reach into the object itself."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, rest = args[0], args[1:]
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained on: no HTML escapes. Noncharacters are never escaped."""
    if indent is not None:
        _check_numbers((indent,), {})
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    if not ensure_ascii:
        return text
    return "".join(c if c.isascii() or c in NONCHARACTERS else json.dumps(c)[1:-1] for c in text)


def _template_data(node: nodes.Node) -> Iterator[nodes.TemplateData]:
    if isinstance(node, nodes.TemplateData):
        yield node
    yield from node.find_all(nodes.TemplateData)


def _count_printed(value: Any) -> Any:
    budget = _current.get()
    if budget is None:
        return value
    text = str(value)
    budget.spend_characters(len(text))
    return text


def _bounded_range(*args: int) -> range:
    values = range(*args)
    budget = _current.get()
    if budget is not None:
        budget.spend_steps(len(values))
    return values


def _bounded_filter(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _check_numbers(args, kwargs)
        return function(*args, **kwargs)

    return bounded


def _plain_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"the template sets the name {name!r} in a namespace; names may not begin with _")


def _check_length(length: int) -> None:
    if length > MAX_RENDERED_CHARS:
        raise SecurityError(f"the template builds a value of more than {MAX_RENDERED_CHARS} items")


def _check_numbers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and abs(value) > MAX_NUMBER_ARGUMENT:
            raise SecurityError(f"the template passes {value}, more than {MAX_NUMBER_ARGUMENT}, to a filter or method")
