from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.conftest import TinyModelDir
from tests.rollout.fakes import FakeClient, make_output
from unison.config.schema import TrainConfig
from unison.core.errors import ConfigError, DataError, EvaluationError, RewardError
from unison.core.records import GenerationOutput, GenerationRequest, Sample, VersionRun
from unison.evaluation.files import evaluation_path, read_evaluation, write_evaluation
from unison.evaluation.intervals import score_interval
from unison.evaluation.result import EvaluationResult
from unison.evaluation.sets import EvaluationSets, Scorer
from unison.evaluation.settings import SetSettings
from unison.observability.metrics import METRICS
from unison.text.tokenizer import Tokenizer

SUMS = {"source": "sums", "options": {"max_operand": 6, "eval_size": 5}}
VERSION = 7


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: TinyModelDir) -> Tokenizer:
    return Tokenizer.from_folder(tiny_model_dir())


def make_config(sets: dict[str, dict[str, Any]] | None = None, **sections: dict[str, Any]) -> TrainConfig:
    base: dict[str, Any] = {
        "model": {"path": "m"},
        "run": {"seed": 3},
        "data": SUMS,
        "rollout": {"max_new_tokens": 6, "stop": ["\n"], "temperature": 0.3, "samples_per_prompt": 8},
        "eval": {"problems": 5},
    }
    for name, values in sections.items():
        base[name] = {**base[name], **values} if name in base else values
    if sets is not None:
        base["eval"] = {**base["eval"], "sets": sets}
    return msgspec.convert(base, TrainConfig)


def answer(
    text: Callable[[GenerationRequest], str] = lambda _: "8", version: int = VERSION
) -> Callable[[GenerationRequest], GenerationOutput]:
    def make(request: GenerationRequest) -> GenerationOutput:
        output = make_output(request, num_tokens=2)
        output.text = text(request)
        output.weight_versions = [VersionRun(version, 2)]
        output.kv_versions = [VersionRun(version, len(request.prompt_ids) + 1)]
        return output

    return make


def copy_of(request: GenerationRequest) -> int:
    return int(request.request_id.rsplit("/", 1)[1])


def evaluate(
    config: TrainConfig, tokenizer: Tokenizer, client: FakeClient, version: int = VERSION, **options: Any
) -> EvaluationResult:
    return asyncio.run(EvaluationSets.build(config, tokenizer, **options).run(client, version))


def test_the_set_of_data_eval_has_plain_metric_names_and_named_ones_their_own(tokenizer: Tokenizer) -> None:
    config = make_config({"easy": {**SUMS, "problems": 3}})
    metrics = evaluate(config, tokenizer, FakeClient(answer())).metrics()
    METRICS.check(metrics)
    assert metrics["eval/problems"] == 5 and metrics["eval/easy/problems"] == 3
    assert metrics["eval/weight_version"] == VERSION
    assert {"eval/accuracy", "eval/easy/accuracy_greedy_ci_low", "eval/easy/seconds", "eval/seconds"} <= set(metrics)


