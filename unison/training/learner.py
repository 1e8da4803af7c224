"""A model under training with its optimizer: the policy, or a critic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from unison.config.section import Schedule
from unison.core.errors import CheckpointError
from unison.training.masters import MasterWeights
from unison.training.schedule import learning_rate

MOMENTS: Final = ("step", "exp_avg", "exp_avg_sq")
"""What AdamW keeps for each parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """Of AdamW and its schedule. ``total_steps`` and ``warmup_steps`` count optimizer steps."""

    learning_rate: float
    schedule: Schedule
    warmup_steps: int
    total_steps: int
    min_learning_rate: float
    beta1: float
    beta2: float
    adam_epsilon: float
    weight_decay: float
    max_grad_norm: float


class Learner:
    """Float32 masters and AdamW over a model. ``name`` begins the names of its tensors in a checkpoint."""

    def __init__(
        self, model: nn.Module, initial: dict[str, Tensor], settings: OptimizerSettings, *, name: str = ""
    ) -> None:
        """``initial`` are float32 values of the model's parameters (see MasterWeights)."""
        self.masters = MasterWeights(model, initial)
        self.num_steps = 0
        self._settings = settings
        self._prefix = f"{name}_" if name else ""
        self._what = f"{name} " if name else ""
        self._optimizer = _adamw(self.masters, settings)

    @property
    def learning_rate(self) -> float:
        """Of the next step."""
        settings = self._settings
        return learning_rate(
            self.num_steps,
            peak=settings.learning_rate,
            schedule=settings.schedule,
            warmup_steps=settings.warmup_steps,
            total_steps=settings.total_steps,
            minimum=settings.min_learning_rate,
        )

    def gradient_norm(self) -> float:
        """Over all parameters, from float32 norms of each; may be NaN or infinite."""
        norms = torch._foreach_norm(self.masters.gradients())
        return float(torch.linalg.vector_norm(torch.stack(list(norms)).double()))

    def update(self, norm: float) -> bool:
        """One step of AdamW with the gradients there are, of which ``norm`` is the norm.

        False where a weight came out NaN or infinite: the model keeps its old weights then, the masters are spoilt.
        """
        limit = self._settings.max_grad_norm
        if 0 < limit < norm:
            torch._foreach_mul_(self.masters.gradients(), limit / norm)
        rate = self.learning_rate
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        if not self.masters.all_finite():
            return False
        self.masters.publish()
        self.num_steps += 1
        return True

    def state_tensors(self) -> dict[str, dict[str, Tensor]]:
        """What training goes on from, live: ``weights`` (float32 masters) and ``optimizer`` (AdamW's moments).

        The optimizer's are named ``exp_avg.PARAMETER`` and so on; there are none before its first step.
        """
        moments = {
            f"{key}.{name}": value
            for name, parameter in self.masters.parameters.items()
            for key, value in self._optimizer.state.get(parameter, {}).items()
        }
        weights = {name: parameter.detach() for name, parameter in self.masters.parameters.items()}
        return {f"{self._prefix}weights": weights, f"{self._prefix}optimizer": moments}

    def load_state(self, tensors: Mapping[str, Mapping[str, Tensor]], num_steps: int) -> None:
        """Go on from ``state_tensors`` and the optimizer steps done. Raises CheckpointError where they do not fit."""
        weights, moments = tensors.get(f"{self._prefix}weights", {}), tensors.get(f"{self._prefix}optimizer", {})
        names = list(self.masters.parameters)
        self._check_names("weights", names, weights)
        self._check_names(
            "optimizer", [f"{key}.{name}" for name in names for key in MOMENTS] * (num_steps > 0), moments
        )
        with torch.no_grad():
            for name, parameter in self.masters.parameters.items():
                copy_saved(parameter, weights[name], name)
        for name, parameter in self.masters.parameters.items():
            self._optimizer.state.pop(parameter, None)
            if num_steps > 0:
                self._optimizer.state[parameter] = {
                    key: _moment(parameter, moments[f"{key}.{name}"], key, name) for key in MOMENTS
                }
        self.masters.publish()
        self.num_steps = num_steps

    def _check_names(self, group: str, names: list[str], held: Mapping[str, Tensor]) -> None:
        wrong = sorted(set(names) ^ set(held))
        if wrong:
            raise CheckpointError(
                f"the saved {self._what}{group} do not fit this model: {wrong[0]!r} is "
                f"{'missing' if wrong[0] in names else 'not one of it'} ({len(wrong)} names differ)"
            )


def steps_done(tensors: Mapping[str, Mapping[str, Tensor]], name: str) -> int:
    """Optimizer steps that a saved learner called ``name`` has done, by its moments."""
    steps = [int(value) for key, value in tensors.get(f"{name}_optimizer", {}).items() if key.startswith("step.")]
    return max(steps, default=0)


def copy_saved(target: Tensor, saved: Tensor, name: str) -> None:
    """Copy a saved tensor in place. Raises CheckpointError where shape or dtype differ."""
    if target.shape != saved.shape or target.dtype != saved.dtype:
        raise CheckpointError(
            f"the saved {name!r} is {saved.dtype} {list(saved.shape)}, this model's {target.dtype} {list(target.shape)}"
        )
    target.copy_(saved)


def _moment(parameter: Tensor, saved: Tensor, key: str, name: str) -> Tensor:
    moment = torch.zeros((), dtype=torch.float32) if key == "step" else torch.zeros_like(parameter)
    copy_saved(moment, saved, f"{key}.{name}")
    return moment


def _adamw(masters: MasterWeights, settings: OptimizerSettings) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter 2019); norms and biases are not decayed."""
    matrices = [p for p in masters.parameters.values() if p.ndim > 1]
    vectors = [p for p in masters.parameters.values() if p.ndim <= 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.adam_epsilon,
        fused=True,
    )
