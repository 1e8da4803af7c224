from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unison.config import diff_to_defaults, dump_toml, load_config
from unison.config.fields import NULL, Field, fields
from unison.config.schema import TrainConfig

BASE = ["--model.path", "tiny", "--data.source", "sums"]
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda text: text != NULL)
NUMBERS = {
    "integer": st.integers(64, 256),
    "number": st.floats(0.01, 0.99),
    "boolean": st.booleans(),
}


def values(field: Field) -> st.SearchStrategy[Any]:
    """Values the field takes, whatever its bounds: 64 to 256, multiples of 64 and 0.01 to 0.99 fit."""
    match field.kind:
        case "choice":
            plain: st.SearchStrategy[Any] = st.sampled_from(field.choices)
        case "list":
            plain = st.lists(TEXT.filter(bool) if field.item_kind == "text" else NUMBERS["integer"], max_size=3)
        case "table":
            plain = st.dictionaries(TEXT.filter(bool), st.one_of(TEXT, *NUMBERS.values()), max_size=3)
        case "integer" if "multiple of 64" in field.bounds:
            plain = st.integers(1, 64).map(lambda count: 64 * count)
        case "number" if field.bounds == "> 1":
            plain = st.floats(1.01, 100)
        case "text":
            plain = TEXT.filter(lambda text: bool(text.strip()))
        case kind:
            plain = NUMBERS[kind]
    return st.none() | plain if field.optional else plain


@st.composite
def configs(draw: st.DrawFn) -> TrainConfig:
    nested: dict[str, dict[str, Any]] = {}
    entries = draw(st.lists(st.sampled_from(["a", "b-2", "C_3"]), unique=True))
    for field in fields().values():
        for name in entries if field.named else [""]:
            *tables, key = field.path.replace("*", name).split(".")
            place: dict[str, Any] = nested
            for table in tables:
                place = place.setdefault(table, {})
            if field.required or draw(st.integers(0, 4)) == 0:
                place[key] = draw(values(field))
    nested.setdefault("data", {})["source"] = "sums"
    nested.get("run", {}).pop("name", None)  # a name of a folder
    reward = nested.get("reward", {})
    # These contradict others, which the configuration refuses.
    for key in ("isolation", *(("function", "options") if "parts" in reward else ())):
        reward.pop(key, None)
    nested.get("rollout", {}).pop("refill", None)
    _pop_what_servers_do_not_take(nested)
    return msgspec.convert(nested, TrainConfig)


def _pop_what_servers_do_not_take(nested: dict[str, Any]) -> None:
    if nested.get("rollout", {}).get("engine") != "server":
        nested.pop("server", None)
        return
    server = nested.get("server", {})
    for key in (
        "urls",
        "count",
        *(("bucket_mb",) if server.get("transport") == "disk" else ("disk_dir", "disk_delta")),
    ):
        server.pop(key, None)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(config=configs())
def test_a_dump_loads_back_to_the_same_configuration(tmp_path: Path, config: TrainConfig) -> None:
    path = tmp_path / "dump.toml"
    sources = {name: "odd\nsource\x00.toml" for name in fields()}
    path.write_text(dump_toml(config, sources), encoding="utf-8", newline="")
    assert load_config([path]).config == config
    path.write_text(dump_toml(config), encoding="utf-8", newline="")
    assert load_config([path]).config == config


def test_a_dump_names_each_key_and_the_source_of_each_set_value(tmp_path: Path) -> None:
    path = tmp_path / "conf.toml"
    path.write_text("[trainer]\nsteps = 3\n[data.options]\nmax_operand = 30\n")
    loaded = load_config([path], [*BASE, "--rollout.stop", '["\\n"]', "--data.label_key", "null"])
    lines = dump_toml(loaded.config, loaded.sources).splitlines()
    assert {line.lstrip("# ").split(" ")[0] for line in lines} >= {
        field.key for field in fields().values() if field.kind != "table" and field.named is None
    }
    assert {line.split("# from ")[0].rstrip(): line.split("# from ")[1] for line in lines if "# from " in line} == {
        'path = "tiny"': "--model.path",
        'source = "sums"': "--data.source",
        'label_key = "null"': "--data.label_key",
        "max_operand = 30": str(path),
        'stop = ["\\n"]': "--rollout.stop",
        "steps = 3": str(path),
    }
    assert "# dir = null" in lines


def test_the_difference_to_the_defaults_is_what_was_set() -> None:
    config = load_config([], [*BASE, "--trainer.steps", "3", "--trainer.beta1", "0.9"]).config
    assert diff_to_defaults(config) == {
        "model.path": (msgspec.NODEFAULT, "tiny"),
        "data.source": ("jsonl", "sums"),
        "trainer.steps": (20, 3),
    }


def test_values_without_toml_notation_are_refused() -> None:
    from unison.config.dump import toml_value

    with pytest.raises(TypeError, match="set"):
        toml_value({1})
