"""The training prompts as a run opens them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.text.samples import TURNS_TEMPLATE, byte_level
from unison.config.schema import DataConfig, MixConfig
from unison.core.errors import ConfigError, DataError
from unison.data.source import PromptRow
from unison.data.training import TrainingPrompts, open_training
from unison.text.tokenizer import Tokenizer

CHATTY, PLAIN = Tokenizer(byte_level(TURNS_TEMPLATE)), Tokenizer(byte_level())
USER_MODULE = """
import numpy as np

LIST = []

def short(row):
    return len(row.prompt) < 4

def numpy_says(row):
    return np.bool_(row.label > 1)

def nothing(row):
    return False

def broken(row):
    return 1 / (row.label - 2) < 9

def number(row):
    return 1
"""


@pytest.fixture
def filters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "filters_of_a_user.py").write_text(USER_MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [entry for entry in sys.path if entry])
    yield "filters_of_a_user"
    sys.modules.pop("filters_of_a_user", None)


def write(path: Path, prompts: list[Any]) -> str:
    path.write_text("".join(json.dumps({"prompt": prompt, "label": i}) + "\n" for i, prompt in enumerate(prompts)))
    return str(path)


def opened(config: DataConfig, tokenizer: Tokenizer = PLAIN, **more: Any) -> TrainingPrompts:
    return open_training(config, tokenizer, 0, **more)


def drawn(prompts: TrainingPrompts, n: int) -> list[Any]:
    return [prompt.row.label for prompt in prompts.draw(n)]


def test_an_epoch_has_each_usable_row_once(tmp_path: Path, filters: str) -> None:
    path = write(tmp_path / "a.jsonl", ["aa", "", "aaa", "aaaaaa", "a", "aaaaa", "bbb"])
    config = DataConfig(
        train=path, on_bad_row="skip", filter=f"{filters}:numpy_says", min_prompt_tokens=2, max_prompt_tokens=5,
        on_long_prompt="skip", shuffle=False,
    )  # fmt: skip
    prompts = opened(config)
    assert drawn(prompts, 7) == [2, 5, 6, 2, 5, 6, 2]
    assert (prompts.longest, prompts.num_rows, prompts.num_skipped) == (5, 3, 4)
    told = "\n".join(prompts.notes)
    assert "1 prompt was skipped: broken\nskipped: " in told
    assert "skipped: left out by data.filter\nskipped: a.jsonl:1" in told
    assert "a.jsonl:4: the prompt has 6 tokens, over data.max_prompt_tokens=5" in told
    assert "a.jsonl:5: the prompt has 1 tokens, under data.min_prompt_tokens=2" in told


@pytest.mark.parametrize(
    ("name", "error", "told"),
    [
        ("nothing", DataError, "left none of the 3 rows, a.jsonl:1 the first"),
        ("broken", DataError, "failed on a.jsonl:3: ZeroDivisionError"),
        ("number", DataError, "answered 1 for a.jsonl:1; it must be true or false"),
        ("LIST", ConfigError, "is a list; name a function"),
        ("shrt", ConfigError, "did you mean short"),
    ],
)
def test_a_filter_that_cannot_be_meant_is_told(
    tmp_path: Path, filters: str, name: str, error: type[Exception], told: str
) -> None:
    path = write(tmp_path / "a.jsonl", ["a", "b", "c"])
    with pytest.raises(error, match=told):
        opened(DataConfig(train=path, filter=f"{filters}:{name}"))


def test_a_mixture_names_its_parts_in_rows_notes_and_errors(tmp_path: Path, filters: str) -> None:
    path = write(tmp_path / "a.jsonl", ["aa", "aaaaaa", "bbb"])
    mix = {"own": MixConfig(train=path, filter=f"{filters}:short", weight=3.0), "sums": MixConfig(source="sums")}
    prompts = opened(DataConfig(mix=mix))
    rows = [prompt.row for prompt in prompts.draw(40)]
    assert sum(row.row_id.startswith("own/a.jsonl:") for row in rows) == 30
    assert {row.metadata["mix_part"] for row in rows} == {"own", "sums"}
    assert "skipped: own/a.jsonl:2" in prompts.notes
    for part, told in (
        (MixConfig(source="sums", options={"shotz": 1}), r"data\.mix\.bad: data\.options\.shotz is unknown"),
        (MixConfig(), r"data\.mix\.bad: data\.mix\.bad\.train is not set"),
        (MixConfig(train=path, prompt_key="q"), r"data\.mix\.bad\.prompt_key names it, and the row has prompt"),
        (MixConfig(train=path, label_key="q"), r"data\.mix\.bad\.label_key names it, and the row has"),
        (MixConfig(train=path, options={"a": 1}), r"data\.mix\.bad\.options=.* with data\.mix\.bad\.source='jsonl'"),
        (MixConfig(train=path, filter=f"{filters}:nothing"), r"data\.mix\.bad: data\.filter"),
    ):
        with pytest.raises((ConfigError, DataError), match=told):
            opened(DataConfig(mix={**mix, "bad": part}))


def test_settings_that_a_mixture_replaces_are_refused(tmp_path: Path) -> None:
    mix = {"sums": MixConfig(source="sums")}
    for name, value in (("train", "x"), ("filter", "m:f"), ("source", "sums"), ("prompt_key", "q")):
        with pytest.raises(ConfigError, match=f"data.{name}='{value}' has no effect with data.mix"):
            opened(DataConfig(mix=mix, **{name: value}))
    assert opened(DataConfig(mix=mix, source="sums"), held_out=True)


def test_parts_and_held_out_data_of_one_source_do_not_meet() -> None:
    from unison.data.source import load_source

    prompts = opened(DataConfig(mix={"a": MixConfig(source="sums"), "b": MixConfig(source="sums")}))
    held_out = load_source(DataConfig(source="sums"), "eval", 0)
    asked = {row.row_id.removeprefix("sums:") for row in (held_out[i] for i in range(len(held_out)))}
    assert asked.isdisjoint({prompt.row.row_id.partition("sums:")[2] for prompt in prompts.draw(1000)})


@pytest.mark.parametrize(
    ("how", "kept"),
    [("truncate_left", [2, 3, 4, 5, 6]), ("truncate_right", [0, 1, 2, 3, 4]), ("truncate_middle", [0, 1, 2, 5, 6])],
)
def test_long_raw_prompts_lose_the_tokens_that_are_asked_for(tmp_path: Path, how: Any, kept: list[int]) -> None:
    text = "x1y2z3w"
    ids = PLAIN.encode(text)
    assert len(set(ids)) == 7
    path = write(tmp_path / "a.jsonl", [text, "xy"])
    prompts = opened(DataConfig(train=path, max_prompt_tokens=5, on_long_prompt=how, shuffle=False))
    first, second = prompts.draw(2)
    assert (first.token_ids, second.token_ids) == ([ids[place] for place in kept], PLAIN.encode("xy"))
    assert first.row.prompt == text
    assert prompts.num_skipped == 0
    assert prompts.notes == [
        f"prompts cut to 5 tokens by data.on_long_prompt={how}: 1, the first of them a.jsonl:1 with its 7 tokens"
    ]


def test_a_chat_is_never_cut(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="applies to raw prompts only"):
        opened(DataConfig(chat=True, on_long_prompt="truncate_left"), CHATTY)
    path = write(tmp_path / "a.jsonl", ["raw" * 30, [{"role": "user", "content": "hi" * 30}]])
    with pytest.raises(DataError, match=r"a\.jsonl:2: .* applies to raw prompts only"):
        opened(DataConfig(train=path, max_prompt_tokens=30, on_long_prompt="truncate_left"), CHATTY)


def test_a_system_prompt_stands_before_chats_without_one(tmp_path: Path) -> None:
    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "b"}]
    path = write(tmp_path / "a.jsonl", ["a", own])
    prompts = opened(DataConfig(train=path, chat=True, system_prompt="ours", shuffle=False), CHATTY)
    first, second = (prompt.token_ids for prompt in prompts.draw(2))
    assert first == CHATTY.render_chat([{"role": "system", "content": "ours"}, {"role": "user", "content": "a"}])
    assert second == CHATTY.render_chat(own)


def test_template_options_reach_the_template(tmp_path: Path) -> None:
    template = "{% if enable_thinking is defined and enable_thinking %}<|s|>think\n{% endif %}" + TURNS_TEMPLATE
    thinker = Tokenizer(byte_level(template))
    path = write(tmp_path / "a.jsonl", ["a"])
    config = DataConfig(train=path, chat=True, template_options={"enable_thinking": True})
    (prompt,) = opened(config, thinker).draw(1)
    assert prompt.token_ids == thinker.render_chat([{"role": "user", "content": "a"}], enable_thinking=True)
    assert thinker.decode(prompt.token_ids, skip_special=False).startswith("<|s|>think")
    for name, told in (
        ("enable_thinkng", r"does not read it; did you mean enable_thinking\? \(it reads enable_thinking\)"),
        ("messages", "is not for a configuration to set"),
        ("bos_token", "is not for a configuration to set"),
        ("add_generation_prompt", "is not for a configuration to set"),
        ("now", "is not for a configuration to set"),
        ("not a name", "does not read it"),
    ):
        with pytest.raises(ConfigError, match=told):
            opened(DataConfig(train=path, chat=True, template_options={name: True}), thinker)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"system_prompt": "x"}, "system_prompt='x' has no effect: no prompt is a chat"),
        ({"system_prompt": " ", "chat": True}, "system_prompt is empty"),
        ({"template_options": {"enable": True}}, "does not read it"),
        ({"min_prompt_tokens": 9, "max_prompt_tokens": 5}, "min_prompt_tokens=9 is above"),
        ({"curriculum_low": 0.1}, "curriculum_low=0.1 has no effect"),
        ({"curriculum_rest": 1}, "curriculum_rest=1 has no effect"),
        ({"curriculum": "success_rate", "curriculum_low": 0.9, "curriculum_high": 0.1}, "every prompt would rest"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(tmp_path: Path, settings: dict[str, Any], told: str) -> None:
    path = write(tmp_path / "a.jsonl", ["a"])
    with pytest.raises(ConfigError, match=told):
        opened(DataConfig(train=path, **settings), CHATTY)


def test_a_length_that_no_prompt_has_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ["aaaa", "bbbb"])
    with pytest.raises(DataError, match=r"each of the 2 prompts is left out for its length; a\.jsonl:2"):
        opened(DataConfig(train=path, max_prompt_tokens=3, on_long_prompt="skip"))


class Generated:
    """Rows that are made when they are asked for; every third is too long."""

    identity = "generated"

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int, /) -> PromptRow:
        self.asked.append(index)
        return PromptRow(str(index), "x" * (9 if index % 3 == 2 else 3), index)


def test_generated_rows_are_made_when_they_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Generated()
    monkeypatch.setattr("unison.data.training.load_source", lambda *_: source)
    prompts = opened(DataConfig(source="x", max_prompt_tokens=5, on_long_prompt="skip", shuffle=False))
    assert len(source.asked) == 16
    assert any("10000 prompts are made when they are drawn" in note for note in prompts.notes)
    assert drawn(prompts, 4) == [0, 1, 3, 4]
    state = prompts.cursor.state_dict()
    assert len(source.asked) < 30
    assert drawn(prompts, 1) == [6]
    prompts.cursor.load_state_dict(state)
    assert drawn(prompts, 1) == [6]


def test_long_lists_of_skipped_rows_are_cut(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [""] * 25 + ["a"])
    notes = opened(DataConfig(train=path, on_bad_row="skip")).notes
    assert (notes[0], notes[-1], len(notes)) == ("25 prompts were skipped: broken", "skipped: ... and 15 more", 12)
