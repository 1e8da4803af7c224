from __future__ import annotations

from typing import Any

import pytest

from unison.algorithms.correction_recipes import CORRECTIONS, resolve_correction
from unison.algorithms.corrections import Correction
from unison.config.algorithm import CorrectionConfig
from unison.core.errors import ConfigError


def resolve(name: str = "none", **settings: Any) -> Correction:
    return resolve_correction(CorrectionConfig(name=name, **settings))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("none", Correction()),
        ("recompute", Correction(old="trainer")),
        ("tis", Correction(old="trainer", weight="token", mode="truncate", upper=2.0)),
        ("icepop", Correction(old="trainer", weight="token", mode="mask", lower=0.5, upper=5.0)),
        (
            "mis",
            Correction(
                old="trainer",
                weight="token",
                upper=2.0,
                normalize=True,
                reject="token",
                reject_lower=0.5,
                reject_upper=2.0,
                veto=1e-4,
            ),
        ),
        (
            "mis_geometric",
            Correction(
                old="trainer", weight="token", upper=1.5, reject="geometric", reject_lower=0.99, reject_upper=1.001
            ),
        ),
        ("sequence_tis", Correction(old="trainer", weight="sequence", upper=5.0)),
        ("sequence_mask", Correction(old="trainer", weight="sequence", mode="mask", lower=0.0, upper=3.0)),
    ],
)
def test_recipes_by_name(name: str, expected: Correction) -> None:
    assert resolve(name) == expected


def test_every_recipe_is_named_above_and_none_asks_for_nothing() -> None:
    assert len(CORRECTIONS) == 8
    assert [name for name in CORRECTIONS if not resolve(name).needs_recompute] == ["none"]


def test_keys_of_the_user_come_before_those_of_the_recipe() -> None:
    assert resolve("tis", upper=4.0).upper == 4.0
    assert resolve("mis", veto=0.0, normalize=False) == Correction(
        old="trainer", weight="token", upper=2.0, reject="token", reject_lower=0.5, reject_upper=2.0
    )
    assert resolve("icepop", denominator="reduced").denominator == "reduced"
    assert resolve("none", veto=1e-4) == Correction(veto=1e-4)


def test_what_an_override_makes_void_in_a_recipe_goes_silently() -> None:
    assert resolve("mis", weight="none", reject="none", veto=0.0) == Correction(old="trainer")
    assert resolve("icepop", mode="truncate").lower == 0.0


def test_a_lower_bound_that_is_left_out_is_the_inverse_of_the_upper_one() -> None:
    assert resolve("tis", mode="clip", upper=4.0).lower == 0.25
    assert resolve("tis", mode="mask").lower == 0.5
    assert resolve("mis", reject_upper=4.0).reject_lower == 0.25
    assert resolve(old="trainer", weight="geometric", mode="mask").lower == 0.5
    assert resolve(reject="sequence").reject_lower == 0.5


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("tiss", {}, r"correction\.name='tiss' is unknown; did you mean tis"),
        (
            "none",
            {"weight": "token"},
            r"correction\.weight='token' with correction\.old='rollout' \(of none\) would count",
        ),
        (
            "tis",
            {"old": "rollout"},
            r"correction\.weight='token' \(of tis\) with correction\.old='rollout' would count",
        ),
        (
            "recompute",
            {"mode": "mask"},
            r"correction\.mode='mask' has no effect without a weight; set correction\.weight",
        ),
        ("recompute", {"upper": 3.0}, r"correction\.upper=3\.0 has no effect without a weight"),
        ("recompute", {"lower": 0.5}, r"correction\.lower=0\.5 has no effect without a weight"),
        ("recompute", {"normalize": True}, r"correction\.normalize=True has no effect without a weight"),
        ("tis", {"weight": "none", "upper": 3.0}, r"correction\.upper=3\.0 has no effect without a weight"),
        ("tis", {"lower": 0.5}, r'correction\.lower=0\.5 has no effect under correction\.mode="truncate"'),
        ("tis", {"reject_upper": 3.0}, r"correction\.reject_upper=3\.0 has no effect without a rejection"),
        ("mis", {"reject": "none", "reject_lower": 0.3}, r"correction\.reject_lower=0\.3 has no effect without"),
        (
            "tis",
            {"denominator": "reduced"},
            r"correction\.denominator='reduced' has no effect where nothing is left out",
        ),
        ("tis", {"denominator": "kept"}, r"correction\.denominator='kept' has no effect"),
        ("icepop", {"upper": 0.4}, r"correction\.upper=0\.4 is below 1"),
        ("icepop", {"lower": 6.0}, r"correction\.lower=6 is not in \[0, 1\]"),
        ("mis", {"reject_lower": 2.0}, r"correction\.reject_lower=2 is not in \[0, 1\]"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused_by_name(name: str, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        resolve(name, **settings)


def test_all_that_does_not_fit_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        resolve("none", weight="token", lower=0.5, reject_upper=2.0)
    assert str(refused.value).count("\n- ") == 3
