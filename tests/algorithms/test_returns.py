from __future__ import annotations

import dataclasses
import math
import random
import statistics

import pytest
import torch

from tests.algorithms.episodes import DOUBLE, Estimator, batch_of, by_trajectory, random_batches, rearranged
from tests.algorithms.ragged import all_close
from unison.algorithms.advantages.returns import (
    discounted_returns,
    reinforce,
    reinforce_pp,
    reinforce_pp_baseline,
    remax,
)
from unison.algorithms.advantages.turns import grpo_turns
from unison.algorithms.trajectories import Trajectories
from unison.core.errors import ConfigError, RewardError

NAN = math.nan
LOCAL: dict[str, Estimator] = {
    "reinforce": reinforce,
    "reinforce_discounted": lambda batch: reinforce(batch, gamma=0.9),
    "reinforce_over": lambda batch: reinforce(batch, gamma=0.9, observations="over"),
    "reinforce_pp": lambda batch: reinforce_pp(batch, whiten=False),
    "reinforce_pp_baseline": lambda batch: reinforce_pp_baseline(batch, whiten=False),
    "remax": remax,
    "grpo_turns": grpo_turns,
}
"""Those in which a trajectory depends on its own group at most."""
GLOBAL: dict[str, Estimator] = {
    "reinforce": lambda batch: reinforce(batch, gamma=0.9, whiten=True),
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
}
"""Those that are scaled over the whole batch."""


def spans(batch: Trajectories) -> list[range]:
    starts = [sum(batch.lengths[:i]) for i in range(len(batch.lengths))]
    return [range(start, start + length) for start, length in zip(starts, batch.lengths, strict=True)]


def returns_by_loop(batch: Trajectories, gamma: float, observations: str, with_penalties: bool = True) -> list[float]:
    sampled = batch.sampled_T.tolist()
    rewards = batch.rewards_T.tolist()
    penalties = batch.penalties_T.tolist() if batch.penalties_T is not None and with_penalties else [0.0] * len(sampled)
    returns = [0.0] * len(sampled)
    for i, own in enumerate(spans(batch)):
        later = 0.0
        for t in reversed(own):
            if not batch.valid_N[i].item():
                continue
            if sampled[t]:
                later = rewards[t] - penalties[t] + gamma * later
                returns[t] = later
            elif observations == "over":
                later *= gamma
    return returns


def whitened_by_loop(batch: Trajectories, values: list[float], std: str) -> list[float]:
    """Compares at trained tokens; elsewhere it is 0."""
    trained = [
        t for i, own in enumerate(spans(batch)) for t in own if batch.valid_N[i].item() and batch.trained_T[t].item()
    ]
    result = [0.0] * len(values)
    kept = [values[t] for t in trained]
    if len(set(kept)) > 1:
        mean = statistics.fmean(kept)
        deviation = statistics.stdev(kept) if std == "sample" else statistics.pstdev(kept)
        for t in trained:
            result[t] = (values[t] - mean) / (deviation + 1e-8)
    return result


@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.99, 1.0])
@pytest.mark.parametrize("observations", ["across", "over"])
def test_random_ragged_returns_match_a_loop_over_tokens(gamma: float, observations: str) -> None:
    for batch in random_batches():
        expected = returns_by_loop(batch, gamma, observations)
        plain = reinforce(batch, gamma=gamma, observations=observations)  # type: ignore[arg-type]
        assert plain.dtype == DOUBLE and all_close(plain.tolist(), expected, 1e-9)
        same = reinforce_pp(batch, gamma=gamma, whiten=False, observations=observations)  # type: ignore[arg-type]
        assert torch.equal(same, plain)
        for std in ("sample", "population"):
            white = reinforce_pp(batch, gamma=gamma, std=std, observations=observations)  # type: ignore[arg-type]
            assert all_close(white.tolist(), whitened_by_loop(batch, expected, std), 1e-7)


