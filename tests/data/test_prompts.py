from __future__ import annotations

import pytest

from tests.text.samples import TURNS_TEMPLATE, byte_level
from unison.config.schema import DataConfig
from unison.core.errors import ConfigError, DataError
from unison.data.cursor import PromptCursor
from unison.data.prompts import PromptEncoder, draw_prompts, encode_all, encode_prompt
from unison.data.source import PromptRow
from unison.text.tokenizer import Tokenizer

CHATTY, PLAIN = Tokenizer(byte_level(TURNS_TEMPLATE)), Tokenizer(byte_level())


def test_a_raw_prompt_is_encoded_as_it_is() -> None:
    ids = encode_prompt(PromptRow("r", "3+5=<|e|>"), CHATTY, DataConfig())
    assert ids == CHATTY.encode("3+5=<|e|>")
    assert CHATTY.eos_token_id not in ids


def test_control_tokens_of_a_raw_prompt_are_parsed_where_asked_for() -> None:
    ids = encode_prompt(PromptRow("r", "a<|e|>"), CHATTY, DataConfig(special_tokens="parse"))
    assert ids == CHATTY.encode("a<|e|>", special_tokens="parse")
    assert ids[-1] == CHATTY.eos_token_id


def test_a_string_becomes_a_user_turn_and_messages_a_chat() -> None:
    expected = CHATTY.render_chat([{"role": "user", "content": "hi"}])
    assert encode_prompt(PromptRow("r", "hi"), CHATTY, DataConfig(chat=True)) == expected
    for chat in (True, False):
        row = PromptRow("r", [{"role": "user", "content": "hi"}])
        assert encode_prompt(row, CHATTY, DataConfig(chat=chat)) == expected
    assert CHATTY.decode(expected).endswith("assistant\n")


@pytest.mark.parametrize("prompt", ["", "a\ud83c", [], [{"role": "user", "content": 3}]])
def test_a_prompt_that_cannot_be_encoded_names_its_row(prompt: str | list[dict[str, object]]) -> None:
    with pytest.raises(DataError, match=r"file\.jsonl:7: "):
        encode_prompt(PromptRow("file.jsonl:7", prompt), CHATTY, DataConfig())


def test_long_prompts_stop_the_run_or_are_skipped_and_counted() -> None:
    source = [PromptRow("a", "x" * 5), PromptRow("b", "x" * 6), PromptRow("c", "x")]
    with pytest.raises(DataError, match=r"b: the prompt has 6 tokens, over data\.max_prompt_tokens=5"):
        list(encode_all(source, PLAIN, DataConfig(max_prompt_tokens=5)))
    prompts = encode_all(source, PLAIN, DataConfig(max_prompt_tokens=5, on_long_prompt="skip"))
    for _ in range(2):
        assert [(prompt.row.row_id, len(prompt.token_ids)) for prompt in prompts] == [("a", 5), ("c", 1)]
    assert prompts.skipped == ["b: the prompt has 6 tokens, over data.max_prompt_tokens=5"]


def test_prompts_are_encoded_only_when_they_are_asked_for() -> None:
    source = [PromptRow("a", "x"), PromptRow("b", "")]
    first = next(iter(encode_all(source, PLAIN, DataConfig())))
    assert first.row.row_id == "a"


def test_skipped_prompts_are_replaced_by_the_next_ones_drawn() -> None:
    source = [PromptRow("a", "x"), PromptRow("b", "x" * 9), PromptRow("c", "y")]
    encoder = PromptEncoder(PLAIN, DataConfig(max_prompt_tokens=5, on_long_prompt="skip"))
    drawn = draw_prompts(PromptCursor(source, 0, False), encoder, 5, num_rows=3)
    assert [(prompt.row.row_id, prompt.epoch) for prompt in drawn] == [("a", 0), ("c", 0), ("a", 1), ("c", 1), ("a", 2)]
    assert len(encoder.skipped) == 1


def test_drawing_ends_where_no_prompt_is_short_enough() -> None:
    source = [PromptRow(str(i), "x" * 9) for i in range(4)]
    encoder = PromptEncoder(PLAIN, DataConfig(max_prompt_tokens=5, on_long_prompt="skip"))
    with pytest.raises(DataError, match="the last 8 prompts drawn were all left out"):
        draw_prompts(PromptCursor(source, 0, True), encoder, 2, num_rows=4)


def test_contradicting_settings_are_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="chat template"):
        encode_all([], PLAIN, DataConfig(chat=True))
    with pytest.raises(ConfigError, match="special_tokens"):
        encode_all([], CHATTY, DataConfig(chat=True, special_tokens="parse"))
