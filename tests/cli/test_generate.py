from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from unison.cli.main import main
from unison.core.records import GenerationOutput, TokenLogprob, VersionRun
from unison.core.sampling import SamplingParams

Capture = pytest.CaptureFixture[str]


class FakeTokenizer:
    def render_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        assert messages[0]["role"] == "user"
        return [1, *map(ord, messages[0]["content"]), 2]

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return "".join("<end>" if token == 2 else chr(token) for token in ids)


class FakeEngine:
    """Answers every prompt with ``42`` and the end token, and keeps what it was asked."""

    made: dict[str, Any]
    asked: list[tuple[list[Any], SamplingParams]]

    tokenizer: FakeTokenizer | None = FakeTokenizer()

    @classmethod
    def from_pretrained(cls, model: str, *, dtype: str, numerics: str) -> FakeEngine:
        cls.made = {"model": model, "dtype": dtype, "numerics": numerics}
        cls.asked = []
        return cls()

    def generate(self, prompts: list[Any], sampling: SamplingParams) -> list[list[GenerationOutput]]:
        self.asked.append((prompts, sampling))
        return [[self._output(prompt, sampling, copy) for copy in range(sampling.n)] for prompt in prompts]

    def _output(self, prompt: str | list[int], sampling: SamplingParams, copy: int) -> GenerationOutput:
        ids = tuple(map(ord, prompt)) if isinstance(prompt, str) else tuple(prompt)
        return GenerationOutput(
            request_id=f"r{copy}", prompt_ids=ids, token_ids=[52, 50, 2], logprobs=[-0.5, -0.25, -1.0], text="42",
            finish_reason="stop", matched_stop=2, seed=(sampling.seed or 100) + copy,
            weight_versions=[VersionRun(0, 3)], kv_versions=[], sampling=replace(sampling, n=1),
            top_logprobs=[[TokenLogprob(52, -0.5), TokenLogprob(53, -1.0)]] * 3 if sampling.top_logprobs else [],
            token_id_logprobs=[[-math.inf]] * 3 if sampling.logprob_token_ids else [],
            prompt_logprobs=[-3.0, -4.0] if sampling.prompt_logprobs_from is not None else [],
        )  # fmt: skip


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> type[FakeEngine]:
    monkeypatch.setattr("unison.Engine", FakeEngine, raising=False)
    return FakeEngine


def run(*words: str) -> int:
    return main(["generate", "--model", "tiny", *words])


def test_one_answer_is_bare_on_stdout_and_its_facts_are_on_stderr(capsys: Capture) -> None:
    assert run("--prompt", "6*7=") == 0
    shown = capsys.readouterr()
    assert shown.out == "42\n"
    assert "[stop at '<end>'; 4 tokens in, 3 out; seed 100]" in shown.err and "3 tokens in" in shown.err


def test_settings_reach_the_engine(engine: type[FakeEngine]) -> None:
    words = "--temperature 0.7 --top-p 0.9 --top-k 5 --max-new-tokens 9 --seed 3 --n 2 --dtype float32 --numerics exact"
    assert run("--prompt", "a", "--prompt", "b", "--stop", "x", "--stop", "y", *words.split()) == 0
    assert engine.made == {"model": "tiny", "dtype": "float32", "numerics": "exact"}
    assert engine.asked == [
        (
            ["a", "b"],
            SamplingParams(
                temperature=0.7, top_p=0.9, top_k=5, max_new_tokens=9, n=2, seed=3, stop=("x", "y"), logprobs="scaled"
            ),
        )
    ]


def test_every_setting_has_a_flag(engine: type[FakeEngine]) -> None:
    words = (
        "--min-p 0.1 --repetition-penalty 1.2 --frequency-penalty=-0.5 --presence-penalty 0.25 --logit-bias 5=-1.5 "
        "--logit-bias 7=2 --allowed-token-ids 5,7,52 --forbidden-token-ids 8 --min-new-tokens 2 --stop-token-ids 9,10 "
        "--ignore-eos --forced-ids 52,50,2 --top-logprobs 2 --logprob-token-ids 5,6 --prompt-logprobs-from 1 "
        "--no-skip-special-tokens --no-stop-trim"
    )
    assert run("--prompt", "a", "--json", *words.split()) == 0
    (asked,) = engine.asked
    assert asked[1] == SamplingParams(
        min_p=0.1, repetition_penalty=1.2, frequency_penalty=-0.5, presence_penalty=0.25, logit_bias={5: -1.5, 7: 2.0},
        allowed_token_ids=(5, 7, 52), forbidden_token_ids=(8,), min_new_tokens=2, stop_token_ids=(9, 10),
        ignore_eos=True, forced_ids=(52, 50, 2), top_logprobs=2, logprob_token_ids=(5, 6), prompt_logprobs_from=1,
        skip_special_tokens=False, no_stop_trim=True,
    )  # fmt: skip


FURTHER = ["--logprobs", "processed", "--top-logprobs", "2", "--logprob-token-ids", "7"]


