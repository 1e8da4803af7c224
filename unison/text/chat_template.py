"""Chat templates: the text of a conversation, rendered in a sandbox of our own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, Final

from jinja2.exceptions import TemplateError, TemplateSyntaxError
from jinja2.meta import find_undeclared_variables

from unison.core.errors import DataError, ModelError
from unison.text.template_sandbox import TemplateEnvironment, template_budget

Message = Mapping[str, Any]

PART_SEPARATOR: Final = "\n"
"""Between the text parts of one message, where the template takes plain strings only."""
MAX_DEPTH: Final = 64
"""Of lists and mappings within a message."""
_REASONING_KEYS: Final = ("reasoning_content", "thinking", "reasoning")
_PROBE: Final = "content-part-probe"


class ChatTemplate:
    """One jinja template, compiled.

    ``special_tokens`` (``bos_token``, ``eos_token``, ...) are variables that every rendering sees;
    ``variables`` are the names that the template reads from outside, theirs among them.
    Raises ModelError where the template does not parse.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        try:
            environment = TemplateEnvironment()
            self._template = environment.load(source)
            self.variables = frozenset(find_undeclared_variables(environment.parse(source)))
        except (TemplateSyntaxError, RecursionError) as error:
            line = getattr(error, "lineno", 0)
            raise ModelError(f"the model's chat template does not parse: line {line}: {error}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        now: datetime | None = None,
        **variables: Any,
    ) -> str:
        """The conversation as text. Raises DataError where messages or template will not have it.

        Messages are used as ``prepare_messages`` leaves them. Text parts of one message are joined
        by a newline where the template takes plain strings only. ``strftime_now`` exists only if
        ``now`` is given, and tells that moment: a prompt never depends on the clock by itself, and
        a template that asks whether the function exists falls back to its fixed date.
        """
        plain = prepare_messages(messages)
        if not self.takes_parts:
            plain = [_join_parts(message) for message in plain]
        scope: dict[str, Any] = {
            **self._special_tokens,
            "tools": None,
            "documents": None,
            **plain_data(variables, "template variables"),
            "messages": plain,
            "add_generation_prompt": add_generation_prompt,
        }
        if now is not None:
            scope["strftime_now"] = now.strftime
        return self._run(scope)

    @cached_property
    def takes_parts(self) -> bool:
        """Whether content may be a list of parts: found out by rendering one."""
        probe = [{"role": "user", "content": [{"type": "text", "text": _PROBE}]}]
        scope = {**self._special_tokens, "messages": probe, "add_generation_prompt": False}
        try:
            text = self._run(scope)
        except DataError:
            return False
        return _PROBE in text and "'text'" not in text and '"text"' not in text

    def _run(self, scope: Mapping[str, Any]) -> str:
        try:
            with template_budget():
                return self._template.render(scope)
        except TemplateError as error:
            raise DataError(f"the chat template refused the messages: {error}") from error
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise DataError(f"the chat template failed on the messages: {type(error).__name__}: {error}") from error
        except (RecursionError, MemoryError) as error:
            raise DataError(f"the chat template exhausted its limits: {type(error).__name__}") from error


def prepare_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Checked copies of the messages, out of plain JSON types.

    Keys that hold None are left out (templates handle a missing key better), and reasoning is found
    under each name in use: ``reasoning_content`` and ``thinking``. Raises DataError where there is
    no message, or one is no mapping, has no role, or has content that is neither text nor text parts.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise DataError(f"messages must be a list of {{role, content}}, not {type(messages).__name__}")
    if not messages:
        raise DataError("messages is empty; a conversation needs at least one message")
    return [_prepare(message, f"messages[{index}]") for index, message in enumerate(messages)]


def plain_data(value: Any, where: str, *, depth: int = 0) -> Any:
    """A copy made of dict, list, str, int, float, bool and None only, so that a template meets no methods of ours."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if depth > MAX_DEPTH:
        raise DataError(f"{where[:80]}... is nested more than {MAX_DEPTH} deep")
    if isinstance(value, Mapping):
        return {
            _plain_key(key, where): plain_data(item, f"{where}[{key!r}]", depth=depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [plain_data(item, f"{where}[{index}]", depth=depth + 1) for index, item in enumerate(value)]
    raise DataError(f"{where} holds a {type(value).__name__}; only JSON values can be rendered")


def _plain_key(key: object, where: str) -> str:
    if type(key) is not str:
        raise DataError(f"{where} has the key {key!r}; keys must be strings")
    return key


def _prepare(message: Message, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise DataError(f"{where} must be a mapping with role and content, not {type(message).__name__}")
    plain = {key: item for key, item in plain_data(message, where).items() if item is not None}
    if not isinstance(plain.get("role"), str) or not plain["role"]:
        raise DataError(f"{where} has role {message.get('role')!r}; it must be a non-empty string")
    _check_content(plain.get("content", ""), where)
    reasoning = next((plain[key] for key in _REASONING_KEYS if key in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain


def _check_content(content: Any, where: str) -> None:
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise DataError(f"{where} has content of type {type(content).__name__}; give a string or a list of text parts")
    for part in content:
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise DataError(f'{where} has the content part {part!r}; only {{"type": "text", "text": ...}} is supported')


def _join_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": PART_SEPARATOR.join(part["text"] for part in content)}