def test_each_set_is_asked_and_scored_by_its_own_settings(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows = [{"q": "Say", "gold": "abcd"}, {"q": "Tell", "gold": "x"}]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = {
        "path": str(tmp_path / "own.jsonl"),
        "prompt_key": "q",
        "label_key": "gold",
        "reward": "tests.evaluation.rewards:is_short",
        "reward_options": {"limit": 4},
        "samples": 3,
        "temperature": 0.5,
        "greedy": False,
        "max_new_tokens": 9,
    }
    client = FakeClient(answer(lambda request: "abcd"))
    result = evaluate(make_config({"own": own}), tokenizer, client)
    requests = [request for request in client.requests if request.request_id.startswith("eval@own/")]
    assert len(requests) == 6
    assert {(r.sampling.temperature, r.sampling.max_new_tokens, r.sampling.stop) for r in requests} == {
        (0.5, 9, ("\n",))
    }
    assert result["own"].sampled.accuracy.value == 1 and result["main"].sampled.accuracy.value == 0
    assert result["own"].greedy is None and result["main"].greedy is not None
    assert result["own"].prompts == ("Say", "Tell") and result["own"].labels == ("abcd", "x")


def test_sampling_is_plain_whatever_training_does_and_greedy_is_one_answer(tokenizer: Tokenizer) -> None:
    client = FakeClient(answer())
    config = make_config(eval={"problems": 5, "samples": 3, "temperature": 0.7}, rollout={"top_p": 0.5, "top_k": 4})
    evaluate(config, tokenizer, client)
    sampled, greedy = client.requests[:15], client.requests[15:]
    assert {(r.sampling.temperature, r.sampling.top_p, r.sampling.top_k) for r in sampled} == {(0.7, 1.0, -1)}
    assert {r.sampling.temperature for r in greedy} == {0.0} and len(greedy) == 5


def test_accuracy_and_pass_at_k_against_their_definitions(tokenizer: Tokenizer) -> None:
    config = make_config(eval={"problems": 5, "samples": 4, "pass_k": [1, 2, 4], "confidence": 0.9})
    right = {0: 0, 1: 1, 2: 2, 3: 4, 4: 4}
    order: dict[str, int] = {}

    def score(samples: Sequence[Sample]) -> None:
        for sample in samples:
            number = order.setdefault(sample.group_id, len(order))
            copy = int(sample.sample_id.rsplit("/", 1)[1])
            sample.reward = float(copy < right[number])

    result = evaluate(config, tokenizer, FakeClient(answer()), make_scorer=lambda _: score)
    metrics = result.metrics()
    shares = [0, 0.25, 0.5, 1, 1]
    assert metrics["eval/accuracy"] == pytest.approx(0.55) == metrics["eval/pass_at/1"]
    assert metrics["eval/pass_at/2"] == pytest.approx((0 + 3 / 6 + 5 / 6 + 1 + 1) / 5)
    assert metrics["eval/pass_at/4"] == pytest.approx(0.8)
    ends = metrics["eval/accuracy_ci_low"], metrics["eval/accuracy_ci_high"]
    assert ends == pytest.approx(score_interval(shares, 0.9, 4))
    ends = metrics["eval/pass_at_ci_low/4"], metrics["eval/pass_at_ci_high/4"]
    assert ends == pytest.approx(score_interval([0, 1, 1, 1, 1], 0.9))
    assert metrics["eval/accuracy_greedy"] == pytest.approx(0.8)


def test_the_pass_threshold_says_what_passes(tokenizer: Tokenizer) -> None:
    def score(samples: Sequence[Sample]) -> None:
        for sample in samples:
            sample.reward = 0.5

    for threshold, expected in ((0.5, 1.0), (0.51, 0.0)):
        config = make_config(eval={"problems": 5, "samples": 2, "pass_k": [2], "pass_threshold": threshold})
        result = evaluate(config, tokenizer, FakeClient(answer()), make_scorer=lambda _: score)
        assert result.metrics()["eval/pass_at/2"] == expected
        assert result.metrics()["eval/accuracy"] == 0.5


def test_noise_depends_on_seed_set_problem_and_copy_alone(tokenizer: Tokenizer) -> None:
    def seeds(config: TrainConfig) -> dict[str, int | None]:
        client = FakeClient(answer())
        evaluate(config, tokenizer, client)
        return {r.request_id: r.sampling.seed for r in client.requests if r.sampling.temperature > 0}

    other = {**SUMS, "samples": 3}
    first = seeds(make_config({"other": other}, eval={"problems": 5, "samples": 2}))
    assert len(first) == 25 == len(set(first.values()))
    assert first == seeds(make_config({"other": other}, eval={"problems": 5, "samples": 2}))
    fewer = seeds(make_config({"more": SUMS, "other": {**other, "samples": 1, "problems": 2}}, eval={"problems": 3}))
    common = {name for name in fewer if not name.startswith("eval@more")}
    assert len(common) == 5 and all(fewer[name] == first[name] for name in common)
    assert not set(first.values()) & set(seeds(make_config({"other": other}, run={"seed": 4})).values())


@pytest.mark.parametrize("where", ["tokens", "keys and values"])
def test_an_evaluation_during_which_the_version_changed_is_refused(tokenizer: Tokenizer, where: str) -> None:
    def make(request: GenerationRequest) -> GenerationOutput:
        output = answer()(request)
        if copy_of(request) == 0 and request.sampling.temperature == 0:
            if where == "tokens":
                output.weight_versions = [VersionRun(VERSION, 1), VersionRun(VERSION + 1, 1)]
            else:
                output.kv_versions = [VersionRun(VERSION - 1, 1), *output.kv_versions]
        return output

    with pytest.raises(EvaluationError, match=r"data\.eval under weights version 7 is void.*under version [67], [78]"):
        evaluate(make_config(), tokenizer, FakeClient(make))


def test_weights_of_another_version_than_was_said_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(EvaluationError, match="was answered under version 7"):
        evaluate(make_config(), tokenizer, FakeClient(answer()), version=8)


def test_unscorable_answers_are_counted_left_out_and_bounded(tokenizer: Tokenizer) -> None:
    config = make_config(
        reward={"function": "tests.evaluation.rewards:no_opinion_on_a"},
        eval={"problems": 5, "samples": 2, "pass_k": [1], "greedy": False},
    )
    client = FakeClient(answer(lambda request: "a" if copy_of(request) == 0 else "b"))
    result = evaluate(config, tokenizer, client)
    metrics = result.metrics()
    METRICS.check(metrics)
    assert metrics["eval/accuracy"] == 1 and metrics["eval/unscorable"] == 5
    assert (metrics["eval/accuracy_if_unscorable_0"], metrics["eval/accuracy_if_unscorable_1"]) == (0.5, 1.0)
    assert metrics["eval/pass_at/1"] == 0.5
    assert "5 of 10 samples could not be scored" in result.table()
    assert result.as_json()["sets"][0]["problems"][0]["sampled"]["scores"] == [None, 1.0]
    result.require_scores()


def test_a_set_that_cannot_be_scored_at_all_is_not_a_number_and_an_error_for_who_asks(tokenizer: Tokenizer) -> None:
    config = make_config(reward={"function": "tests.evaluation.rewards:never"})
    result = evaluate(config, tokenizer, FakeClient(answer()))
    assert math.isnan(result.metrics()["eval/accuracy"]) and result.metrics()["eval/problems"] == 0
    assert result.as_json()["metrics"]["eval/accuracy"] is None
    assert " - " in result.table()
    with pytest.raises(RewardError, match=r"none of the first 5 samples of data\.eval.*no grader at hand"):
        result.require_scores()


def test_scorers_may_be_awaited_and_one_is_made_for_each_different_reward(tokenizer: Tokenizer) -> None:
    made: list[SetSettings] = []

    def make_scorer(settings: SetSettings) -> Scorer:
        made.append(settings)

        async def score(samples: Sequence[Sample]) -> None:
            await asyncio.sleep(0)
            for sample in samples:
                sample.reward = 1.0

        return score

    config = make_config({"a": SUMS, "b": {**SUMS, "reward": "other"}, "c": {**SUMS, "reward": "other"}})
    result = evaluate(config, tokenizer, FakeClient(answer()), make_scorer=make_scorer)
    assert [settings.reward.function for settings in made] == ["exact_answer", "other"]
    assert all(one.sampled.accuracy.value == 1 for one in result.sets)


class Closable:
    """A scorer that something runs for."""

    num_open = 0

    def __init__(self, settings: SetSettings) -> None:
        self.name = settings.reward.function
        Closable.num_open += 1

    def __call__(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            sample.reward = 0.0

    def close(self) -> None:
        Closable.num_open -= 1


def test_scorers_made_here_are_closed_here_and_the_runs_own_is_not(tokenizer: Tokenizer) -> None:
    config = make_config({"a": SUMS, "b": {**SUMS, "reward": "other"}})
    asked: list[int] = []

    def score(samples: Sequence[Sample]) -> None:
        asked.append(len(samples))
        for sample in samples:
            sample.reward = 1.0

    sets = EvaluationSets.build(config, tokenizer, run_scorer=score, make_scorer=Closable)
    assert Closable.num_open == 1
    result = asyncio.run(sets.run(FakeClient(answer()), VERSION))
    assert [one.sampled.accuracy.value for one in result.sets] == [1, 1, 0] and len(asked) == 4
    sets.close()
    assert Closable.num_open == 0
    with pytest.raises(DataError):
        EvaluationSets.build(make_config({"b": {"path": "no-such-file"}}), tokenizer, make_scorer=Closable)
    assert Closable.num_open == 0


def test_a_generated_source_is_read_no_further_than_asked(tokenizer: Tokenizer) -> None:
    endless = {"source": "tests.evaluation.rewards:endless", "problems": 3}
    sets = EvaluationSets.build(make_config({"endless": endless}), tokenizer)
    assert [len(one.tasks) for one in sets.sets] == [5, 3]


@pytest.mark.parametrize(
    ("sets", "evals", "message"),
    [
        ({"main": SUMS}, {}, r"eval\.sets\.main: this name"),
        ({}, {"pass_k": [2]}, r"'main' draws 1 samples.*--eval\.samples 2"),
        ({"x": {**SUMS, "samples": 3}}, {"samples": 8, "pass_k": [8]}, r"'x' draws 3.*--eval\.sets\.x\.samples 8"),
        ({}, {"pass_k": [0]}, "holds 0"),
        ({}, {"samples": 4, "pass_k": [2, 2]}, "a k twice"),
        ({"x": {}}, {}, r"eval\.sets\.x\.path names nothing"),
        ({"x": {"path": "no-such-file.jsonl"}}, {}, r"eval\.sets\.x: .*no-such-file"),
        ({"x": {**SUMS, "reward_options": {"a": 1}}}, {}, r"eval\.sets\.x\.reward_options has no effect"),
        ({"x": {"source": "sums", "options": {"max_operands": 3}}}, {}, r"eval\.sets\.x: .*max_operand"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(
    tokenizer: Tokenizer, sets: dict[str, dict[str, Any]], evals: dict[str, Any], message: str
) -> None:
    config = make_config(sets, eval={"problems": 5, **evals, "sets": sets})
    with pytest.raises((ConfigError, DataError), match=message):
        EvaluationSets.build(config, tokenizer)


def test_a_set_reads_its_own_source_whatever_the_runs_is_set_to(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"question": "1+1=", "label": "2"}\n')
    data = {"source": "jsonl", "options": {}, "train": "t", "prompt_key": "question", "on_bad_row": "skip"}
    data["eval"] = str(tmp_path / "t.jsonl")
    sets = EvaluationSets.build(make_config({"s": SUMS}, data=data), tokenizer)
    assert [len(one.tasks) for one in sets.sets] == [1, 5]
    assert any("5 problems are asked for, but it has 1" in note for note in sets.notes)


def test_without_sets_there_is_nothing_to_run(tokenizer: Tokenizer) -> None:
    sets = EvaluationSets.build(make_config(eval={"problems": 0}), tokenizer)
    assert not sets and sets.longest_prompt() == 0 == sets.longest_sequence()
    with pytest.raises(DataError, match="no held-out set"):
        asyncio.run(sets.run(FakeClient(), 0))


def test_progress_counts_over_all_sets_and_lengths_are_known_beforehand(tokenizer: Tokenizer) -> None:
    heard: list[tuple[int, int]] = []
    sets = EvaluationSets.build(make_config({"b": {**SUMS, "max_new_tokens": 40}}), tokenizer)
    asyncio.run(sets.run(FakeClient(answer()), VERSION, on_progress=lambda *pair: heard.append(pair)))
    assert heard == [(i, 20) for i in range(1, 21)]
    assert sets.longest_sequence() == sets.longest_prompt() + 40


def test_the_table_is_plain_text_of_fixed_width(tokenizer: Tokenizer) -> None:
    config = make_config({"a-long-name": SUMS}, eval={"problems": 5, "samples": 2, "pass_k": [2]})
    lines = evaluate(config, tokenizer, FakeClient(answer())).table().splitlines()
    head = "set score 95% interval problems samples length truncated unscorable"
    assert " ".join(lines[0].split()) == head
    column = lines[0].index("interval") + len("interval")
    assert all(line[column - 1] == "]" for line in lines[1:7])
    assert [line.split()[0] for line in lines[1:4]] == ["main", "greedy", "pass@2"]
    assert all(line.isascii() and len(line) <= 100 for line in lines)
    assert "weights version 7, seed 3" in lines[-1]


def test_the_whole_result_is_written_read_and_replaced(tokenizer: Tokenizer, tmp_path: Path) -> None:
    client = FakeClient(answer(lambda _: "half a pair \ud800"))
    result = evaluate(make_config(), tokenizer, client, make_scorer=Closable)
    assert read_evaluation(tmp_path, 12) is None
    path = write_evaluation(tmp_path, 12, result)
    assert path == tmp_path / "evaluations" / "step-000012.json" == evaluation_path(tmp_path, 12)
    write_evaluation(tmp_path, 12, result)
    value = read_evaluation(tmp_path, 12)
    assert value is not None and value["step"] == 12 and value["weight_version"] == VERSION
    rows = value["sets"][0]["problems"]
    assert len(rows) == 5 and rows[0]["answers"] == ["half a pair \ud800"] and rows[0]["label"]
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_disk_that_fills_up_leaves_the_earlier_file_and_no_half_one(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = evaluate(make_config(), tokenizer, FakeClient(answer()))
    path = write_evaluation(tmp_path, 1, result)
    before = path.read_bytes()

    def full(self: Path, text: str, **_: object) -> int:
        with open(self, "w", encoding="utf-8") as file:
            file.write(text[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        write_evaluation(tmp_path, 1, result)
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("damage", [b"", b"[1]", b'{"format": 99}', b"\xff\xfe", b"[" * 100_000])
def test_a_damaged_evaluation_is_an_error_that_names_the_file(tmp_path: Path, damage: bytes) -> None:
    evaluation_path(tmp_path, 3).parent.mkdir()
    evaluation_path(tmp_path, 3).write_bytes(damage)
    with pytest.raises(EvaluationError, match=r"step-000003\.json"):
        read_evaluation(tmp_path, 3)


def test_a_missing_key_of_a_set_is_named_as_the_sets_own(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "a", "label": "1"}\n')
    with pytest.raises(DataError, match=r"; eval\.sets\.hard\.prompt_key names it, and the row has question, label"):
        EvaluationSets.build(make_config({"hard": {"path": str(path)}}), tokenizer)
    path.write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r'set eval\.sets\.hard\.source = "parquet"'):
        EvaluationSets.build(make_config({"hard": {"path": str(path)}}), tokenizer)
