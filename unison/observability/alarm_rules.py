"""The rules behind the alarms: pure functions of the recent values, most urgent first."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from unison.config.schema import AlarmConfig


@dataclass(frozen=True, slots=True)
class Seen:
    """What broke a rule: the number, its limit, and both in words."""

    value: float
    limit: float
    text: str


class History:
    """The finite values of each watched metric: the latest, and those the run began with."""

    def __init__(
        self, recent: Mapping[str, Sequence[float]], beginning: Mapping[str, Sequence[float]], config: AlarmConfig
    ) -> None:
        self._recent = recent
        self._beginning = beginning
        self.window = config.window

    def last(self, name: str) -> list[float]:
        """The last ``alarm.window`` values, or none where there are not so many yet."""
        values = list(self._recent[name][-self.window :])
        return values if len(values) == self.window else []

    def before_last(self, name: str) -> tuple[list[float], float] | None:
        """The ``alarm.window`` values before the latest, and the latest; None where there are too few."""
        values = list(self._recent[name])
        return (values[-1 - self.window : -1], values[-1]) if len(values) > self.window else None

    def mean(self, name: str) -> float | None:
        values = self.last(name)
        return statistics.fmean(values) if values else None

    def first_mean(self, name: str) -> float | None:
        """Mean of the run's first ``alarm.window`` values."""
        values = self._beginning[name]
        return statistics.fmean(values) if len(values) == self.window else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """``metric`` is the one that the message links to; ``reads`` all that the check looks at."""

    name: str
    metric: str
    reads: tuple[str, ...]
    meaning: str
    advice: str
    check: Callable[[History, AlarmConfig], Seen | None]


def _no_update(history: History, config: AlarmConfig) -> Seen | None:
    tokens = history.last("train/trained_tokens")
    if not tokens or any(tokens):
        return None
    return Seen(0.0, 0.0, f"no token was trained on in the last {config.window} steps")


def _all_aborted(history: History, config: AlarmConfig) -> Seen | None:
    share = _share(history, "rollout/aborted")
    if share is None or share < 1:
        return None
    return Seen(share, 1.0, f"every sample of the last {config.window} steps was aborted")


def _no_contrast(history: History, config: AlarmConfig) -> Seen | None:
    return _over(
        history.mean("rollout/no_contrast_share"),
        config.no_contrast_share,
        f"in {{value:.0%}} of the groups of the last {config.window} steps all samples scored alike "
        "(limit {limit:.0%})",
    )


def _unscorable(history: History, config: AlarmConfig) -> Seen | None:
    return _over(
        _share(history, "rollout/unscorable"),
        config.unscorable_share,
        f"{{value:.0%}} of the samples of the last {config.window} steps could not be scored (limit {{limit:.0%}})",
    )


def _timeouts(history: History, config: AlarmConfig) -> Seen | None:
    return _over(
        _share(history, "reward/timeouts"),
        config.unscorable_share,
        "calls of the reward past their deadline came to {value:.0%} of the samples of the last "
        f"{config.window} steps (limit {{limit:.0%}})",
    )


def _truncated(history: History, config: AlarmConfig) -> Seen | None:
    return _over(
        history.mean("rollout/truncated_share"),
        config.truncated_share,
        f"{{value:.0%}} of the responses of the last {config.window} steps were cut off (limit {{limit:.0%}})",
    )


def _mismatch(history: History, config: AlarmConfig) -> Seen | None:
    return _over(
        history.mean("rollout/logp_diff_mean"),
        config.mismatch,
        "log-probs of rollout and training differ by {value:.3g} nats on average over the last "
        f"{config.window} steps (limit {{limit:g}})",
    )


def _grad_norm(history: History, config: AlarmConfig) -> Seen | None:
    found = history.before_last("train/grad_norm")
    if found is None:
        return None
    before, latest = found
    # Steps without contrast have no gradient: they say nothing of what is usual.
    usual = statistics.median([value for value in before if value > 0] or [0.0])
    limit = config.grad_norm_ratio * usual
    if usual == 0 or latest <= limit:
        return None
    text = f"the gradient norm is {latest:.3g}, {latest / usual:.0f} times its median of {usual:.3g} over the"
    return Seen(latest, limit, f"{text} {config.window} steps before (limit {config.grad_norm_ratio:g} times)")


def _entropy(history: History, config: AlarmConfig) -> Seen | None:
    now, first = history.mean("train/entropy"), history.first_mean("train/entropy")
    if now is None or first is None or first <= 0 or now >= config.entropy_share * first:
        return None
    text = f"entropy is {now:.3g} nats over the last {config.window} steps, {now / first:.0%} of the {first:.3g} at"
    return Seen(now, config.entropy_share * first, f"{text} the beginning (limit {config.entropy_share:.0%})")


