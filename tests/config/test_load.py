from __future__ import annotations

from pathlib import Path

import pytest

from unison.config import load_config
from unison.config.dump import MISSING, diff_configs, dump_toml
from unison.config.schema import TrainConfig
from unison.core.errors import ConfigError

BASE = ["--model.path", "tiny", "--data.source", "sums"]


def load(*overrides: str, files: tuple[Path, ...] = ()) -> TrainConfig:
    return load_config(files, [*BASE, *overrides]).config


def complaint(*overrides: str, files: tuple[Path, ...] = ()) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*overrides, files=files)
    return str(caught.value)


def write(folder: Path, text: str, name: str = "conf.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_files_merge_left_to_right_and_flags_win(tmp_path: Path) -> None:
    left = write(tmp_path, "[trainer]\nsteps = 1\nbeta1 = 0.5\n[data.options]\nlow = 1\nhigh = 2\n", "left.toml")
    right = write(tmp_path, "[trainer]\nsteps = 2\n[data.options]\nhigh = 3\n", "right.toml")
    loaded = load_config([left, right], [*BASE, "--trainer.steps", "4", "--trainer.steps=3", "--data.options.new=x"])
    assert (loaded.config.trainer.steps, loaded.config.trainer.beta1) == (3, 0.5)
    assert loaded.config.data.options == {"low": 1, "high": 3, "new": "x"}
    assert loaded.sources["trainer.steps"] == "--trainer.steps"
    assert loaded.sources["trainer.beta1"] == str(left)
    assert loaded.sources["trainer.beta2"] == "default"
    assert loaded.sources["data.options.low"] == str(left)
    assert loaded.sources["data.options.high"] == str(right)
    assert loaded.sources["data.options.new"] == "--data.options.new"
    assert "data.options" not in loaded.sources


def test_a_whole_table_given_by_flag_replaces_and_then_merges(tmp_path: Path) -> None:
    path = write(tmp_path, "[reward.options]\na = 1\n")
    loaded = load_config([path], [*BASE, "--reward.options", "{b = 2}", "--reward.options.c", "3"])
    assert loaded.config.reward.options == {"b": 2, "c": 3}
    assert "reward.options.a" not in loaded.sources


@pytest.mark.parametrize(
    ("flag", "text", "expected"),
    [
        ("data.shuffle", "false", False),
        ("trainer.learning_rate", "1e-5", 1e-5),
        ("trainer.learning_rate", "1", 1.0),
        ("rollout.top_k", "-1", -1),
        ("run.name", "true", "true"),
        ("run.name", "--odd", "--odd"),
        ("data.label_key", "null", None),
        ("data.train", "a=b.jsonl", "a=b.jsonl"),
        ("rollout.stop", '["\\n", "a,b"]', ["\n", "a,b"]),
        ("rollout.stop", "END,STOP", ["END", "STOP"]),
        ("rollout.stop", "[]", []),
        ("rollout.stop_token_ids", "2, 7", [2, 7]),
        ("model.dtype", "float32", "float32"),
        ("data.options.size", "3", 3),
        ("data.options.size", "3.5", 3.5),
        ("data.options.size", "true", True),
        ("data.options.size", "three words here", "three words here"),
        ("data.options.size", '"3"', "3"),
        ("data.options.size", "2024-01-02", "2024-01-02"),
        ("data.options.size", "1\nb = 2", "1\nb = 2"),
    ],
)
def test_flag_text_is_typed_by_the_schema(flag: str, text: str, expected: object) -> None:
    section, key, *option = flag.split(".")
    value = getattr(getattr(load(f"--{flag}={text}"), section), key)
    value = value[option[0]] if option else value
    assert value == expected and type(value) is type(expected)


@pytest.mark.parametrize(
    ("flag", "text", "allowed"),
    [
        ("trainer.steps", "ten", "an integer >= 0"),
        ("trainer.steps", "-1", "an integer >= 0"),
        ("trainer.steps", "1.0", "an integer >= 0"),
        ("trainer.steps", "1_0", "an integer >= 0"),
        ("engine.page_size", "5000", "an integer >= 64 and <= 4096, a multiple of 64"),
        ("engine.page_size", "65", "an integer >= 64 and <= 4096, a multiple of 64"),
        ("trainer.beta1", "1.0", "a number >= 0 and < 1"),
        ("trainer.learning_rate", "nan", "a number >= 0"),
        ("trainer.max_grad_norm", "inf", "a finite number"),
        ("trainer.learning_rate", "true", "a number >= 0"),
        ("data.shuffle", "yes", "true or false"),
        ("data.shuffle", "True", "true or false"),
        ("model.dtype", "bf16", "one of auto, bfloat16, float32; did you mean bfloat16?"),
        ("rollout.stop", "[1]", "a list of texts"),
        ("rollout.stop_token_ids", "1,two", "a list of integers"),
        ("data.options", "3", "a table"),
        ("data.options.deep", "[1]", "an integer, a number, a text or a boolean"),
        ("data.options.deep", "inf", "a finite number"),
    ],
)
def test_a_wrong_value_names_source_key_value_and_what_is_allowed(flag: str, text: str, allowed: str) -> None:
    message = complaint(f"--{flag}", text)
    assert message.startswith(f"--{flag}: {flag} is ")
    assert text.strip("[]") in message.replace(", 'two'", ",two")
    assert f"must be {allowed}" in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[trainer]\n\nsteps = 'x'", ":3: trainer.steps is 'x', but must be an integer >= 0"),
        ("[trainer]\nsteps = true", ":2: trainer.steps is true, but must be an integer >= 0"),
        ("[trainer]\nlearning_rate = nan", ":2: trainer.learning_rate is nan, but must be a number >= 0"),
        ("trainer = 3", ":1: trainer is 3, but is a section; write [trainer]"),
        ("[[trainer]]\nsteps = 3", ":1: trainer is"),
        ("[trainer.steps]\nx = 3", ":1: trainer.steps is {'x': 3}, but must be an integer"),
        ("[data.options]\nlist = [1]", ":1: data.options is"),
        ("[trainor]\nsteps = 3", ":2: key trainor.steps is unknown; did you mean trainer.steps?"),
        ("[trainor]", ":1: section trainor is unknown; did you mean trainer?"),
        ("[nonsense]", ":1: section nonsense is unknown; the sections are model, run"),
        ("[trainer]\nlr = 3", ":2: key trainer.lr is unknown; did you mean trainer.learning_rate?"),
        ("learning_rate = 3", ":1: key learning_rate is unknown; that is called trainer.learning_rate here"),
        ("trainer.lr = 3", ":1: key trainer.lr is unknown"),
        ("[trainer]\nsteps = \n", ":2, column 9: not valid TOML: Invalid value"),
        ("[trainer]\nx", ":2: not valid TOML"),
        ("[trainer]\nsteps = 1\nsteps = 2", ":3: not valid TOML: Cannot overwrite a value"),
        ("[rollout]\nstop = " + "[" * 3000, ": nested too deeply"),
        ("[trainer]\nsteps = " + "9" * 5000, ": Exceeds the limit"),
    ],
)
def test_a_broken_file_is_refused_with_its_line(tmp_path: Path, text: str, expected: str) -> None:
    path = write(tmp_path, text)
    message = complaint(files=(path,))
    assert message.startswith(f"{path}{expected}"), message


