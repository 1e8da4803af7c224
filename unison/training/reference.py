"""The model that the policy is held near to, and how it follows the policy."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from unison.config.algorithm import ReferenceConfig
from unison.core.errors import CheckpointError
from unison.models.decoder import Decoder


class Reference:
    """The reference ``model`` and the rule it follows the policy by.

    - ``fixed``: it stays the model the run began with.
    - ``refreshed``: after every ``every``-th training step it becomes a copy of the policy.
    - ``moving_average``: after each step it is decay * itself + (1 - decay) * policy, in float32 and then cast by one
      rounding. In bfloat16 itself an average would stand still: the change of a step is far below one rounding. In
      float32 it stands still once a weight is within some 6e-8 / (1 - decay) of the policy's, relative to its size.

    The two that move are the hard and the soft update of Gorbatovski et al. 2024, "Learn your reference model for real
    good alignment".

    The tensors of ``state_tensors`` and the model's weights are changed in place, by ``after_step`` and ``load_state``
    alone. A save in the background reads them live, so both are to be called where weights may change: in a training
    step after its ``before_update`` hook, and before the next save begins. Nothing else of a step reads them then.
    """

    def __init__(self, model: Decoder, config: ReferenceConfig, initial: Mapping[str, Tensor]) -> None:
        """``initial``: float32 values of the model's parameters, from which an average sets out; they are copied."""
        self.model = model.requires_grad_(False)
        self._config = config
        self._weights = dict(model.named_parameters())
        self._averages: dict[str, Tensor] = {}
        if config.update == "moving_average":
            _check_names(initial, self._weights)
            shared = model.dtype == torch.float32
            self._averages = {
                name: weight.detach().copy_(initial[name]) if shared else initial[name].detach().float().clone()
                for name, weight in self._weights.items()
            }
            self._publish()

    @torch.no_grad()
    def after_step(self, step: int, policy_masters: Mapping[str, Tensor]) -> None:
        """Follow the policy, whose float32 masters these are, after training step ``step`` (the first is 1)."""
        if self._config.update == "fixed":
            return
        _check_names(policy_masters, self._weights)
        if self._config.update == "moving_average":
            for name, average in self._averages.items():
                average.lerp_(policy_masters[name], 1 - self._config.decay)
            self._publish()
        elif step % self._config.every == 0:
            for name, weight in self._weights.items():
                weight.copy_(policy_masters[name])

    def state_tensors(self) -> dict[str, Tensor]:
        """What a checkpoint must carry, live, by parameter: nothing for ``fixed``, float32 for an average.

        A refreshed copy is held, and so saved, in the model's own dtype: it has no other bits.
        """
        if self._config.update == "fixed":
            return {}
        return self._averages or {name: weight.detach() for name, weight in self._weights.items()}

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from saved ``state_tensors``, of a run in another dtype too.

        Raises CheckpointError where names or shapes do not fit; nothing was changed then.
        """
        own = self.state_tensors()
        _check_state(tensors, own, self._config.update)
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
        self._publish()

    @torch.no_grad()
    def _publish(self) -> None:
        """Cast the averages into the model; in float32 they are the model's own weights."""
        for name, average in self._averages.items():
            if average.dtype != self._weights[name].dtype:
                self._weights[name].copy_(average)


def _check_names(given: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    if given.keys() != own.keys():
        wrong = sorted(given.keys() ^ own.keys())
        raise ValueError(f"policy and reference do not have the same parameters: {wrong[0]!r} is of one alone")


def _check_state(tensors: Mapping[str, Tensor], own: Mapping[str, Tensor], update: str) -> None:
    wrong = sorted(tensors.keys() ^ own.keys())
    if wrong:
        raise CheckpointError(
            f"the saved reference does not fit reference.update={update!r} and this model: {wrong[0]!r} is "
            f"{'missing' if wrong[0] in own else 'not one of it'} ({len(wrong)} names differ); go on with the settings "
            "it was saved under"
        )
    for name, tensor in own.items():
        if tensors[name].shape != tensor.shape or not tensors[name].dtype.is_floating_point:
            raise CheckpointError(
                f"the saved reference's {name!r} is {tensors[name].dtype} {list(tensors[name].shape)}, this model's "
                f"{tensor.dtype} {list(tensor.shape)}"
            )