def test_random_ragged_baselines_match_a_loop_over_tokens() -> None:
    for batch in random_batches(30):
        assert batch.penalties_T is not None and batch.baselines_N is not None
        returns = returns_by_loop(batch, 1.0, "across")
        relative, against_greedy = [0.0] * len(returns), [0.0] * len(returns)
        for i, own in enumerate(spans(batch)):
            peers = [
                batch.outcomes_N[j].item()
                for j in range(len(batch.lengths))
                if batch.group_ids[j] == batch.group_ids[i] and batch.valid_N[j].item()
            ]
            for t in own:
                if batch.valid_N[i].item() and batch.sampled_T[t].item():
                    centred = batch.outcomes_N[i].item() - statistics.fmean(peers)
                    relative[t] = centred - batch.penalties_T[t].item()
                    if not math.isnan(batch.baselines_N[i].item()):
                        against_greedy[t] = returns[t] - batch.baselines_N[i].item()
        assert all_close(reinforce_pp_baseline(batch, whiten=False).tolist(), relative, 1e-9)
        assert all_close(remax(batch).tolist(), against_greedy, 1e-9)
        for std in ("sample", "population"):
            white = reinforce_pp_baseline(batch, std=std)
            assert all_close(white.tolist(), whitened_by_loop(batch, relative, std), 1e-7)


def test_random_ragged_turns_match_a_loop_over_tokens() -> None:
    for batch in random_batches(30):
        assert batch.rewarded_T is not None
        own_of = spans(batch)
        places = [[t for t in own if batch.rewarded_T[t].item()] for own in own_of]
        expected = [0.0] * int(sum(batch.lengths))
        for i, own in enumerate(own_of):
            peers = [
                j for j in range(len(own_of)) if batch.group_ids[j] == batch.group_ids[i] and batch.valid_N[j].item()
            ]
            rewards = [batch.rewards_T[t].item() for j in peers for t in places[j]]
            if i not in peers or len(peers) < 2 or len(set(rewards)) < 2:
                continue
            mean, deviation = statistics.fmean(rewards), statistics.stdev(rewards) + 1e-6
            for t in own:
                if batch.sampled_T[t].item():
                    later = [batch.rewards_T[u].item() for u in places[i] if u >= t]
                    expected[t] = sum((reward - mean) / deviation for reward in later)
        assert all_close(grpo_turns(batch).tolist(), expected, 1e-9)


@pytest.mark.parametrize("name", LOCAL)
def test_neither_order_nor_splitting_nor_other_groups_change_a_bit(name: str) -> None:
    estimate = LOCAL[name]
    for seed, batch in enumerate(random_batches()):
        whole = by_trajectory(batch, estimate(batch))
        order = list(range(len(batch.lengths)))
        random.Random(seed).shuffle(order)
        shuffled = rearranged(batch, order)
        assert by_trajectory(shuffled, estimate(shuffled)) == [whole[i] for i in order]
        for group in set(batch.group_ids):
            own = [i for i in order if batch.group_ids[i] == group]
            alone = rearranged(batch, own)
            assert by_trajectory(alone, estimate(alone)) == [whole[i] for i in own]


@pytest.mark.parametrize("name", GLOBAL)
def test_whitened_advantages_do_not_depend_on_the_order_of_a_batch(name: str) -> None:
    for seed, batch in enumerate(random_batches()):
        whole = by_trajectory(batch, GLOBAL[name](batch))
        order = list(range(len(batch.lengths)))
        random.Random(seed).shuffle(order)
        shuffled = rearranged(batch, order)
        for row, i in zip(by_trajectory(shuffled, GLOBAL[name](shuffled)), order, strict=True):
            assert all_close(row, whole[i], 1e-12)


@pytest.mark.parametrize("name", GLOBAL)
def test_whitened_advantages_have_mean_0_and_deviation_1_over_the_trained_tokens(name: str) -> None:
    seen = 0
    for batch in random_batches():
        trained = GLOBAL[name](batch)[batch.trained_T & batch.valid_N[batch.trajectory_T]]
        if len(trained) > 2 and bool(trained.any()):
            seen += 1
            assert all_close([trained.mean().item(), trained.std().item()], [0, 1], 1e-6)
    assert seen > 5


def test_published_returns() -> None:
    rewards = torch.tensor([1.0, 2, 3, 4, 5])
    for discount, expected in (
        (0.5, [3.5625, 5.125, 6.25, 6.5, 5]),
        (0.0, [1, 2, 3, 4, 5]),
        (1.0, [15, 14, 12, 9, 5]),
    ):
        assert discounted_returns(rewards, torch.full((5,), discount), [5]).tolist() == expected


