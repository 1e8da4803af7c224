from __future__ import annotations

from pathlib import Path

import pytest

from unison.config.fields import fields
from unison.observability.metrics import METRICS
from unison.observability.registry import Metric, MetricError, MetricRegistry, anchor, render_page

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"

STABLE = """
rollout/reward_mean rollout/reward_std rollout/logp_diff_max rollout/logp_diff_mean rollout/length_mean
rollout/length_min rollout/length_max rollout/truncated_share rollout/unscorable rollout/aborted rollout/tokens
rollout/failed
rollout/tokens_per_s rollout/seconds rollout/no_contrast_share reward/seconds train/loss train/kl train/entropy
train/ratio_mean train/ratio_max train/clip_share train/grad_norm train/learning_rate train/tokens train/tokens_per_s
train/seconds train/micro_batches weights/version weights/seconds step/seconds step/other_share eval/accuracy
eval/accuracy_ci_low eval/accuracy_ci_high eval/accuracy_greedy eval/accuracy_greedy_ci_low eval/accuracy_greedy_ci_high
eval/length_mean eval/truncated_share eval/problems eval/seconds eval/weight_version memory/peak_bytes data/epoch
data/skipped
"""


def metric(name: str) -> Metric:
    return Metric(name=name, description="d", unit="u", healthy="h", advice="a")


def test_the_names_users_script_against_stay() -> None:
    assert set(STABLE.split()) <= {metric.name for metric in METRICS}


def test_each_metric_is_explained() -> None:
    for entry in METRICS:
        assert len(entry.description) > 10 and entry.description.endswith(".")
        assert entry.unit and (len(entry.healthy) > 1 or entry.healthy == "0")
        assert len(entry.advice) > 10 and not entry.advice.startswith("as ")


def test_advice_names_only_keys_and_metrics_that_exist() -> None:
    known = set(fields()) | {metric.name for metric in METRICS}
    sections = {name.split(".")[0] for name in fields()} - {"data"} | {"rollout", "train"}
    for entry in METRICS:
        for word in f"{entry.healthy} {entry.advice} {entry.description}".replace(",", " ").replace(";", " ").split():
            word = word.strip(".:`()")
            if "." in word and word.split(".")[0] in sections and not word.endswith(".jsonl"):
                assert word in known, (entry.name, word)
            if "/" in word and word.split("/")[0] in sections:
                assert word in known, (entry.name, word)


def test_the_committed_page_of_metrics_is_the_generated_one() -> None:
    assert PAGE.read_text(encoding="utf-8") == render_page(METRICS), (
        "run: python -m unison.observability.metrics > docs/metrics.md"
    )


def test_each_metric_has_an_anchor_of_its_own_that_stays() -> None:
    anchors = [anchor(metric.name) for metric in METRICS]
    assert len(set(anchors)) == len(anchors)
    page = PAGE.read_text(encoding="utf-8")
    assert all(page.count(f'<a id="{name}"></a>') == 1 for name in anchors)
    assert anchor("train/entropy") == "train-entropy" and anchor("rollout/no_contrast_share") in page


def test_an_unknown_name_is_refused_and_the_nearest_named() -> None:
    with pytest.raises(MetricError, match=r"'rollout/reward_mena' is not registered; did you mean rollout/reward_mean"):
        METRICS.check(["train/loss", "rollout/reward_mena"])
    with pytest.raises(MetricError, match="register it"):
        METRICS["zzz"]


def test_a_metric_registers_once_and_under_a_proper_name() -> None:
    registry = MetricRegistry([metric("a/b")])
    registry.register(metric("a/c"))
    assert "a/c" in registry and registry["a/c"].unit == "u"
    with pytest.raises(MetricError, match="already"):
        registry.register(metric("a/b"))
    for bad in ("a", "A/b", "a//b", "a/b c", "a/<B>", "a/x<b>", "<a>/b", "a/b/", ""):
        with pytest.raises(MetricError, match="group/stat"):
            registry.register(metric(bad))


def test_a_family_stands_for_the_metrics_with_names_of_users() -> None:
    registry = MetricRegistry([metric("a/part/<name>/mean"), metric("a/part/<name>/std")])
    registry.check(["a/part/short/mean", "a/part/My-part_2/std"])
    assert registry["a/part/short/mean"].name == "a/part/<name>/mean"
    assert "a/part/x/mean" in registry and "a/part/x/median" not in registry
    unknown = ["a/part/mean", "a/part//mean", "a/part/x/y/mean", "a/part/x y/mean", "a/part/<name>/mean"]
    for name in [*unknown, f"a/part/{'x' * 65}/mean"]:
        with pytest.raises(MetricError, match="not registered"):
            registry.check([name])
    assert '| <a id="a-part-name-mean"></a>`a/part/<name>/mean` |' in render_page(registry)
