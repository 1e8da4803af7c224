from __future__ import annotations

import itertools
import json
import math
import random
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from unison.config.fields import fields
from unison.config.schema import AlarmConfig
from unison.observability.alarm_rules import RULES
from unison.observability.alarms import WATCHED, Alarm, AlarmLog, Alarms
from unison.observability.metrics import METRICS

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")

HEALTHY = {
    "rollout/samples": 64.0,
    "rollout/aborted": 0.0,
    "rollout/unscorable": 1.0,
    "reward/timeouts": 1.0,
    "rollout/no_contrast_share": 0.4,
    "rollout/truncated_share": 0.05,
    "rollout/length_mean": 100.0,
    "rollout/logp_diff_mean": 0.002,
    "train/trained_tokens": 6400.0,
    "train/grad_norm": 1.0,
    "train/entropy": 1.0,
}

SICK = {
    "all aborted": {"rollout/aborted": 64.0},
    "no update": {"train/trained_tokens": 0.0},
    "no contrast": {"rollout/no_contrast_share": 0.95},
    "unscorable": {"rollout/unscorable": 16.0},
    "timeouts": {"reward/timeouts": 16.0},
    "truncation": {"rollout/truncated_share": 0.7},
    "mismatch": {"rollout/logp_diff_mean": 0.2},
    "gradient spike": {"train/grad_norm": 25.0},
    "entropy collapse": {"train/entropy": 0.05},
    "longer responses": {"rollout/length_mean": 350.0},
    "shorter responses": {"rollout/length_mean": 20.0},
}


def steps(count: int, changes: Mapping[str, float] | None = None) -> list[dict[str, float]]:
    return [{**HEALTHY, **(changes or {})} for _ in range(count)]


def watch(series: Iterable[Mapping[str, float]], alarms: Alarms | None = None, first: int = 1) -> list[Alarm]:
    alarms = alarms or Alarms(AlarmConfig())
    return [alarm for step, metrics in enumerate(series, first) for alarm in alarms.observe(step, metrics)]


def noisy(seed: int, count: int) -> list[dict[str, float]]:
    rng = random.Random(seed)
    found = []
    for step in range(count):
        metrics = {name: value * rng.uniform(0.5, 1.6) for name, value in HEALTHY.items()}
        metrics["train/entropy"] = max(0.3, 1 - 0.005 * step) * rng.uniform(0.7, 1.3)
        metrics["train/grad_norm"] = rng.lognormvariate(0, 0.45)
        metrics["rollout/no_contrast_share"] = min(1.0, max(0.0, rng.gauss(0.5, 0.2)))
        found.append(metrics)
    return found


def test_there_is_a_case_for_every_rule() -> None:
    assert set(SICK) == {rule.name for rule in RULES}


@pytest.mark.parametrize("name", SICK)
def test_an_alarm_speaks_when_it_should_and_stops_when_it_is_over(name: str) -> None:
    alarms = Alarms(AlarmConfig())
    assert watch(steps(12), alarms) == []
    length = 1 if name == "gradient spike" else 8
    said = watch(steps(length, SICK[name]), alarms, 13)
    assert [alarm.name for alarm in said] == [name]
    assert alarms.active == [name]
    assert watch(steps(12), alarms, 13 + length) == [] and alarms.active == []


@pytest.mark.parametrize("name", SICK)
def test_the_message_says_the_number_the_window_the_meaning_and_what_to_do(name: str) -> None:
    (alarm,) = watch([*steps(12), *steps(8, SICK[name])][: 13 if name == "gradient spike" else 20])
    rule = next(rule for rule in RULES if rule.name == name)
    assert alarm.text.startswith(f"step {alarm.step}: {name}: ")
    assert rule.meaning in alarm.text and rule.advice in alarm.text and "5 steps" in alarm.text
    assert re.search(r"\d", alarm.text.partition(": ")[2]) and alarm.window == 5 and "{" not in alarm.text
    assert math.isfinite(alarm.value) and math.isfinite(alarm.limit)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_each_link_leads_to_an_anchor_and_each_key_exists(rule: object) -> None:
    from unison.observability.alarm_rules import Rule

    assert isinstance(rule, Rule)
    (alarm,) = [alarm for alarm in watch([*steps(12), *steps(8, SICK[rule.name])]) if alarm.name == rule.name][:1]
    page, _, anchor = alarm.link.partition("#")
    assert page == "docs/metrics.md" and f'<a id="{anchor}"></a>`{rule.metric}`' in PAGE
    assert set(rule.reads) <= {metric.name for metric in METRICS}
    for word in re.findall(r"\b(?:rollout|algorithm|trainer|model|reward)\.\w+", f"{rule.meaning} {rule.advice}"):
        assert word in fields(), word


@pytest.mark.parametrize("seed", range(20))
def test_ordinary_noise_raises_no_alarm(seed: int) -> None:
    assert [alarm.text for alarm in watch(noisy(seed, 120))] == []


