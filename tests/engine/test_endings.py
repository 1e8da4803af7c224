"""How answers end, and what their text is. What the model would say is laid down by a script."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.support import assert_works, make_engine, piece_tokenizer, request
from unison.core.records import GenerationOutput, GenerationRequest
from unison.engine import drawing
from unison.engine.sampler import Draws, SamplerRow
from unison.models.decoder import Decoder
from unison.models.loading import load_model
from unison.text.tokenizer import Tokenizer

Say = Callable[..., GenerationOutput]
END = 258


@pytest.fixture
def byte_tokenizer(tiny_model_dir: Callable[..., Path]) -> Tokenizer:
    """Ids 0 to 255 are bytes, 256 to 258 control tokens."""
    return Tokenizer.from_folder(tiny_model_dir("qwen3"))


@pytest.fixture
def say(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> Say:
    """``say(ids, ...)``: the output of a request whose sampled tokens are ``ids``, with log-probs -1, -2, ..."""

    def run(
        script: Sequence[int],
        *,
        tokenizer: Tokenizer | None = None,
        end_ids: Sequence[int] = (END,),
        prior: Sequence[int] = (),
        of: Decoder = model,
        **sampling: Any,
    ) -> GenerationOutput:
        wanted: GenerationRequest = request("r", [1], prior, **{"max_new_tokens": 50, **sampling})

        def scripted(logits: Tensor, rows: Sequence[SamplerRow]) -> Draws:
            (row,) = rows
            return Draws([script[row.position - 1 - len(prior)]], [-float(row.position)], {})

        engine = make_engine(of, tokenizer=tokenizer, end_ids=end_ids)
        with monkeypatch.context() as patch:
            patch.setattr(drawing, "sample", scripted)
            engine.add_request(wanted)
            (output,) = engine.run()
        assert_works(engine)
        return output

    return run


def ending(output: GenerationOutput) -> tuple[str, int | str | None, int]:
    assert len(output.logprobs) == len(output.token_ids)
    return output.finish_reason, output.matched_stop, len(output.token_ids)


def test_the_end_token_keeps_its_id_and_its_logprob_and_has_no_text(say: Say, byte_tokenizer: Tokenizer) -> None:
    output = say([*b"ok", END, *b"never"], tokenizer=byte_tokenizer)
    assert ending(output) == ("stop", END, 3)
    assert output.token_ids == [*b"ok", END]
    assert output.logprobs == [-1.0, -2.0, -3.0]
    assert output.text == "ok"


def test_a_stop_id_ends_like_an_end_token(say: Say, byte_tokenizer: Tokenizer) -> None:
    output = say(list(b"ab!cd"), tokenizer=byte_tokenizer, stop_token_ids=(ord("!"),))
    assert ending(output) == ("stop", ord("!"), 3)
    assert output.text == "ab"


def test_ignore_eos_goes_past_the_models_ends_but_not_past_the_requests(say: Say, byte_tokenizer: Tokenizer) -> None:
    script = [*b"a", END, *b"b", 257, *b"c"]
    output = say(script, tokenizer=byte_tokenizer, ignore_eos=True, max_new_tokens=5)
    assert ending(output) == ("length", None, 5)
    assert output.text == "abc", "control tokens have no text"
    output = say(script, tokenizer=byte_tokenizer, ignore_eos=True, stop_token_ids=(257,))
    assert ending(output) == ("stop", 257, 4)
    output = say(script, tokenizer=byte_tokenizer, ignore_eos=True, stop_token_ids=(END,))
    assert ending(output) == ("stop", END, 2)
    output = say([*b"xyz"], tokenizer=byte_tokenizer, ignore_eos=True, stop=("y",))
    assert ending(output) == ("stop", "y", 2)


def test_each_of_several_end_tokens_ends(say: Say) -> None:
    assert ending(say([5, 7, 8], end_ids=[6, 7])) == ("stop", 7, 2)
    assert ending(say([6, 7, 8], end_ids=[6, 7])) == ("stop", 6, 1)


def test_the_end_token_in_the_last_place_is_a_stop(say: Say) -> None:
    assert ending(say([5, END], max_new_tokens=2)) == ("stop", END, 2)
    assert ending(say([5, 6, END], max_new_tokens=2)) == ("length", None, 2)


def test_a_stop_string_in_pieces_cuts_the_text_and_not_the_ids(say: Say) -> None:
    tokenizer = piece_tokenizer(["ro", "ll st", "op th", "en"])
    output = say([0, 1, 2, 3], tokenizer=tokenizer, stop=("stop",))
    assert ending(output) == ("stop", "stop", 3)
    assert output.token_ids == [0, 1, 2]
    assert output.text == "roll "


def test_text_that_only_began_a_stop_string_is_kept(say: Say) -> None:
    tokenizer = piece_tokenizer(["ro", "ll st", "op th", "en"])
    output = say([0, 1, 3, 1], tokenizer=tokenizer, stop=("stop",), max_new_tokens=4)
    assert ending(output) == ("length", None, 4)
    assert output.text == "roll stenll st"
    output = say([0, 1, 3], tokenizer=tokenizer, stop=("stop",), end_ids=[3])
    assert output.text == "roll st"


def test_without_stop_strings_text_is_plain(say: Say) -> None:
    output = say([0, 1, 2, 3], tokenizer=piece_tokenizer(["ro", "ll st", "op th", "en"]), max_new_tokens=4)
    assert output.text == "roll stop then"


def test_a_stop_string_in_the_last_place_is_a_stop(say: Say, byte_tokenizer: Tokenizer) -> None:
    output = say(list(b"abc"), tokenizer=byte_tokenizer, stop=("bc", "xx"), max_new_tokens=3)
    assert ending(output) == ("stop", "bc", 3)
    assert output.text == "a"


@pytest.mark.parametrize("stop", [" the moon", "oon", "ver the moon, and", "\n"])
def test_stop_strings_cross_the_tokens_of_a_real_tokenizer(
    say: Say, smollm2: Path, tiny_model_dir: Callable[..., Path], stop: str
) -> None:
    tokenizer = Tokenizer.from_folder(smollm2)
    large_vocabulary = load_model(tiny_model_dir("llama", vocab_size=49152, hidden_size=32), torch.float32)
    text = "The cow jumped over the moon, and – naïvely 🌍 – never came back.\nThe end"
    ids = tokenizer.encode(text)
    output = say(ids, tokenizer=tokenizer, of=large_vocabulary, stop=(stop,), end_ids=[0])
    assert output.text == text[: text.index(stop)]
    assert (output.finish_reason, output.matched_stop) == ("stop", stop)
    # No more tokens than it took to complete the stop string.
    assert output.token_ids == ids[: len(output.token_ids)]
    assert stop in tokenizer.decode(output.token_ids)
    assert stop not in tokenizer.decode(output.token_ids[:-1])


def test_a_character_in_several_tokens_appears_whole(say: Say) -> None:
    # GPT-2 writes the bytes f0 9f | 8c | 8d as these letters.
    tokenizer = piece_tokenizer(["HiĠ", "ðŁ", "Į", "į", "!"], byte_level=True)
    output = say([0, 1, 2, 3, 4], tokenizer=tokenizer, max_new_tokens=5)
    assert output.text == "Hi 🌍!"
    output = say([0, 1, 2, 3, 4], tokenizer=tokenizer, max_new_tokens=3)
    assert ending(output) == ("length", None, 3)
    assert output.text == "Hi \N{REPLACEMENT CHARACTER}"


def test_without_a_tokenizer_there_is_no_text(say: Say) -> None:
    assert say([5, 6], max_new_tokens=2).text == ""


def test_a_resumed_answer_keeps_its_text_and_its_half_seen_stop_string(say: Say, byte_tokenizer: Tokenizer) -> None:
    output = say(list(b"op it"), prior=b"full st", tokenizer=byte_tokenizer, stop=("stop",))
    assert ending(output) == ("stop", "stop", 2)
    assert output.token_ids == [*b"op"]
    assert output.text == "full "


@pytest.mark.parametrize(
    ("prior", "settings", "reason", "matched"),
    [
        ([*b"ab", END], {}, "stop", END),
        ([*b"a stop b"], {"stop": ("stop",)}, "stop", "stop"),
        ([*b"abc"], {"max_new_tokens": 3}, "length", None),
        ([*b"abcd"], {"max_new_tokens": 3}, "length", None),
        ([*b"ab", END], {"max_new_tokens": 3}, "stop", END),
    ],
)
def test_an_answer_that_had_ended_gets_no_further_token(
    say: Say, byte_tokenizer: Tokenizer, prior: list[int], settings: dict[str, Any], reason: str, matched: object
) -> None:
    output = say([*b"xyz"], prior=prior, tokenizer=byte_tokenizer, **settings)
    assert ending(output) == (reason, matched, 0)
    assert not output.text.endswith("x")


def test_an_end_token_inside_resumed_output_counts_only_where_it_counts_now(say: Say) -> None:
    output = say([5, 6], prior=[9, END, 9], ignore_eos=True, max_new_tokens=5)
    assert ending(output) == ("length", None, 2)


def test_a_stop_string_before_the_minimum_is_passed_over(say: Say) -> None:
    tokenizer = piece_tokenizer(["ro", "ll st", "op th", "en", "stop"])
    output = say([0, 1, 2, 3, 4], tokenizer=tokenizer, stop=("stop",), min_new_tokens=4)
    assert ending(output) == ("stop", "stop", 5)
    assert output.text == "roll stop then"
    output = say([0, 1, 2, 3], tokenizer=tokenizer, stop=("stop",), min_new_tokens=3)
    assert ending(output) == ("stop", "stop", 3), "the token that completes it is the third"
    assert output.text == "roll "
    output = say([0, 1, 2, 3], tokenizer=tokenizer, stop=("stop",), min_new_tokens=4, max_new_tokens=4)
    assert ending(output) == ("length", None, 4)
    assert output.text == "roll stop then"


def test_the_minimum_counts_resumed_output(say: Say) -> None:
    tokenizer = piece_tokenizer(["ro", "ll st", "op th", "en"])
    output = say([2, 3], prior=[0, 1], tokenizer=tokenizer, stop=("stop",), min_new_tokens=3)
    assert ending(output) == ("stop", "stop", 1)


def test_nothing_ends_an_answer_before_its_last_forced_token(say: Say) -> None:
    output = say([5, 7, 8], end_ids=[5, 8], forced_ids=(5, 7, 8))
    assert ending(output) == ("stop", 8, 3)
    output = say([5, 7, 5, 8], end_ids=[5], forced_ids=(5, 7))
    assert ending(output) == ("stop", 5, 3)
