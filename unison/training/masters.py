"""Float32 master weights behind a model that computes in another dtype.

Gradients of every micro-batch are added up in float32; the optimizer moves the masters, and the
model's weights are their cast, by one rounding.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class MasterWeights:
    """Masters and float32 gradient sums of ``model``; under float32 the model's parameters themselves."""

    def __init__(self, model: nn.Module, initial: dict[str, Tensor]) -> None:
        """``model``: a policy or a critic, all of one dtype, every parameter of which is trained.

        ``initial`` holds the float32 value of every parameter; it is taken over, not copied.
        """
        self.model = model.requires_grad_(True)
        self._dtype = next(model.parameters()).dtype
        self._shared = self._dtype == torch.float32
        self.parameters: dict[str, nn.Parameter] = {}
        for name, parameter in model.named_parameters():
            parameter.data.copy_(initial[name])
            self.parameters[name] = parameter if self._shared else nn.Parameter(initial[name].float())
            self.parameters[name].grad = torch.zeros_like(self.parameters[name])
            if not self._shared:
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    self._collector(self.parameters[name])
                )

    def zero_gradients(self) -> None:
        for parameter in self.parameters.values():
            self.gradient(parameter).zero_()
        if not self._shared:
            self.model.zero_grad(set_to_none=True)

    def gradients(self) -> list[Tensor]:
        return [self.gradient(parameter) for parameter in self.parameters.values()]

    def all_finite(self) -> bool:
        """Whether every weight is finite, and stays so in the model's dtype."""
        norms = torch.stack(list(torch._foreach_norm(list(self.parameters.values()), float("inf"))))
        return bool(norms.to(self._dtype).isfinite().all())

    @torch.no_grad()
    def publish(self) -> None:
        """Cast the masters into the model."""
        if self._shared:
            return
        for name, parameter in self.model.named_parameters():
            parameter.copy_(self.parameters[name])

    @staticmethod
    def gradient(parameter: nn.Parameter) -> Tensor:
        if parameter.grad is None:
            raise RuntimeError("a master weight has lost its gradient buffer")
        return parameter.grad

    def _collector(self, master: nn.Parameter) -> Callable[[Tensor], None]:
        def collect(parameter: Tensor) -> None:
            self.gradient(master).add_(parameter.grad)  # type: ignore[arg-type]
            parameter.grad = None

        return collect