def test_further_logprobs_stand_in_the_table_and_in_json(capsys: Capture, engine: type[FakeEngine]) -> None:
    assert run("--prompt", "6*7=", "--prompt-logprobs-from", "2") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[3:6] == [["2", "55", "-3.000000", "'7'"], ["3", "61", "-4.000000", "'='"], ["answer"]]
    assert lines[6] == ["4", "52", "-0.500000", "'4'"]
    assert run("--prompt", "6*7=", *FURTHER) == 0
    lines = [line.split("|") for line in capsys.readouterr().out.splitlines()]
    assert [part.strip() for part in lines[3][1:]] == ["'4' -0.5000, '5' -1.0000", "7: -inf"]
    assert run("--prompt", "6*7=", "--json", "--prompt-logprobs-from", "2") == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["prompt_logprobs_from"], record["prompt_logprobs"]) == (2, [-3.0, -4.0])
    assert "top_logprobs" not in record
    assert run("--prompt", "6*7=", "--json", *FURTHER) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["top_logprobs"][0] == [[52, -0.5], [53, -1.0]]
    assert (record["logprob_token_ids"], record["token_id_logprobs"]) == ([7], [[None]] * 3)


def test_defaults_are_the_neutral_ones(engine: type[FakeEngine]) -> None:
    assert run("--prompt", "a") == 0
    assert engine.asked[0][1] == SamplingParams()
    assert engine.made == {"model": "tiny", "dtype": "auto", "numerics": "auto"}


def test_a_chat_goes_through_the_template(engine: type[FakeEngine]) -> None:
    assert run("--chat", "hi") == 0
    assert engine.asked[0][0] == [[1, 104, 105, 2]]


def test_a_prompt_comes_from_a_file_as_it_is_or_from_standard_input(
    engine: type[FakeEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes(b"line\r\n\xc3\xa9\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"piped")))
    assert run("--prompt-file", str(path), "--prompt-file", "-") == 0
    assert engine.asked[0][0] == ["line\r\n\u00e9\n", "piped"]


def test_several_answers_have_headings(capsys: Capture) -> None:
    assert run("--prompt", "a", "--prompt", "b" * 100, "--n", "2") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "--- prompt 1, answer 1 of 2: 'a'"
    assert lines[1:3] == ["42", "[stop at '<end>'; 1 tokens in, 3 out; seed 100]"]
    assert lines[9].startswith("--- prompt 2, answer 2 of 2: '...bbb")


def test_the_table_shows_each_token_with_its_log_prob(capsys: Capture, engine: type[FakeEngine]) -> None:
    assert run("--prompt", "6*7=", "--logprobs", "raw") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["position", "id", "raw", "log-prob", "token"]
    assert [line.split() for line in lines[3:6]] == [
        ["4", "52", "-0.500000", "'4'"], ["5", "50", "-0.250000", "'2'"], ["6", "2", "-1.000000", "'<end>'"],
    ]  # fmt: skip
    assert lines[6].split() == ["sum", "-1.750000"]
    assert engine.asked[0][1].logprobs == "raw"


def test_json_is_one_object_an_answer_and_nothing_else(capsys: Capture) -> None:
    assert run("--prompt", "a", "--n", "2", "--json") == 0
    shown = capsys.readouterr()
    first, second = map(json.loads, shown.out.splitlines())
    assert first == {
        "prompt": "a", "copy": 0, "text": "42", "finish_reason": "stop", "matched_stop": 2, "seed": 100,
        "prompt_ids": [97], "token_ids": [52, 50, 2], "logprobs": [-0.5, -0.25, -1.0], "logprobs_kind": "scaled",
        "weight_versions": [0, 0, 0],
    }  # fmt: skip
    assert second["copy"] == 1 and shown.err == ""


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "one of them is needed"),
        (["--prompt", "a", "--chat", "b"], "only one of them at a time"),
        (["--prompt", "a", "--temprature", "1"], "unknown flag --temprature; did you mean --temperature?"),
        (["--prompt", "a", "--temp", "1"], "unknown flag --temp; did you mean --temperature?"),
        (["--prompt", "a", "--n", "x"], "argument --n: invalid int value: 'x'"),
        (["--prompt", "a", "--n", "0"], "n=0 is outside [1, 4096]"),
        (["--prompt", "a", "--temperature", "nan"], "temperature=nan must be a finite number"),
        (["--prompt", "a", "--stop", ""], "each stop string must be a non-empty string"),
        (["--prompt", "--n"], "a value that begins with - is given as --flag=VALUE"),
        (["--prompt", "a", "b"], "unexpected argument 'b'"),
        (["--prompt-file", "/no/such/file"], "cannot read the prompt file /no/such/file: No such file"),
        (["--prompt", "a", "--logit-bias", "x=1"], "'x=1' must be a token id and a number like 5=-1.5"),
        (["--prompt", "a", "--logit-bias", "5"], "'5' must be a token id and a number like 5=-1.5"),
        (["--prompt", "a", "--forced-ids", "1,b"], "'1,b' must be token ids like 5,6,7"),
        (["--prompt", "a", "--min-p", "2"], "min_p=2.0 is outside [0, 1]"),
        (["--prompt", "a", "--dtype", "half"], "invalid choice: 'half'"),
    ],
)
def test_what_cannot_be_meant_is_one_sentence(capsys: Capture, words: list[str], complaint: str) -> None:
    assert run(*words) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and complaint in said and said.count("\n") == 1


def test_the_model_must_be_named(capsys: Capture) -> None:
    assert main(["generate", "--prompt", "a"]) == 2
    assert "required: --model" in capsys.readouterr().err


def test_a_model_without_tokenizer_cannot_chat(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEngine, "tokenizer", None)
    assert run("--chat", "hi") == 2
    assert "no tokenizer.json" in capsys.readouterr().err
    assert run("--prompt", "hi", "--logprobs", "raw") == 0


def test_a_prompt_file_that_is_not_text_is_refused(capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\xff")
    assert run("--prompt-file", str(tmp_path / "x")) == 2
    assert "not valid UTF-8" in capsys.readouterr().err