def test_published_reinforce_pp() -> None:
    """The first and the last token of the first trajectory were not written by the policy."""
    batch = batch_of(
        [[0, 0, 0, 2, 0], [0, 0, -1]],
        sampled=[[0, 1, 1, 1, 0], [1, 1, 1]],
        penalties=[[0.02, 0.01, 0.03, 0.04, 0.05], [0.04, 0.02, 0.01]],
    )
    expected = [0, 1.881296, 1.910400, 1.960000, 0, -1.049701, -1.019900, -1.010000]
    assert all_close(reinforce_pp(batch, gamma=0.99, whiten=False).tolist(), expected, 1e-6)
    assert all_close(reinforce(batch, gamma=0.99).tolist(), expected, 1e-6)


def test_published_reinforce_pp_baseline() -> None:
    batch = batch_of([[0, 0.5], [-0.5]], penalties=[[0.02, 0.01], [0.04]])
    assert all_close(reinforce_pp_baseline(batch, whiten=False).tolist(), [0.48, 0.49, -0.54], 1e-9)


def test_the_reward_reaches_the_turns_before_an_observation() -> None:
    batch = batch_of([[0, 0, 0, 0, 0, 1.0]], sampled=[[1, 1, 0, 0, 1, 1]])
    for estimate in (reinforce, LOCAL["reinforce_pp"]):
        assert estimate(batch).tolist() == [1, 1, 0, 0, 1, 1]
    assert reinforce(batch, gamma=0.5).tolist() == [0.125, 0.25, 0, 0, 0.5, 1]
    assert reinforce(batch, gamma=0.5, observations="over").tolist() == [0.03125, 0.0625, 0, 0, 0.5, 1]


def test_equal_returns_have_no_contrast() -> None:
    batch = batch_of([[0, 0.9], [0, 0, 0.9], [0.9]])
    assert reinforce_pp(batch).tolist() == reinforce_pp_baseline(batch).tolist() == [0.0] * 6