def test_values_that_are_missing_or_not_finite_are_passed_over() -> None:
    series = noisy(3, 60)
    for i, metrics in enumerate(series):
        for name in WATCHED:
            if (i + len(name)) % 4 == 0:
                metrics[name] = (math.nan, math.inf, -math.inf)[i % 3]
            elif (i + len(name)) % 7 == 0:
                del metrics[name]
    assert watch(series) == []
    assert watch([{}] * 30) == [] and watch([{"eval/accuracy": 0.5}] * 30) == []
    assert watch([{name: math.nan for name in WATCHED}] * 30) == []


def test_nothing_is_said_before_the_window_is_full() -> None:
    sick = {**HEALTHY, **SICK["no contrast"]}
    assert watch([sick] * 4) == []
    assert [alarm.step for alarm in watch([sick] * 6)] == [5]


def test_a_standing_alarm_is_repeated_only_so_often() -> None:
    alarms = Alarms(AlarmConfig(window=3, repeat=10))
    said = watch(steps(40, SICK["truncation"]), alarms)
    assert [alarm.step for alarm in said] == [3, 13, 23, 33]


def test_an_alarm_that_flickers_is_not_said_at_every_turn() -> None:
    config = AlarmConfig(window=2, repeat=50)
    series = [step for _ in range(10) for step in (*steps(2, SICK["truncation"]), *steps(2))]
    said = [alarm.step for alarm in watch(series, Alarms(config))]
    assert len(said) <= 10 and all(later - earlier >= 2 for earlier, later in itertools.pairwise(said))


def test_alarms_come_in_order_of_urgency() -> None:
    everything: dict[str, float] = {}
    for name in ("shorter responses", "entropy collapse", "mismatch", "truncation", "no contrast", "no update"):
        everything |= SICK[name]
    alarms = Alarms(AlarmConfig())
    watch(steps(12), alarms)
    for step in range(13, 30):
        alarms.observe(step, {**HEALTHY, **everything})
    order = [rule.name for rule in RULES]
    assert alarms.active == sorted(alarms.active, key=order.index)
    assert alarms.active[:2] == ["no update", "no contrast"] and len(alarms.active) == 6


def test_steps_without_gradient_are_not_what_is_usual() -> None:
    norms = [1.0, 0.0, 0.0, 0.0, 0.0, 1.2, 0.0, 0.0, 0.0, 0.0, 0.0, 5.0]
    assert watch([{"train/grad_norm": norm} for norm in norms]) == []


def test_a_resumed_run_says_what_an_uninterrupted_one_says() -> None:
    series = [*noisy(1, 20), *steps(12, SICK["truncation"]), *steps(30, {**SICK["entropy collapse"]}), *noisy(2, 20)]
    config = AlarmConfig(repeat=7)
    whole = watch(series, Alarms(config))
    assert {alarm.name for alarm in whole} >= {"truncation", "entropy collapse"}
    for cut in range(0, len(series), 3):
        first = Alarms(config)
        said = watch(series[:cut], first)
        second = Alarms(config)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert said + watch(series[cut:], second, cut + 1) == whole
        assert second.active == Alarms.active.fget(second)  # type: ignore[attr-defined]


def test_what_is_unknown_in_a_kept_state_is_left_out() -> None:
    alarms = Alarms(AlarmConfig())
    watch(steps(8, SICK["truncation"]), alarms)
    state = alarms.state_dict()
    state["said"]["gone"] = 3
    state["standing"].append("gone")
    del state["recent"]["train/entropy"]
    other = Alarms(AlarmConfig())
    other.load_state_dict(state)
    assert other.active == ["truncation"] and "gone" not in other.state_dict()["said"]


def test_switched_off_it_says_nothing() -> None:
    assert watch(steps(30, SICK["truncation"]), Alarms(AlarmConfig(enabled=False))) == []


def test_thresholds_are_those_of_the_configuration() -> None:
    assert watch(steps(10), Alarms(AlarmConfig(truncated_share=0.04)))[0].name == "truncation"
    assert watch(steps(10, SICK["no contrast"]), Alarms(AlarmConfig(no_contrast_share=1.0))) == []
    everything_alike = {"rollout/no_contrast_share": 1.0}
    assert watch(steps(10, everything_alike), Alarms(AlarmConfig(no_contrast_share=1.0)))


def test_the_log_holds_a_line_an_alarm(tmp_path: Path) -> None:
    path = tmp_path / "alarms.jsonl"
    said = watch(steps(60, SICK["truncation"]))
    log = AlarmLog(path)
    assert not path.exists()
    for alarm in said:
        log.write(alarm)
    log.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [5, 25, 45]
    assert lines[0]["text"] == said[0].text and lines[0]["link"].startswith("docs/metrics.md#")
    AlarmLog(tmp_path / "none.jsonl").close()