def _length_up(history: History, config: AlarmConfig) -> Seen | None:
    return _length(history, config, longer=True)


def _length_down(history: History, config: AlarmConfig) -> Seen | None:
    return _length(history, config, longer=False)


def _length(history: History, config: AlarmConfig, *, longer: bool) -> Seen | None:
    now, first = history.mean("rollout/length_mean"), history.first_mean("rollout/length_mean")
    if now is None or first is None or first <= 0:
        return None
    limit = first * config.length_ratio if longer else first / config.length_ratio
    if (now <= limit) if longer else (now >= limit):
        return None
    text = f"responses have {now:.1f} tokens on average over the last {config.window} steps, {first:.1f} at the"
    return Seen(now, limit, f"{text} beginning (limit {limit:.1f})")


def _share(history: History, count: str) -> float | None:
    """A count of samples over the window, by all samples of the window."""
    counts, samples = history.last(count), history.last("rollout/samples")
    return sum(counts) / sum(samples) if counts and sum(samples) > 0 else None


def _over(value: float | None, limit: float, text: str) -> Seen | None:
    if value is None or value < limit:
        return None
    return Seen(value, limit, text.format(value=value, limit=limit))


def _rule(
    name: str,
    metric: str,
    check: Callable[[History, AlarmConfig], Seen | None],
    meaning: str,
    advice: str,
    *also: str,
) -> Rule:
    return Rule(name=name, metric=metric, reads=(metric, *also), meaning=meaning, advice=advice, check=check)


RULES: Final[tuple[Rule, ...]] = (
    # Stalls: nothing is learnt whatever the numbers say.
    _rule(
        "all aborted",
        "rollout/aborted",
        _all_aborted,
        "nothing is sampled to its end",
        "see the run's messages for what ends the samples",
        "rollout/samples",
    ),
    _rule(
        "no update",
        "train/trained_tokens",
        _no_update,
        "every sample is masked, unscorable or filtered out, and the weights stand still",
        "raise rollout.max_new_tokens or set algorithm.truncated to keep, or see the errors in rollouts.jsonl",
    ),
    # Degenerate groups: samples that carry no signal.
    _rule(
        "no contrast",
        "rollout/no_contrast_share",
        _no_contrast,
        "such groups teach nothing, as the task is too hard, too easy, or the reward is blind",
        "make the task easier or harder, raise rollout.samples_per_prompt, or look at the reward in rollouts.jsonl",
    ),
    _rule(
        "unscorable",
        "rollout/unscorable",
        _unscorable,
        "the reward fails on them",
        "see the errors in rollouts.jsonl, and mend the reward",
        "rollout/samples",
    ),
    _rule(
        "timeouts",
        "reward/timeouts",
        _timeouts,
        "the reward is too slow, or hangs on what the policy writes",
        "see the errors in rollouts.jsonl, and make the reward faster or raise reward.timeout_s",
        "rollout/samples",
    ),
    _rule(
        "truncation",
        "rollout/truncated_share",
        _truncated,
        "what is cut off may have no answer, and is not trained under algorithm.truncated = mask",
        "raise rollout.max_new_tokens, or give a stop string",
    ),
    # The rest: the policy or its arithmetic drifts.
    _rule(
        "mismatch",
        "rollout/logp_diff_mean",
        _mismatch,
        "the update corrects an error that is not the policy's",
        "use model.numerics = exact, or compare the two sides with unison check exactness",
    ),
    _rule(
        "gradient spike",
        "train/grad_norm",
        _grad_norm,
        "a few samples pull hard, or the learning rate is too high",
        "look at this step's rollouts, and lower trainer.learning_rate if it comes again",
    ),
    _rule(
        "entropy collapse",
        "train/entropy",
        _entropy,
        "the policy has made up its mind and no longer explores",
        "lower trainer.learning_rate, raise algorithm.clip_high, or go back to an earlier checkpoint",
    ),
    _rule(
        "longer responses",
        "rollout/length_mean",
        _length_up,
        "the policy rambles, unless the reward rises with it",
        "look at the responses in rollouts.jsonl and at the stop strings",
    ),
    _rule(
        "shorter responses",
        "rollout/length_mean",
        _length_down,
        "the policy has found that short answers pay, unless the task asks for them",
        "look at the responses and the reward in rollouts.jsonl",
    ),
)
