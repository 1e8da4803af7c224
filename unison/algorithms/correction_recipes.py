"""Corrections by name, and how ``[correction]`` becomes one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from unison.algorithms.corrections import Correction
from unison.config.algorithm import CorrectionConfig
from unison.config.names import did_you_mean
from unison.config.plugins import load_object
from unison.core.errors import ConfigError

CORRECTIONS: Final[Mapping[str, Mapping[str, Any]]] = {
    # The ratio of the loss is taken to the policy that sampled, so there is nothing left to correct.
    "none": {"old": "rollout"},
    # The usual proximal objective of systems with two engines: exact ratios, and the mismatch left uncorrected.
    "recompute": {"old": "trainer"},
    # Truncated importance sampling (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
    # training"); the bound of slime, SkyRL and verl.
    "tis": {"old": "trainer", "weight": "token", "mode": "truncate", "upper": 2.0},
    # IcePop (Ling team 2025, "Small leak can sink a great ship"): tokens outside the band leave the loss; the band
    # of verl's preset and of OpenRLHF.
    "icepop": {"old": "trainer", "weight": "token", "mode": "mask", "lower": 0.5, "upper": 5.0},
    # Masked importance sampling, the defaults of slime's helper for the mismatch of training and inference.
    "mis": {
        "old": "trainer",
        "weight": "token",
        "mode": "truncate",
        "upper": 2.0,
        "normalize": True,
        "reject": "token",
        "reject_upper": 2.0,
        "veto": 1e-4,
    },
    # The setting that outlived the others in the experiments of slime's authors on a mixture of experts, which
    # survived with and without normalisation; without is the simpler.
    "mis_geometric": {
        "old": "trainer",
        "weight": "token",
        "mode": "truncate",
        "upper": 1.5,
        "reject": "geometric",
        "reject_lower": 0.99,
        "reject_upper": 1.001,
    },
    # SkyRL's cap of the sequence ratio.
    "sequence_tis": {"old": "trainer", "weight": "sequence", "mode": "truncate", "upper": 5.0},
    # TRL's default: sequences whose ratio is above 3 leave the loss; there is no bound below.
    "sequence_mask": {"old": "trainer", "weight": "sequence", "mode": "mask", "lower": 0.0, "upper": 3.0},
}
"""Values for the keys of ``[correction]`` that the user leaves null."""

_UNSAID: Final[Mapping[str, Any]] = {
    "weight": "none",
    "mode": "truncate",
    "upper": 2.0,
    "reject": "none",
    "reject_upper": 2.0,
    "veto": 0.0,
}
"""What holds where recipe and user say nothing; a lower bound is then 1 / upper."""


_OF_WEIGHT: Final = ("mode", "lower", "upper", "normalize")
_OF_REJECT: Final = ("reject_lower", "reject_upper")


def resolve_correction(config: CorrectionConfig) -> Correction:
    """The correction of ``[correction]``, its recipe filled in. Raises ConfigError for a setting without effect."""
    if ":" in config.name:
        return _of_users(config)
    if config.name not in CORRECTIONS:
        raise ConfigError(
            f"correction.name={config.name!r} is unknown{did_you_mean(config.name, CORRECTIONS)}; "
            f"known: {', '.join(CORRECTIONS)}, or module:function of your own"
        )
    keys = [key for key in config.__struct_fields__ if key != "name"]
    given = {key: value for key in keys if (value := getattr(config, key)) is not None}
    chosen = {**_UNSAID, **CORRECTIONS[config.name], **given}
    problems = [*_contradictions(config.name, chosen, given), *_without_effect(chosen, given)]
    if problems:
        raise ConfigError("corrections that do not fit together:\n" + "\n".join(f"- {problem}" for problem in problems))
    for prefix in ("", "reject_"):
        chosen.setdefault(f"{prefix}lower", 1 / chosen[f"{prefix}upper"])
    return Correction(**{key: value for key, value in chosen.items() if _has_effect(key, chosen)})


def _of_users(config: CorrectionConfig) -> Correction:
    function = load_object(config.name, kind="correction", error=ConfigError)
    if not callable(function) or isinstance(function, type):
        raise ConfigError(f"correction.name={config.name!r} is no function; see unison.algorithms.corrections.correct")
    own = ("name", "old", "denominator")
    void = [key for key in config.__struct_fields__ if key not in own and getattr(config, key) is not None]
    if void:
        raise ConfigError(
            f"correction.{void[0]}={getattr(config, void[0])!r} has no effect with correction.name={config.name!r}, a "
            "function of your own, which weighs and rejects by itself; leave it out"
        )
    return Correction(old=config.old or "trainer", denominator=config.denominator or "kept", function=function)


def _contradictions(name: str, chosen: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[str]:
    if chosen["weight"] != "none" and chosen["old"] == "rollout":
        said = {key: "" if key in given else f" (of {name})" for key in ("weight", "old")}
        yield (
            f"correction.weight={chosen['weight']!r}{said['weight']} with correction.old='rollout'{said['old']} would "
            "count the mismatch twice: the ratio in the loss is to the rollout's log-probs already; set "
            'correction.old="trainer", or correction.weight="none"'
        )


def _without_effect(chosen: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[str]:
    for key, value in given.items():
        if _has_effect(key, chosen):
            continue
        if key == "denominator":
            cause = (
                "where nothing is left out of the loss; set correction.reject, correction.veto or "
                'correction.mode="mask" with a weight'
            )
        elif key in _OF_REJECT:
            cause = "without a rejection; set correction.reject"
        elif chosen["weight"] == "none":
            cause = "without a weight; set correction.weight"
        else:
            cause = 'under correction.mode="truncate", which cuts above alone; set mode="clip" or mode="mask"'
        yield f"correction.{key}={value!r} has no effect {cause}, or leave this out"


def _has_effect(key: str, chosen: Mapping[str, Any]) -> bool:
    if key == "lower" and chosen["mode"] == "truncate":
        return False
    if key in _OF_WEIGHT:
        return bool(chosen["weight"] != "none")
    if key in _OF_REJECT:
        return bool(chosen["reject"] != "none")
    if key == "denominator":
        masks = chosen["weight"] != "none" and chosen["mode"] == "mask"
        return bool(masks or chosen["reject"] != "none" or chosen["veto"] > 0)
    return True


def describe_correction(correction: Correction) -> str:
    """One line for people: what becomes of samples that another policy drew."""
    parts = [f"ratio to the {correction.old}'s log-probs"]
    if correction.weight != "none":
        bounds = (
            f"{correction.upper:g}"
            if correction.mode == "truncate"
            else f"[{correction.lower:g}, {correction.upper:g}]"
        )
        normal = ", normalised over the batch" if correction.normalize else ""
        parts.append(f"{correction.weight} weights, {correction.mode} {bounds}{normal}")
    if correction.reject != "none":
        parts.append(
            f"{correction.reject} rejection outside [{correction.reject_lower:g}, {correction.reject_upper:g}]"
        )
    if correction.veto > 0:
        parts.append(f"veto below {correction.veto:g}")
    if correction.function is not None:
        parts.append(f"weighed and rejected by {getattr(correction.function, '__qualname__', correction.function)}")
    if correction.leaves_out:
        parts.append(f"denominators {correction.denominator}")
    return "; ".join(parts)
