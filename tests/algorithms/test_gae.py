"""Generalised advantage estimation against published numbers and a recursion written out step by step in float64."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.algorithms.ragged import all_close
from unison.algorithms.advantages import gae as module
from unison.algorithms.advantages.gae import gae, gae_advantages
from unison.algorithms.registry import find_advantage, uses_of
from unison.algorithms.trajectories import Trajectories
from unison.core.errors import ConfigError, RewardError

NAN, INF = math.nan, math.inf


def by_hand(
    rewards: Sequence[float],
    values: Sequence[float],
    mask: Sequence[bool],
    gamma: float,
    lam: float,
    final: float = 0.0,
    over: bool = False,
) -> tuple[list[float], list[float]]:
    """The definition, one step after the other from the end."""
    written = [place for place, flag in enumerate(mask) if flag]
    steps = list(range(written[0], written[-1] + 1)) if over and written else written
    advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
    next_value, next_advantage = final, 0.0
    for place in reversed(steps):
        advantage = rewards[place] + gamma * next_value - values[place] + gamma * lam * next_advantage
        next_value, next_advantage = values[place], advantage
        if mask[place]:
            advantages[place], returns[place] = advantage, advantage + values[place]
    return advantages, returns


def one(
    rewards: Sequence[float],
    values: Sequence[float],
    mask: Sequence[int] | None = None,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    dtype: torch.dtype = torch.float64,
    **more: Any,
) -> tuple[list[float], list[float]]:
    """gae of a single row."""
    flags = torch.tensor([mask if mask is not None else [1] * len(values)], dtype=torch.bool)
    result = gae(
        torch.tensor([rewards], dtype=dtype), torch.tensor([values], dtype=dtype), flags, gamma=gamma, lam=lam, **more
    )
    assert all(column.dtype == dtype and column.shape == flags.shape for column in result)
    return result[0][0].tolist(), result[1][0].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("gamma", "lam", "advantages", "returns"),
    [
        (1, 1, [0.9, 0.8, 0.7, 0.6], [1, 1, 1, 1]),
        (0.99, 0.95, [0.773290, 0.718012, 0.660300, 0.6], [0.873290, 0.918012, 0.960300, 1]),
        (1, 0, [0.1, 0.1, 0.1, 0.6], [0.2, 0.3, 0.4, 1]),
        (0.9, 0.5, [0.178325, 0.218500, 0.33, 0.6], [0.278325, 0.418500, 0.63, 1]),
    ],
)
def test_a_reward_at_the_end(
    gamma: float, lam: float, advantages: list[float], returns: list[float], dtype: torch.dtype
) -> None:
    result = one([0, 0, 0, 1], [0.1, 0.2, 0.3, 0.4], gamma=gamma, lam=lam, dtype=dtype)
    assert all_close(result[0], advantages) and all_close(result[1], returns)


def test_rewards_along_the_way() -> None:
    advantages, returns = one([0.5, -0.25, 0, 1, 0], [0.3, -0.1, 0.2, 0, 0.4], gamma=0.95, lam=0.9)
    assert all_close(advantages, [0.641773, 0.627804, 0.687490, 1.038, -0.4])
    assert all_close(returns, [0.941773, 0.527804, 0.887490, 1.038, 0])


def test_padding_has_no_part() -> None:
    for padding in (7.0, NAN, INF, -INF):
        for reward in (0.0, padding):
            advantages, returns = one([0, 0, 2, reward], [0.5, 0.4, 0.3, padding], [1, 1, 1, 0], lam=0.9)
            assert all_close(advantages, [1.187, 1.43, 1.7, 0])
            assert all_close(returns, [1.687, 1.83, 2.0, 0])


def test_across_steps_over_what_the_policy_did_not_write() -> None:
    for first, second in ((9.0, -4.0), (NAN, INF)):
        values = [0.1, 0.3, first, second, 0.5, 0.6]
        advantages, returns = one([0, 0, 0, 0, 0, 1], values, [1, 1, 0, 0, 1, 1], gamma=0.9, lam=0.8)
        assert all_close(advantages, [0.448035, 0.38616, 0, 0, 0.328, 0.4])
        assert all_close(returns, [0.548035, 0.68616, 0, 0, 0.828, 1.0])


def test_two_turns_by_hand() -> None:
    values = [0.1, 0.2, 0.9, 0.9, 0.3, 0.4]
    advantages, _ = one([0, 0, 0, 0, 0, 1], values, [1, 1, 0, 0, 1, 1], lam=0.5)
    assert all_close(advantages, [0.25, 0.3, 0, 0, 0.4, 0.6])
    _, returns = one([0, 0, 0, 0, 0, 1], values, [1, 1, 0, 0, 1, 1], lam=0.5)
    assert all_close(returns, [0.35, 0.5, 0, 0, 0.7, 1.0])


def test_across_and_over_differ_at_an_observation() -> None:
    row: tuple[list[float], list[float], list[int]] = ([0, 0, 0, 1], [0, 0, 0.5, 0], [1, 1, 0, 1])
    assert all_close(one(*row, lam=0.95)[0], [0.9025, 0.95, 0, 1])
    assert all_close(one(*row, lam=0.95, observations="over")[0], [0.881125, 0.9275, 0, 1])


def test_over_ignores_what_is_before_and_after_the_response() -> None:
    expected = one([0, 0, 0, 1], [0, 0, 0.5, 0], [1, 1, 0, 1], lam=0.95, observations="over")[0]
    values = [NAN, 0, 0, 0.5, 0, NAN, INF]
    padded = one([NAN, 0, 0, 0, 1, INF, 0], values, [0, 1, 1, 0, 1, 0, 0], lam=0.95, observations="over")[0]
    assert padded == [0, *expected, 0, 0]


def test_a_row_cut_off_goes_on_into_its_final_value() -> None:
    final = torch.tensor([0.8], dtype=torch.float64)
    advantages, returns = one([0, 0, 0], [0.1, 0.2, NAN], [1, 1, 0], gamma=0.5, lam=0.5, final_values_B=final)
    assert all_close(advantages, [0.5 * 0.2 - 0.1 + 0.25 * 0.2, 0.2, 0])
    assert all_close(returns, [0.15, 0.4, 0])
    assert one([1], [NAN], [0], final_values_B=torch.tensor([NAN])) == ([0], [0])


@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(0, 6),
    gamma=st.sampled_from([0.0, 0.9, 0.99, 1.0]) | st.floats(0, 1),
    lam=st.sampled_from([0.0, 0.95, 1.0]) | st.floats(0, 1),
    over=st.booleans(),
    with_final=st.booleans(),
    block=st.sampled_from([1, 100, 1 << 20]),
)
@settings(max_examples=100, deadline=None)
def test_ragged_rows_equal_the_definition(
    seed: int, rows: int, gamma: float, lam: float, over: bool, with_final: bool, block: int
) -> None:
    rng = random.Random(seed)
    longest = rng.choice([0, 1, 2, 5, 33, 70, 200])
    masks, rewards, values = [], [], []
    for _ in range(rows):
        length = rng.choice([0, 1, 2, longest, longest])
        density = rng.choice([0.0, 0.5, 0.9, 1.0])
        mask = [place < length and rng.random() < density for place in range(longest)]
        inside = [place for place, flag in enumerate(mask) if flag]
        steps = range(inside[0], inside[-1] + 1) if over and inside else inside
        masks.append(mask)
        for column in (rewards, values):
            anything = [rng.choice([NAN, INF, -INF, 9.0]) for _ in mask]
            column.append([rng.gauss(0, 1) if place in steps else anything[place] for place in range(longest)])
    finals = [rng.gauss(0, 1) for _ in range(rows)] if with_final else None

    def tensor(columns: list[list[float]], dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.tensor(columns, dtype=dtype).view(rows, longest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK_TOKENS", block)
        advantages_BT, returns_BT = gae(
            tensor(rewards),
            tensor(values),
            tensor(masks, torch.bool),  # type: ignore[arg-type]
            gamma=gamma,
            lam=lam,
            final_values_B=None if finals is None else torch.tensor(finals, dtype=torch.float64),
            observations="over" if over else "across",
        )
    for row in range(rows):
        final = finals[row] if finals else 0.0
        advantages, returns = by_hand(rewards[row], values[row], masks[row], gamma, lam, final, over)
        assert all_close(advantages_BT[row].tolist(), advantages, 1e-9)
        assert all_close(returns_BT[row].tolist(), returns, 1e-9)


@pytest.mark.parametrize("lam", [0.0, 0.5, 0.9, 0.99, 0.999, 0.9999, 1.0])
def test_long_float32_rows_are_accurate(lam: float) -> None:
    """Also where values are large beside the advantages, as a good critic's are."""
    places = 131072
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(3, places, generator=generator)
    values = torch.stack([noise[0], 0.5 + 0.1 * noise[1], 100.0 + 0.01 * noise[2]])
    rewards = torch.zeros(3, places)
    rewards[0] = torch.randn(places, generator=generator)
    rewards[1, -1] = 1.0
    mask = torch.rand(3, places, generator=generator) < 0.8
    mask[:, -1] = True
    finals = torch.tensor([0.0, 0.0, 100.0])
    advantages, _ = gae(rewards, values, mask, gamma=1.0, lam=lam, final_values_B=finals)
    assert advantages.dtype == torch.float32
    for row in range(3):
        columns = rewards[row].tolist(), values[row].tolist(), mask[row].tolist()
        expected = torch.tensor(by_hand(*columns, 1.0, lam, finals[row].item())[0], dtype=torch.float64)
        assert float((advantages[row].double() - expected).abs().max()) < 1e-5 * float(expected.abs().max())


