"""The metrics of a run: the one table that names and explains each of them.

``python -m unison.observability.metrics`` prints the docs page.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from unison.observability.mismatch_metrics import MISMATCH
from unison.observability.registry import Metric, MetricRegistry, render_page
from unison.observability.training_metrics import CRITIC, TRAIN


def _metric(name: str, unit: str, description: str, healthy: str, advice: str) -> Metric:
    return Metric(name=name, unit=unit, description=description, healthy=healthy, advice=advice)


_NO_ADVICE: Final = "nothing to do: it describes the run"

_ROLLOUT: Final = (
    _metric(
        "rollout/reward_mean",
        "reward",
        "Mean reward of the step's scorable samples.",
        "rises over tens of steps; single steps are noisy",
        "flat: look at rollout/no_contrast_share and raise trainer.learning_rate; falling: lower it",
    ),
    _metric(
        "rollout/reward_std",
        "reward",
        "Standard deviation of the reward over the step's scorable samples.",
        "well above 0",
        "near 0, all samples score alike and nothing is learnt: make the task easier or harder",
    ),
    _metric(
        "rollout/logp_diff_max",
        "nats",
        "Largest absolute difference between a token's log-prob as sampled and as the trainer computes it "
        "with the same weights.",
        "exactly 0 with exact numerics",
        "run `unison check exactness --model ...`; with fast numerics keep it below about 0.5",
    ),
    _metric(
        "rollout/logp_diff_mean",
        "nats",
        "Mean absolute difference between the log-probs of rollout and training, over all sampled tokens.",
        "exactly 0 with exact numerics; below about 0.01 with fast ones",
        "run `unison check exactness --model ...`; with fast numerics compare dtypes and kernels of the two sides",
    ),
    _metric(
        "rollout/length_mean",
        "tokens",
        "Mean response length, the end token included.",
        "steady, or moving with the reward",
        "growing without reward: check the stop strings and lower rollout.max_new_tokens",
    ),
    _metric(
        "rollout/length_min",
        "tokens",
        "Length of the step's shortest response, the end token included.",
        "above 1",
        "1: the model ends at once; look at the prompt's form and at rollout.stop",
    ),
    _metric(
        "rollout/length_max",
        "tokens",
        "Length of the step's longest response.",
        "below rollout.max_new_tokens",
        "at the limit: see rollout/truncated_share",
    ),
    _metric(
        "rollout/truncated_share",
        "share",
        "Share of responses that ended by length instead of a stop.",
        "below 0.1",
        "raise rollout.max_new_tokens, or give a stop string; algorithm.truncated says how they are trained",
    ),
    _metric(
        "rollout/filtered_groups",
        "groups",
        "Groups of the step that rollout.filter discarded, after all refills.",
        "0, or steady",
        "rising: prompts have become too easy or too hard; raise rollout.refill or change the data",
    ),
    _metric(
        "rollout/unscorable",
        "samples",
        "Samples whose reward function failed or returned no finite number; they are left out of their group.",
        "0",
        "see `error` in rollouts.jsonl and mend the reward function",
    ),
    _metric(
        "rollout/aborted",
        "samples",
        "Samples ended before they were complete.",
        "0",
        "see the run's messages for what ended them",
    ),
    _metric(
        "rollout/failed",
        "samples",
        "Samples whose rollout function raised or ran past rollout.timeout_s; they are left out of their group.",
        "0",
        "see the run's messages and mend the rollout function",
    ),
    _metric(
        "rollout/samples",
        "samples",
        "Samples drawn in the step.",
        "prompts times samples per prompt",
        "fewer: prompts ran out or groups were filtered out",
    ),
    _metric("rollout/tokens", "tokens", "Tokens sampled in the step.", "steady", _NO_ADVICE),
    _metric(
        "rollout/tokens_per_s",
        "tokens/s",
        "Sampled tokens by time of the rollout.",
        "steady",
        "falling with equal lengths: another process takes the cores; `unison doctor` looks",
    ),
    _metric(
        "rollout/seconds",
        "s",
        "Time of the rollout, rewards not included.",
        "steady",
        "shorten responses, or raise engine.max_running",
    ),
    _metric(
        "rollout/no_contrast_share",
        "share",
        "Share of groups whose samples all have the same reward, so that they teach nothing.",
        "below 0.7",
        "near 1: raise rollout.samples_per_prompt, or choose prompts the model solves sometimes",
    ),
    _metric(
        "reward/seconds",
        "s",
        "Time of the reward function for the step's samples.",
        "far below rollout/seconds",
        "make the reward function cheaper, or raise reward.workers",
    ),
    _metric(
        "reward/timeouts",
        "calls",
        "Calls of reward functions that ran past their deadline, those of whole batches included.",
        "0",
        "see `error` in rollouts.jsonl; raise reward.timeout_s, or mend the function",
    ),
    _metric(
        "reward/crashes",
        "calls",
        "Calls whose grader process ran out of memory or died.",
        "0",
        "see `error` in rollouts.jsonl; raise reward.memory_mb, or mend the function",
    ),
    _metric(
        "reward/workers_restarted",
        "processes",
        "Grader processes replaced after a timeout or a crash.",
        "0",
        "see reward/timeouts and reward/crashes",
    ),
    _metric(
        "reward/part/<name>/mean",
        "reward",
        "Mean of one part of the reward, before its weight, over the samples it has an opinion of.",
        "rises for the parts that matter",
        "one part rises and the others fall: change the weights",
    ),
    _metric(
        "reward/part/<name>/std",
        "reward",
        "Standard deviation of that part over the same samples.",
        "above 0",
        "0: the part tells no sample from another; leave it out, or make it finer",
    ),
)

_SYSTEM: Final = (
    _metric("weights/version", "updates", "Weight version the engine holds after the step.", "the step", _NO_ADVICE),
    _metric(
        "weights/seconds",
        "s",
        "Time of the weight update from trainer to engine.",
        "far below step/seconds",
        "growing: memory is short, see memory/peak_bytes",
    ),
    _metric("step/seconds", "s", "Time of the whole step, evaluation not included.", "steady", _NO_ADVICE),
    _metric(
        "step/other_share",
        "share",
        "Share of the step outside forward, backward and sampling: rewards, batching, weight update, logging.",
        "below 0.1",
        "see reward/seconds and weights/seconds",
    ),
    _metric(
        "memory/peak_bytes",
        "bytes",
        "Highest resident memory of the process so far.",
        "flat after the first steps",
        "lower engine.kv_tokens, trainer.micro_batch_tokens or trainer.logprob_chunk_tokens",
    ),
    _metric(
        "data/epoch",
        "epochs",
        "Times the training prompts have been gone through.",
        "below about 10",
        "higher: the prompts may be learnt by heart; compare eval/accuracy, and use more of them",
    ),
    _metric(
        "data/skipped",
        "prompts",
        "Training prompts left out so far: broken rows, those data.filter left out, too short and too long ones.",
        "0",
        "the notes at the start name the first ten for each reason",
    ),
    _metric(
        "alarms/active",
        "alarms",
        "Alarms that stand after the step; which ones stands in alarms.jsonl.",
        "0",
        "read the last lines of alarms.jsonl, the most urgent first",
    ),
)

_CONFIDENCE: Final = "interval, at level eval.confidence,"
_CI_HEALTHY: Final = "within about 0.05 of the accuracy"
_CI_ADVICE: Final = "further away: raise eval.problems before reading anything into a difference"

_EVAL: Final = (
    _metric(
        "eval/accuracy",
        "share",
        "Mean reward of samples on held-out prompts at eval.temperature.",
        "rises with rollout/reward_mean",
        "rollout rises and this does not: the training prompts are learnt by heart; use more of them",
    ),
    _metric(
        "eval/accuracy_ci_low",
        "share",
        f"Lower end of the confidence {_CONFIDENCE} of eval/accuracy.",
        _CI_HEALTHY,
        _CI_ADVICE,
    ),
    _metric(
        "eval/accuracy_ci_high",
        "share",
        f"Upper end of the confidence {_CONFIDENCE} of eval/accuracy.",
        _CI_HEALTHY,
        _CI_ADVICE,
    ),
    _metric(
        "eval/accuracy_greedy",
        "share",
        "Mean reward on held-out prompts at temperature 0.",
        "at or above eval/accuracy",
        "far below eval/accuracy: look at the greedy responses for loops",
    ),
    _metric(
        "eval/accuracy_greedy_ci_low",
        "share",
        f"Lower end of the confidence {_CONFIDENCE} of eval/accuracy_greedy.",
        _CI_HEALTHY,
        _CI_ADVICE,
    ),
    _metric(
        "eval/accuracy_greedy_ci_high",
        "share",
        f"Upper end of the confidence {_CONFIDENCE} of eval/accuracy_greedy.",
        _CI_HEALTHY,
        _CI_ADVICE,
    ),
    _metric(
        "eval/length_mean",
        "tokens",
        "Mean response length of the sampled evaluation.",
        "near rollout/length_mean",
        "see rollout/length_mean",
    ),
    _metric(
        "eval/truncated_share",
        "share",
        "Share of the sampled evaluation's responses that ended by length.",
        "near rollout/truncated_share",
        "see rollout/truncated_share",
    ),
    _metric(
        "eval/pass_at/<k>",
        "share",
        "Unbiased estimate of pass@k, for each k of eval.pass_k: the chance that of k samples of a held-out prompt at "
        "least one scores eval.pass_threshold.",
        "above eval/accuracy, and rising with k",
        "flat while eval/accuracy rises: the model does more surely what it could do before, and nothing new",
    ),
    _metric(
        "eval/pass_at_ci_low/<k>",
        "share",
        f"Lower end of the confidence {_CONFIDENCE} of eval/pass_at/<k>.",
        "within about 0.05 of it",
        _CI_ADVICE,
    ),
    _metric(
        "eval/pass_at_ci_high/<k>",
        "share",
        f"Upper end of the confidence {_CONFIDENCE} of eval/pass_at/<k>.",
        "within about 0.05 of it",
        _CI_ADVICE,
    ),
    _metric(
        "eval/problems",
        "prompts",
        "Held-out prompts that the accuracy is the mean over.",
        "200 or more",
        "raise eval.problems",
    ),
    _metric(
        "eval/unscorable",
        "samples",
        "Held-out answers, sampled and greedy, that could not be scored; they are left out of the accuracy, and count "
        "as failed in pass@k.",
        "0",
        "see the reasons in the messages; mend the reward function",
    ),
    _metric(
        "eval/accuracy_if_unscorable_0",
        "share",
        "The accuracy with every unscorable sample at 0, logged where there is one.",
        "near eval/accuracy",
        "see eval/unscorable",
    ),
    _metric(
        "eval/accuracy_if_unscorable_1",
        "share",
        "The accuracy with every unscorable sample at 1, logged where there is one.",
        "near eval/accuracy",
        "see eval/unscorable",
    ),
)


def _of_each_set(metric: Metric) -> Metric:
    name = metric.name.replace("eval/", "eval/<set>/", 1)
    return replace(
        metric, name=name, description=f"As {metric.name}, of a named evaluation set.", advice=f"see {metric.name}"
    )


_EVAL_SETS: Final = tuple(map(_of_each_set, _EVAL))

_EVAL_TIMES: Final = (
    _metric("eval/<set>/seconds", "s", "Time of the evaluation of one named set.", "steady", _NO_ADVICE),
    _metric("eval/seconds", "s", "Time of the evaluation.", "far below the run", "lower eval.problems or eval.samples"),
    _metric("eval/weight_version", "updates", "Weight version that was evaluated.", "the step", _NO_ADVICE),
)

METRICS: Final[MetricRegistry] = MetricRegistry(
    (*_ROLLOUT, *TRAIN, *CRITIC, *MISMATCH, *_SYSTEM, *_EVAL, *_EVAL_SETS, *_EVAL_TIMES)
)
"""The registry that sinks check against. A plug-in adds its own metrics with ``METRICS.register``."""


if __name__ == "__main__":
    print(render_page(METRICS), end="")
