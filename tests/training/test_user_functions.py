"""Functions of a user's own in a training step: what they return is used, and what they do wrong is told by name."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.training.make_trainer import columns_of, make_trainer
from tests.training.test_optimizer_steps import rollout
from tests.training.test_trainer import gradients, relative_difference
from unison.algorithms.corrections import Corrected
from unison.algorithms.losses.base import LossBatch, PolicyLoss
from unison.algorithms.trajectories import Estimate, Trajectories
from unison.core.errors import AlgorithmError, ConfigError, NumericsError

TinyModelDir = Callable[..., Path]
MODULE = "own_functions"


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType(MODULE)
    monkeypatch.setitem(sys.modules, MODULE, module)
    return module


def loss_of(change: Callable[[LossBatch], Any]) -> Callable[[LossBatch], Any]:
    def loss(batch: LossBatch) -> Any:
        return change(batch)

    return loss


def plain(batch: LossBatch) -> PolicyLoss:
    loss = -batch.advantages_N * batch.logprobs_N
    return PolicyLoss(loss, torch.ones_like(loss).detach(), torch.zeros(len(loss), dtype=torch.bool))


def raising(batch: LossBatch) -> PolicyLoss:
    raise ValueError("boom")


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (raising, r"the loss own_functions:loss failed: ValueError: boom"),
        (lambda batch: None, r"returned a NoneType; PolicyLoss"),
        (lambda batch: PolicyLoss(plain(batch).loss, None, None), r"returned ratio as a NoneType"),  # type: ignore[arg-type]
        (lambda batch: plain(batch)._replace(loss=plain(batch).loss.sum()), r"returned loss as \(\)"),
        (lambda batch: plain(batch)._replace(loss=plain(batch).loss.detach()), r"a loss without a gradient"),
        (lambda batch: plain(batch)._replace(loss=plain(batch).clipped.int()), r"a loss of torch.int32"),
        (lambda batch: plain(batch)._replace(clipped=plain(batch).ratio), r"clipped as torch.float32"),
    ],
)
def test_a_loss_that_returns_something_else_is_named(
    tiny_model_dir: TinyModelDir, own: types.ModuleType, loss: Callable[[LossBatch], Any], message: str
) -> None:
    own.loss = loss_of(loss)  # type: ignore[attr-defined]
    trainer = make_trainer(tiny_model_dir(), algorithm={"loss": f"{MODULE}:loss"})
    with pytest.raises(AlgorithmError, match=message):
        trainer.step(columns_of(rollout()))
    assert trainer.num_steps == 0


@pytest.mark.parametrize(
    ("advantage", "message"),
    [
        (lambda batch: 1 / 0, r"the advantage own_functions:advantage failed: ZeroDivisionError"),
        (lambda batch: batch.outcomes_N, r"returned advantages of shape \(12,\)"),
        (lambda batch: batch.spread(batch.outcomes_N * torch.nan), r"returned advantages nan for sample a/0"),
        (lambda batch: [1.0], r"returned advantages of shape list"),
    ],
)
def test_an_advantage_that_returns_something_else_is_named(
    tiny_model_dir: TinyModelDir, own: types.ModuleType, advantage: Callable[[Trajectories], Any], message: str
) -> None:
    def called(batch: Trajectories) -> Any:
        return advantage(batch)

    own.advantage = called  # type: ignore[attr-defined]
    trainer = make_trainer(tiny_model_dir(), algorithm={"advantage": f"{MODULE}:advantage"})
    with pytest.raises(AlgorithmError, match=message):
        trainer.step(columns_of(rollout()))


def second_parameter(batch: LossBatch, sharpness: float = 1.0) -> None: ...


def without_default(batch: LossBatch, *, sharpness: float) -> None: ...


def no_batch(*, sharpness: float = 1.0) -> None: ...


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (second_parameter, "'sharpness' that is no setting"),
        (without_default, "'sharpness' that is no setting"),
        (no_batch, "takes no batch"),
        (PolicyLoss, "is a class; name a function"),
        (3, "is a int; name a function"),
    ],
)
def test_what_cannot_be_called_is_refused_before_the_run(
    tiny_model_dir: TinyModelDir, own: types.ModuleType, found: Any, message: str
) -> None:
    own.loss = found  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=message):
        make_trainer(tiny_model_dir(), algorithm={"loss": f"{MODULE}:loss"})


def test_work_in_place_reaches_nobody_else(tiny_model_dir: TinyModelDir, own: types.ModuleType) -> None:
    def spoiling(batch: Trajectories, *, spoil: bool = False) -> Estimate:
        assert batch.values_T is not None
        returns = batch.spread(batch.outcomes_N)
        advantages = returns - batch.values_T
        if spoil:
            batch.values_T.fill_(5.0)
            batch.sampled_T.fill_(False)
            batch.rewards_T.fill_(torch.nan)
        return Estimate(advantages, returns)

    spoiling.uses = frozenset({"values"})  # type: ignore[attr-defined]

    def loss(batch: LossBatch, *, spoil: bool = False) -> PolicyLoss:
        found = plain(batch)
        if spoil:
            with torch.no_grad():
                batch.logprobs_N.sub_(1.0)
                batch.old_logprobs_N.sub_(1.0)
        return found._replace(loss=found.loss.clone())

    own.spoiling, own.loss = spoiling, loss  # type: ignore[attr-defined]
    states = []
    for spoil in (False, True):
        trainer = make_trainer(
            tiny_model_dir(),
            learning_rate=1e-2,
            algorithm={
                "advantage": f"{MODULE}:spoiling",
                "loss": f"{MODULE}:loss",
                "options": {"spoil": spoil},
                "kl_coef": 0.1,
            },
        )
        totals = trainer.step(columns_of(rollout()))
        states.append((totals.kl_sum, totals.others["critic/value_mean"], totals.logp_diff_max))
    assert states[0] == states[1]


def test_a_kl_of_ones_own_takes_the_place_of_a_built_in_one(
    tiny_model_dir: TinyModelDir, own: types.ModuleType
) -> None:
    def half_square(logprobs: Tensor, reference: Tensor) -> Tensor:
        return (logprobs - reference).square() / 2

    own.half_square = half_square  # type: ignore[attr-defined]
    found = []
    for kl in ("k2", f"{MODULE}:half_square"):
        trainer = make_trainer(
            tiny_model_dir(), learning_rate=1e-2, algorithm={"kl_coef": 0.5, "kl": kl}, mini_batches=2, samples=(4, 3)
        )
        trainer.step(columns_of(rollout()))
        found.append(gradients(trainer))
    assert relative_difference(found[0], found[1]) < 1e-5
    own.half_square = lambda logprobs, reference: logprobs.sum()  # type: ignore[attr-defined]
    with pytest.raises(AlgorithmError, match="one value per token is needed"):
        make_trainer(tiny_model_dir(), algorithm={"kl_coef": 0.5, "kl": f"{MODULE}:half_square"}).step(
            columns_of(rollout())
        )
    with pytest.raises(ConfigError, match=r"algorithm\.kl='k4' is unknown; did you mean k1, k2 or k3\?"):
        make_trainer(tiny_model_dir(), algorithm={"kl_coef": 0.5, "kl": "k4"})


def test_a_correction_of_ones_own_takes_the_place_of_a_built_in_one(
    tiny_model_dir: TinyModelDir, own: types.ModuleType
) -> None:
    def capped(
        *,
        trainer_logprobs_T: Tensor,
        rollout_logprobs_T: Tensor,
        trained_T: Tensor,
        trajectory_T: Tensor,
        num_trajectories: int,
    ) -> Corrected:
        ratio_T = (trainer_logprobs_T.double() - rollout_logprobs_T.double()).exp()
        return Corrected(ratio_T.clamp(max=2.0), trained_T)

    own.capped = capped  # type: ignore[attr-defined]
    found = []
    for name in ("tis", f"{MODULE}:capped"):
        trainer = make_trainer(tiny_model_dir(), learning_rate=0.0, max_grad_norm=0.0, correction={"name": name})
        totals = trainer.step(columns_of(rollout()))
        found.append(gradients(trainer))
        assert "mismatch/k3" in totals.others
    assert relative_difference(found[0], found[1]) < 1e-6
    with pytest.raises(ConfigError, match=r"correction\.upper=3\.0 has no effect with correction\.name='own_functions"):
        make_trainer(tiny_model_dir(), correction={"name": f"{MODULE}:capped", "upper": 3.0})
    own.capped = lambda **columns: None  # type: ignore[attr-defined]
    with pytest.raises(AlgorithmError, match="returned NoneType"):
        make_trainer(tiny_model_dir(), correction={"name": f"{MODULE}:capped"}).step(columns_of(rollout()))


def test_an_error_of_the_package_itself_comes_through_as_it_is(
    tiny_model_dir: TinyModelDir, own: types.ModuleType
) -> None:
    def loss(batch: LossBatch) -> PolicyLoss:
        raise NumericsError("as it is")

    own.loss = loss  # type: ignore[attr-defined]
    with pytest.raises(NumericsError, match=r"^as it is$"):
        make_trainer(tiny_model_dir(), algorithm={"loss": f"{MODULE}:loss"}).step(columns_of(rollout()))
