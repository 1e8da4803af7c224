from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, processors

from tests.text.samples import MARKUP, SPECIAL, byte_level, byte_tokens, real_folder, sentence_piece
from unison.core.errors import DataError, ModelError
from unison.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def small() -> Tokenizer:
    return Tokenizer(byte_level())


def test_a_saved_folder_loads_and_encodes_alike(tmp_path: Path) -> None:
    source = byte_level("{{ messages[0].content }}")
    source.save_pretrained(tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    text = "the quick café, 你好 🌍"
    assert tokenizer.encode(text) == source.encode(text, add_special_tokens=False)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.has_chat_template
    assert tokenizer.eos_token_id == source.convert_tokens_to_ids("<|e|>")


def test_control_tokens_spelt_out_are_plain_unless_parsed(small: Tokenizer) -> None:
    for token in [*SPECIAL, *MARKUP]:
        text = f"a{token}b"
        plain = small.encode(text)
        assert small.control.ids.isdisjoint(plain)
        assert small.decode(plain, skip_special=False) == text
        parsed = small.encode(text, special_tokens="parse")
        assert [small.decode([i], skip_special=False) for i in parsed if i in small.control.ids] == [token]


def test_special_tokens_are_skipped_in_decoded_text(small: Tokenizer) -> None:
    ids = small.encode("a<|e|>b<think>", special_tokens="parse")
    assert small.decode(ids) == "ab<think>"
    assert small.decode(ids, skip_special=False) == "a<|e|>b<think>"


def test_no_begin_or_end_token_is_added() -> None:
    source = sentence_piece()
    begin = processors.TemplateProcessing(single="<|s|> $A", special_tokens=[("<|s|>", source.bos_token_id)])
    source.backend_tokenizer.post_processor = begin
    assert source.encode("hello")[0] == source.bos_token_id
    tokenizer = Tokenizer(source)
    assert tokenizer.control.ids.isdisjoint(tokenizer.encode("hello", special_tokens="parse"))


def test_the_vocabulary_counts_added_tokens(small: Tokenizer) -> None:
    assert small.vocab_size == 1 + max(token.id for token in small.added_tokens)
    assert all(len(small.decode([i], skip_special=False)) > 0 for i in range(small.vocab_size))


def test_added_runs_of_blanks_stay_tokens_in_plain_text() -> None:
    source = byte_level(extra=[AddedToken("    ", normalized=False), "\u2581\u2581"])
    tokenizer = Tokenizer(source)
    blanks = source.convert_tokens_to_ids("    ")
    assert blanks in tokenizer.encode("x    y")
    assert {token.text for token in tokenizer.control.tokens} == {*SPECIAL, *MARKUP}


def test_settings_of_the_source_tokenizer_are_not_shared() -> None:
    source = byte_level()
    source.backend_tokenizer.enable_truncation(3)
    tokenizer = Tokenizer(source)
    source.backend_tokenizer.encode_special_tokens = True
    assert len(tokenizer.encode("one long text of many tokens")) > 3
    assert tokenizer.eos_token_id in tokenizer.encode("<|e|>", special_tokens="parse")


def test_half_a_surrogate_pair_is_a_typed_error(small: Tokenizer) -> None:
    with pytest.raises(DataError, match="cannot be encoded"):
        small.encode("a\ud83cb")


def test_byte_fallback_is_told_apart(small: Tokenizer) -> None:
    assert not small.byte_fallback
    assert Tokenizer(sentence_piece()).byte_fallback


def test_a_folder_without_tokenizer_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    with pytest.raises(ModelError, match="not a folder"):
        Tokenizer.from_folder(tmp_path / "absent")


def test_a_broken_tokenizer_file_is_a_model_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{ not json")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    with pytest.raises(ModelError, match="cannot be loaded"):
        Tokenizer.from_folder(tmp_path)


def test_without_chat_template_chats_are_refused_with_a_fix() -> None:
    tokenizer = Tokenizer(byte_tokens([b"a"]))
    assert not tokenizer.has_chat_template
    with pytest.raises(ModelError, match="no chat template"):
        tokenizer.render_chat([{"role": "user", "content": "a"}])


def test_the_real_tokenizer_round_trips_and_knows_its_end() -> None:
    tokenizer = Tokenizer.from_folder(real_folder())
    text = "Hello, 世界! 12345\n\tfoo <|im_end|> 🌍"
    assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text
    assert tokenizer.control.ids.isdisjoint(tokenizer.encode(text))
    assert tokenizer.encode("<|im_end|>", special_tokens="parse") == [tokenizer.eos_token_id]
    assert tokenizer.vocab_size == 49_152
    assert len(tokenizer.encode("3+5=8\n12+4=16\n7+9=")) == len("3+5=8\n12+4=16\n7+9=")