def test_a_long_trajectory_keeps_its_precision() -> None:
    rewards = torch.randn(5000, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    returns = discounted_returns(rewards, torch.full((5000,), 0.999, dtype=DOUBLE), [5000]).tolist()
    later, expected = 0.0, []
    for reward in reversed(rewards.tolist()):
        later = reward + 0.999 * later
        expected.append(later)
    assert all_close(returns, expected[::-1], 1e-11)


@pytest.mark.parametrize("rubbish", [NAN, math.inf, -math.inf, 1e308])
@pytest.mark.parametrize("name", [*LOCAL, *(f"whitened {name}" for name in GLOBAL)])
def test_rubbish_where_nothing_was_sampled_or_scored_reaches_nothing(name: str, rubbish: float) -> None:
    estimate = GLOBAL[name.split()[1]] if " " in name else LOCAL[name]
    clean = batch_of(
        [[0, 0, 1.0], [0, 0, 0.0], [0.5, 0]],
        sampled=[[1, 0, 1], [1, 1, 1], [1, 1]],
        valid=[True, True, False],
        penalties=[[0.1, 0, 0.2], [0.3, 0.1, 0.1], [0, 0]],
        rewarded=[[0, 0, 1], [0, 0, 1], [0, 1]],
        baselines=[0.5, 0.25, 0.0],
    )
    places = torch.tensor([False, True, False, False, False, False, True, True])
    invalid = torch.tensor([False, False, True])
    assert clean.penalties_T is not None and clean.baselines_N is not None
    dirty = dataclasses.replace(
        clean,
        penalties_T=clean.penalties_T.masked_fill(places, rubbish),
        rewards_T=clean.rewards_T.masked_fill(torch.tensor([False] * 6 + [True] * 2), rubbish),
        outcomes_N=clean.outcomes_N.masked_fill(invalid, rubbish),
        baselines_N=clean.baselines_N.masked_fill(invalid, rubbish),
    )
    assert estimate(dirty).tolist() == estimate(clean).tolist()
    assert estimate(dirty).tolist()[6:] == [0.0, 0.0]


def test_a_token_without_a_number_spoils_its_own_trajectory_alone() -> None:
    batch = batch_of([[1.0, 1.0], [0, 1.0], [1.0]], penalties=[[0, 0], [NAN, 0], [0]])
    first, second, third = by_trajectory(batch, reinforce(batch))
    assert (first, third) == ([2.0, 1.0], [1.0]) and math.isnan(second[0]) and second[1] == 1.0


def test_remax_compares_with_the_greedy_answer_of_its_prompt() -> None:
    batch = batch_of([[0, 1.0], [0, 0], [1.0]], baselines=[0.25, 1.0, NAN])
    assert remax(batch).tolist() == [0.75, 0.75, -1.0, -1.0, 0.0]
    with pytest.raises(ValueError, match="remax needs baselines_N"):
        remax(dataclasses.replace(batch, baselines_N=None))
    with pytest.raises(RewardError, match="sample 0 of the batch has reward inf"):
        remax(dataclasses.replace(batch, baselines_N=torch.tensor([math.inf, 0, 0], dtype=DOUBLE)))


def test_a_turn_is_compared_with_all_turns_of_the_group_and_a_reward_of_0_is_one() -> None:
    batch = batch_of(
        [[0, 1.0, 0, 0, 0.0], [0, 0, 1.0]],
        sampled=[[1, 1, 0, 1, 1], [1, 1, 1]],
        rewarded=[[0, 1, 0, 0, 1], [0, 0, 1]],
    )
    high, low = 1 / 3, -2 / 3
    centred = grpo_turns(batch, normalize_std=False).tolist()
    assert all_close(centred, [high + low, high + low, 0, low, low, high, high, high], 1e-12)
    deviation = math.sqrt(2 / 9)
    scaled = grpo_turns(batch, std="population", std_epsilon=1e-12).tolist()
    assert all_close(scaled, [value / deviation for value in centred], 1e-9)


def test_turns_with_one_reward_at_the_end_are_outcomes() -> None:
    batch = batch_of([[0, 1.0], [0.0], [0, 0, 1.0]], rewarded=[[0, 1], [1], [0, 0, 1]])
    expected = [0.577349, 0.577349, -1.154699, 0.577349, 0.577349, 0.577349]
    assert all_close(grpo_turns(batch).tolist(), expected, 2e-6)


def test_turns_of_one_trajectory_alone_or_all_equal_give_nothing() -> None:
    alone = batch_of([[1.0, 0.0], [1.0]], groups=["a", "b"], rewarded=[[1, 1], [1]])
    assert grpo_turns(alone).tolist() == [0.0] * 3
    equal = batch_of([[0.9, 0.9], [0.9]], rewarded=[[1, 1], [1]])
    assert grpo_turns(equal).tolist() == [0.0] * 3
    with pytest.raises(ValueError, match="grpo_turns needs rewarded_T"):
        grpo_turns(dataclasses.replace(equal, rewarded_T=None))


@pytest.mark.parametrize("name", LOCAL)
def test_an_unusable_reward_of_a_valid_sample_is_refused(name: str) -> None:
    batch = batch_of([[0.0], [NAN]], rewarded=[[1], [1]], baselines=[0, 0])
    with pytest.raises(RewardError, match="sample 1 of the batch has reward nan"):
        LOCAL[name](batch)


def test_settings_that_make_no_sense_are_refused() -> None:
    batch = batch_of([[1.0], [0.0]], rewarded=[[1], [1]])
    for gamma in (-0.1, 1.1, NAN):
        with pytest.raises(ConfigError, match=r"gamma=.* must be in \[0, 1\]"):
            reinforce(batch, gamma=gamma)
    with pytest.raises(ConfigError, match="observations='skip' is unknown; use one of across, over"):
        reinforce_pp(batch, observations="skip")  # type: ignore[arg-type]
    for estimate in (reinforce_pp, reinforce_pp_baseline, grpo_turns):
        with pytest.raises(ConfigError, match="std='biased' is unknown"):
            estimate(batch, std="biased")  # type: ignore[arg-type]


def test_net_rewards_are_nothing_where_no_valid_reward_is() -> None:
    batch = batch_of([[1.0, 2.0], [NAN]], sampled=[[1, 0], [1]], valid=[True, False], penalties=[[0.5, NAN], [NAN]])
    assert batch.net_rewards_T.tolist() == [0.5, 2.0, 0.0]