def test_a_file_that_is_not_text_or_not_there_is_named(tmp_path: Path) -> None:
    path = tmp_path / "conf.toml"
    path.write_bytes(b"[run]\nname = '\xff'\n")
    assert complaint(files=(path,)) == f"{path}:2: not valid UTF-8 (byte 0xff)"
    assert complaint(files=(tmp_path / "cnof.toml",)).endswith(f"did you mean {path}?")
    assert "Is a directory" in complaint(files=(tmp_path,))
    assert "nor a folder" in complaint(files=(tmp_path / "gone" / "conf.toml",))


def test_a_byte_order_mark_is_no_key(tmp_path: Path) -> None:
    path = tmp_path / "conf.toml"
    path.write_bytes(b"\xef\xbb\xbf[trainer]\nsteps = 7\n")
    assert load(files=(path,)).trainer.steps == 7


def test_null_in_a_file_sets_nothing_where_that_is_allowed(tmp_path: Path) -> None:
    assert load(files=(write(tmp_path, '[data]\nlabel_key = "null"'),)).data.label_key is None
    assert load(files=(write(tmp_path, '[data]\nprompt_key = "null"'),)).data.prompt_key == "null"


def test_a_missing_required_key_names_its_flag() -> None:
    with pytest.raises(ConfigError, match=r"model\.path is missing; give --model\.path VALUE"):
        load_config([], ["--data.source", "sums"])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--trainer.steps"], "--trainer.steps needs a value (an integer >= 0)"),
        (["--run.name", "--x"], "--run.name needs a value (text); a value that begins with -- is given as"),
        (["steps"], "'steps' is neither a flag nor the value of one"),
        (["--"], "'--' is neither a flag"),
        (["-steps", "3"], "'-steps' is neither a flag"),
        (["--trainer.lr"], "flag --trainer.lr is unknown; did you mean --trainer.learning_rate?"),
        (["--dryrun"], "flag --dryrun is unknown; did you mean --dry-run?"),
        (["--data.options.a.b", "1"], "flag --data.options.a.b is unknown; an option of data.options has one"),
        (["--data.optons.a", "1"], "flag --data.optons.a is unknown; did you mean --data.options.a?"),
        (["--data.options.a", "null"], "--data.options.a: an option cannot be null"),
        (["--rollout.stop", "a\\n"], "--rollout.stop: 'a\\\\n' is ambiguous as a list; write it as TOML"),
        (["--rollout.stop", "a, b"], "--rollout.stop: 'a, b' is ambiguous"),
        (["--run.name", "\udcff"], "--run.name: run.name is '\\udcff', which is not valid UTF-8"),
    ],
)
def test_a_flag_that_cannot_be_meant_is_refused(words: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([], [*BASE, *words], other_flags=["--dry-run"])
    assert str(caught.value).startswith(expected)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["--data.source", "jsonl"], "data.train"),
        (["--data.source", "jsonl", "--data.train", "x", "--eval.problems", "9"], "data.eval"),
        (["--rollout.temperature", "1e-5"], "rollout"),
        (["--rollout.top_k", "0"], "top_k"),
        (["--rollout.stop", '[""]'], "stop"),
        (["--eval.temperature", "1e-5"], "eval"),
        (["--run.name", " "], "run.name"),
        (["--model.path", ""], "model.path"),
    ],
)
def test_combinations_that_cannot_be_meant_name_the_key(words: list[str], key: str) -> None:
    assert key in complaint(*words)


