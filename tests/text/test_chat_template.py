from __future__ import annotations

from datetime import datetime

import pytest

from tests.text.samples import TURNS_TEMPLATE
from unison.core.errors import DataError, ModelError
from unison.text import template_sandbox
from unison.text.chat_template import ChatTemplate

USER = [{"role": "user", "content": "hi"}]


def render(source: str, messages: list[dict[str, object]] | None = None) -> str:
    return ChatTemplate(source).render(messages or USER)


def test_two_tool_results_in_a_row_become_one_user_turn() -> None:
    messages = [
        {"role": "user", "content": "read both"},
        {"role": "assistant", "content": "CALL a; CALL b"},
        {"role": "tool", "content": "A1"},
        {"role": "tool", "content": "B2"},
        {"role": "assistant", "content": "done"},
    ]
    assert ChatTemplate(TURNS_TEMPLATE).render(messages, add_generation_prompt=False) == (
        "<|s|>user\nread both<|e|>\n<|s|>assistant\nCALL a; CALL b<|e|>\n"
        "<|s|>user\n<obs>A1</obs>\n<obs>B2</obs><|e|>\n<|s|>assistant\ndone<|e|>\n"
    )


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''.__class__ }}",
        "{{ messages[0].get.__self__.__class__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ range.__globals__['__builtins__'] }}",
        "{{ dict.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ (messages | map(attribute='__class__') | list)[0].__mro__ }}",
        "{{ messages | attr('__class__') | attr('__mro__') }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ '{0.__globals__}'.format_map({'0': range}) }}",
        "{% set n = namespace(__class__=1) %}",
        "{% set n = namespace() %}{% set n.__class__ = messages %}",
        "{{ messages.append(1) }}",
        "{% do messages.clear() %}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os }}",
        "{{ lipsum() }}",
        "{{ strftime_now.__self__ }}",
        "{{ environment.tick.__func__ }}",
    ],
)
def test_a_template_reaches_nothing_outside(attack: str) -> None:
    messages: list[dict[str, object]] = [{"role": "user", "content": "hi"}]
    with pytest.raises((DataError, ModelError)):
        ChatTemplate(attack).render(messages)
    assert messages == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    "endless",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(3000000) %}{% endfor %}",
        "{{ range(10 ** 9) | list }}",
        "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for i in range(9) recursive %}{{ loop(range(9)) }}{% endfor %}",
    ],
)
def test_an_endless_template_is_stopped(endless: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_STEPS", 20_000)
    with pytest.raises(DataError):
        render(endless)


@pytest.mark.parametrize(
    "huge",
    [
        "{{ 'a' * 10 ** 10 }}",
        "{{ 10 ** 10 * [1] }}",
        "{{ 9 ** (9 ** 9) }}",
        "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "{{ 'a'.ljust(1000000000) }}",
        "{{ 'a' | center(1000000000) }}",
        "{{ messages | tojson(indent=1000000000) }}",
        "{% for i in range(90000) %}{{ messages[0].content * 200 }}{% endfor %}",
        "{% for i in range(90000) %}" + "x" * 200 + "{% endfor %}",
    ],
)
def test_huge_values_are_refused(huge: str) -> None:
    with pytest.raises(DataError, match="template"):
        ChatTemplate(huge).render(USER)


def test_the_budget_is_fresh_for_every_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_STEPS", 25)
    template = ChatTemplate("{% for i in range(10) %}{{ i }}{% endfor %}")
    assert [template.render(USER) for _ in range(5)] == ["0123456789"] * 5


def test_loops_macros_and_concatenation_mean_what_they_say() -> None:
    source = (
        "{% macro tag(name) %}[{{ name ~ '!' ~ 1 }}{{ caller() if caller else '' }}]{% endmacro %}"
        "{% for m in messages if m.role == 'user' %}{{ loop.index }}{{ tag(m.content) }}"
        "{% if loop.last %}{% break %}{% endif %},{% else %}none{% endfor %}"
        "{% call tag('c') %}body{% endcall %}"
        "{% set n = namespace(k=1) %}{% for i in range(3) %}{% set n.k = n.k * 2 %}{% endfor %}{{ n.k }}"
        "{{ dict(a=1).a }}{{ [1, 2] + [3] }}{{ 2 ** 5 }}{{ none }}{{ missing }}"
    )
    messages: list[dict[str, object]] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "y"},
        {"role": "user", "content": "z"},
    ]
    assert render(source, messages) == "1[x!1],2[z!1][c!1body]81[1, 2, 3]32None"


