"""JSON answers against a schema; schemas that lead outside themselves."""

from __future__ import annotations

import json
import socket

import pytest

from unison.rewards.schema import json_schema

pytest.importorskip("jsonschema")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('{"name": "x", "age": 3}', 1.0),
        ('Sure: ```json\n{"name": "x"}\n```', 1.0),
        ('{"name": 1} no, {"name": "x"}', 1.0),
        ('{"name": "x"} no, {"name": 1}', 0.0),
        ('{"name": "x", "age": -1}', 0.0),
        ('{"name": "x", "more": 1}', 0.0),
        ("{}", 0.0),
        ("name: x", 0.0),
        ('{"name": "x"', 0.0),
        ('{"name": "x", "age": 1e999}', 0.0),
        ('{"name": "x", "age": ' + "9" * 5000 + "}", 0.0),
        ('{"name": ' + "[" * 500 + "]" * 500 + "}", 0.0),
    ],
)
def test_valid_is_one_and_everything_else_zero(text: str, score: float) -> None:
    assert json_schema(text, SCHEMA) == score
    assert json_schema(text, json.dumps(SCHEMA)) == score
    assert json_schema(text, None, schema=SCHEMA) == score


def test_references_inside_the_schema_work() -> None:
    tree = {"$defs": {"t": {"type": "object", "additionalProperties": {"$ref": "#/$defs/t"}}}, "$ref": "#/$defs/t"}
    assert json_schema('{"a": {"b": {}}}', tree) == 1.0
    assert json_schema('{"a": {"b": 1}}', tree) == 0.0
    assert json_schema('{"a":' * 60 + "{}" + "}" * 60, tree) == 1.0


@pytest.mark.parametrize(
    "schema",
    [
        None,
        3,
        "no json",
        "[1]",
        {"type": "no such type"},
        {"$ref": "http://127.0.0.1:9/schema.json"},
        {"properties": {"a": {"$ref": "file:///etc/passwd"}}},
        {"$ref": "#/no/such/place"},
        {"$ref": "#"},
        {"properties": {"a": {"$dynamicRef": "https://example.org/x#y"}}},
    ],
)
def test_a_schema_that_cannot_be_used_raises(schema: object) -> None:
    with pytest.raises(ValueError):
        json_schema('{"a": 1}', schema)


def test_nothing_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    with pytest.raises(ValueError):
        json_schema("{}", {"$id": "http://127.0.0.1:9/a", "$ref": "#/b"})
    assert json_schema("{}", {"$schema": "http://127.0.0.1:9/draft", "type": "object"}) == 1.0


@pytest.mark.parametrize(
    "schema",
    [{"type": "objekt", "properties": {f"key number {i}": {"minimum": i} for i in range(99)}}, {"$ref": "#/a b"}],
)
def test_what_is_wrong_with_a_schema_is_one_line_of_whole_words(schema: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="cannot be used") as refused:
        json_schema("{}", schema)
    told = str(refused.value)
    assert "\n" not in told and len(told) < 300
    if "type" in schema:
        assert "at $.type: 'objekt' is not valid under any of the given schemas" in told