NAMED = """\
[data.mix.easy]
weight = 3
train = "easy.jsonl"
options = { low = 1 }

[data.mix.hard]
source = "sums"

[eval.sets.algebra]
path = "algebra.jsonl"
temperature = 0.5
"""


def test_entries_of_a_named_table_come_from_files_and_flags(tmp_path: Path) -> None:
    path = write(tmp_path, NAMED)
    loaded = load_config([path], [*BASE, "--data.mix.hard.weight=2", "--data.mix.hard.options.high", "9"])
    mix = loaded.config.data.mix
    assert {name: (part.weight, part.source, part.options) for name, part in mix.items()} == {
        "easy": (3.0, "jsonl", {"low": 1}),
        "hard": (2.0, "sums", {"high": 9}),
    }
    assert loaded.config.eval.sets["algebra"].temperature == 0.5
    assert loaded.sources["data.mix.easy.weight"] == str(path)
    assert loaded.sources["data.mix.hard.weight"] == "--data.mix.hard.weight"
    assert loaded.sources["data.mix.easy.label_key"] == "default"


def test_a_flag_alone_makes_an_entry_of_a_named_table() -> None:
    config = load("--reward.parts.length.function", "my:short", "--reward.parts.length.weight", "0.1")
    assert config.reward.parts["length"].weight == 0.1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[data.mix.easy]\nwieght = 1", "did you mean weight"),
        ("[data.mix.easy]\nweight = 0", "data.mix.easy.weight is 0, but must be a number > 0"),
        ("[data.mix]\neasy = 1", "data.mix.easy is 1, but is a table"),
        ("[data]\nmix = 1", "data.mix is 1, but holds tables by name"),
        ("[data.mix.easy]", "is empty"),
        ('[data.mix."a b"]\nweight = 1', "no usable name"),
        ("[reward.parts.short]\nweight = 1", "reward.parts.short.function is missing"),
        ("[data.mix.easy.deep]\nweight = 1", "data.mix.easy.deep is unknown"),
    ],
)
def test_what_is_wrong_in_a_named_table_is_said(text: str, message: str, tmp_path: Path) -> None:
    assert message in complaint(files=(write(tmp_path, text),))


@pytest.mark.parametrize(
    "flag", ["--data.mix.easy", "--data.mix.a.b.c", "--data.mix.*.weight", "--data.mix.a b.weight"]
)
def test_a_flag_that_names_no_key_of_a_named_table_is_refused(flag: str) -> None:
    assert "unknown" in complaint(flag, "1")


def test_named_tables_survive_a_dump(tmp_path: Path) -> None:
    loaded = load_config([write(tmp_path, NAMED)], BASE)
    again = load_config([write(tmp_path, dump_toml(loaded.config, loaded.sources), "again.toml")])
    assert again.config == loaded.config


def test_two_configurations_are_compared_key_by_key(tmp_path: Path) -> None:
    old, new = load(files=(write(tmp_path, NAMED),)), load("--data.mix.easy.weight=1", "--trainer.steps", "7")
    difference = diff_configs(old, new)
    assert difference["trainer.steps"] == (20, 7)
    assert difference["data.mix.easy.weight"] == (3.0, 1.0)
    assert difference["data.mix.hard.source"] == ("sums", MISSING)
    assert "trainer.learning_rate" not in difference


def test_all_unknown_keys_of_a_file_are_told_together(tmp_path: Path) -> None:
    text = "[trainer]\nstep = 1\nlearning_rate = 1\n[rollotu]\nn = 2\n[actor_rollout_ref.rollout]\nn = 8\n"
    lines = complaint(files=(write(tmp_path, text),)).splitlines()
    assert [line.split(" ")[0].rpartition(":")[0].rpartition(":")[2] for line in lines] == ["2", "5", "7"]
    assert "trainer.steps" in lines[0] and "rollout.samples_per_prompt here (verl)" in lines[2]