def test_a_spoilt_row_spoils_no_other() -> None:
    rewards, values = torch.zeros(3, 100), torch.ones(3, 100)
    expected = gae(rewards, values, torch.ones(3, 100), gamma=0.9, lam=0.9)[0]
    values[1, 50] = NAN
    result = gae(rewards, values, torch.ones(3, 100), gamma=0.9, lam=0.9)[0]
    assert torch.equal(result[[0, 2]], expected[[0, 2]]) and bool(result[1].isnan().any())


def test_values_carry_no_gradient() -> None:
    values = torch.ones(2, 3, requires_grad=True)
    result = gae(torch.ones(2, 3), values, torch.ones(2, 3), gamma=1.0, lam=1.0)
    assert not any(column.requires_grad for column in result)


def test_settings_and_shapes_that_make_no_sense_are_refused() -> None:
    row = torch.zeros(1, 2)
    for wrong in ({"gamma": 1.1}, {"gamma": NAN}, {"lam": -0.1}, {"observations": "around"}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            gae(row, row, row, **({"gamma": 1.0, "lam": 1.0} | wrong))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mask"):
        gae(row, row, torch.zeros(1, 3), gamma=1.0, lam=1.0)


def batch(
    lengths: Sequence[int],
    rewards: Sequence[float],
    values: Sequence[float] | None,
    sampled: Sequence[int] | None = None,
    **more: Any,
) -> Trajectories:
    def numbers(column: Sequence[float]) -> Tensor:
        return torch.tensor(column, dtype=torch.float64)

    sampled_T = torch.tensor(sampled if sampled is not None else [1] * len(rewards), dtype=torch.bool)
    columns: dict[str, Any] = {
        "trained_T": sampled_T,
        "outcomes_N": torch.zeros(len(lengths), dtype=torch.float64),
        "group_ids": ["a"] * len(lengths),
        "valid_N": torch.ones(len(lengths), dtype=torch.bool),
        "truncated_N": torch.zeros(len(lengths), dtype=torch.bool),
        "values_T": None if values is None else numbers(values),
    }
    return Trajectories(lengths=lengths, sampled_T=sampled_T, rewards_T=numbers(rewards), **(columns | more))


def test_the_estimator_takes_the_kl_off_the_rewards() -> None:
    given = batch([3], [0, 0, 1], [0.2, 0.3, 0.4], penalties_T=0.1 * torch.tensor([0.2, -0.1, -1], dtype=torch.float64))
    result = gae_advantages(given, lam=0.95, whiten=False)
    assert all_close(result.advantages.tolist(), [0.81625, 0.775, 0.7])
    assert result.returns is not None and all_close(result.returns.tolist(), [1.01625, 1.075, 1.1])


def test_the_estimator_is_registered_with_what_it_uses() -> None:
    assert find_advantage("gae") is gae_advantages
    assert uses_of(gae_advantages) == {"kl", "values"}


@pytest.mark.parametrize("observations", ["across", "over"])
def test_each_trajectory_is_estimated_as_if_alone(observations: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_TOKENS", 60)
    rng = random.Random(5)
    lengths = [0, 1, 40, 7, 7, 0, 25, 3]
    sampled: list[int] = []
    for length in lengths:
        sampled += [int(place in (0, length - 1) or rng.random() < 0.6) for place in range(length)]
    rewards = [rng.gauss(0, 1) * flag for flag in sampled]
    values = [rng.gauss(0, 1) for _ in sampled]
    result = gae_advantages(
        batch(lengths, rewards, values, sampled),
        gamma=0.9,
        lam=0.8,
        observations=observations,
        whiten=False,  # type: ignore[arg-type]
    )
    start = 0
    for length in lengths:
        own = slice(start, start + length)
        flags = [bool(flag) for flag in sampled[own]]
        advantages, returns = by_hand(rewards[own], values[own], flags, 0.9, 0.8, over=observations == "over")
        assert all_close(result.advantages[own].tolist(), advantages, 1e-9)
        assert result.returns is not None and all_close(result.returns[own].tolist(), returns, 1e-9)
        start += length


def test_only_what_is_truncated_is_bootstrapped_and_only_where_asked() -> None:
    given = batch(
        [2, 2],
        [0.0] * 4,
        [0.0] * 4,
        truncated_N=torch.tensor([True, False]),
        final_values_N=torch.tensor([1.0, NAN], dtype=torch.float64),
    )
    assert gae_advantages(given, gamma=0.5, bootstrap=True, whiten=False).advantages.tolist() == [0.25, 0.5, 0, 0]
    assert gae_advantages(given, gamma=0.5, whiten=False).advantages.tolist() == [0, 0, 0, 0]


def test_whitening_goes_over_the_trained_tokens_and_leaves_returns() -> None:
    trained = torch.tensor([1, 1, 0, 1, 0], dtype=torch.bool)
    given = batch([3, 2], [0, 1, 50, 2, -3], [0.0] * 5, trained_T=trained)
    plain, white = gae_advantages(given, whiten=False), gae_advantages(given)
    chosen = plain.advantages[trained]
    assert all_close(white.advantages[trained].tolist(), ((chosen - chosen.mean()) / chosen.std()).tolist(), 1e-6)
    assert white.advantages[~trained].tolist() == [0, 0]
    assert plain.returns is not None and white.returns is not None and torch.equal(plain.returns, white.returns)


@pytest.mark.parametrize("whiten", [True, False])
def test_a_trajectory_without_a_reward_stays_out(whiten: bool) -> None:
    rewards, values, valid = [1, 2, NAN, NAN], [0.5, 0.25, 0.75, NAN], torch.tensor([True, False])
    result = gae_advantages(batch([2, 2], rewards, values, valid_N=valid), whiten=whiten)
    alone = gae_advantages(batch([2], rewards[:2], values[:2]), whiten=whiten)
    assert result.advantages.tolist() == [*alone.advantages.tolist(), 0, 0]
    assert result.returns is not None and alone.returns is not None
    assert result.returns.tolist() == [*alone.returns.tolist(), 0.75, 0]


def test_an_empty_batch() -> None:
    result = gae_advantages(batch([], [], []))
    assert result.advantages.tolist() == [] and result.returns is not None and result.returns.tolist() == []


def test_a_reward_that_no_step_would_see_is_refused() -> None:
    given = batch([3], [0, 1, 0], [0.0] * 3, [1, 0, 1])
    with pytest.raises(RewardError, match="response token 1 "):
        gae_advantages(given)
    assert gae_advantages(given, observations="over", whiten=False).advantages.tolist() == [1, 0, 0]


def test_what_the_critic_must_give_is_asked_for() -> None:
    with pytest.raises(ConfigError, match="values"):
        gae_advantages(batch([1], [1], None))
    with pytest.raises(ConfigError, match="bootstrap"):
        gae_advantages(batch([1], [1], [0]), bootstrap=True)