def test_tojson_writes_json_without_html_escapes() -> None:
    value = {"b": "<é> & '\"", "a": [1, 2.5, None, True]}
    template = ChatTemplate(
        "{{ v | tojson }}|{{ v | tojson(sort_keys=true, separators=(',', ':'), ensure_ascii=true) }}"
    )
    assert template.render(USER, v=value) == (
        '{"b": "<é> & \'\\"", "a": [1, 2.5, null, true]}|{"a":[1,2.5,null,true],"b":"<\\u00e9> & \'\\""}'
    )


def test_a_refusal_of_the_template_is_told() -> None:
    with pytest.raises(DataError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_the_clock_is_read_only_where_a_moment_is_given() -> None:
    source = "{{ strftime_now('%d %b %Y') if strftime_now is defined else 'fixed' }}"
    assert render(source) == "fixed"
    assert ChatTemplate(source).render(USER, now=datetime(2024, 7, 26)) == "26 Jul 2024"


def test_the_generation_tag_prints_its_body() -> None:
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}.") == "hi."


def test_blocks_leave_no_blank_lines() -> None:
    assert render("  {% if true %}\n  a\n  {% endif %}\nb") == "  a\nb"


def test_special_tokens_and_variables_are_seen() -> None:
    template = ChatTemplate(
        "{{ bos_token }}{{ mood }}{{ tools is none }}{{ add_generation_prompt }}", {"bos_token": "<s>"}
    )
    assert template.render(USER, mood="calm") == "<s>calmTrueTrue"


def test_text_parts_are_joined_where_the_template_wants_a_string() -> None:
    parts: list[dict[str, object]] = [
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}
    ]
    assert render("{{ messages[0].content }}", parts) == "one\ntwo"
    listing = "{% for p in messages[0].content %}{{ p.type }}:{{ p.text }};{% endfor %}"
    assert render(listing, parts) == "text:one;text:two;"


def test_keys_that_hold_nothing_are_missing_and_reasoning_has_both_names() -> None:
    source = "{{ messages[0].content is defined }} {{ messages[0].thinking }} {{ messages[0].reasoning_content }}"
    assert render(source, [{"role": "assistant", "content": None, "reasoning": "hm"}]) == "False hm hm"


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([], "empty"),
        ("hi", "list"),
        (["hi"], r"messages\[0\]"),
        ([{"content": "hi"}], "role"),
        ([{"role": "", "content": "hi"}], "role"),
        ([{"role": "user", "content": 3}], "int"),
        ([{"role": "user", "content": [{"type": "image"}]}], "image"),
        ([{"role": "user", "content": ["hi"]}], "part"),
        ([{"role": "user", "content": "hi", "when": datetime(2024, 1, 1)}], "datetime"),
        ([{"role": "user", "content": "hi", "x": {1: 2}}], "keys"),
    ],
)
def test_unusable_messages_are_named(messages: list[dict[str, object]], told: str) -> None:
    with pytest.raises(DataError, match=told):
        ChatTemplate("{{ messages }}").render(messages)


def test_endless_nesting_is_refused() -> None:
    nested: list[object] = []
    for _ in range(5000):
        nested = [nested]
    with pytest.raises(DataError, match="deep"):
        ChatTemplate("{{ messages }}").render([{"role": "user", "content": "hi", "x": nested}])


def test_a_template_that_does_not_parse_is_a_model_error() -> None:
    with pytest.raises(ModelError, match="line 2"):
        ChatTemplate("a\n{% if %}")
