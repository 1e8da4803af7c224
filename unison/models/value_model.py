"""A critic: the trunk of a policy under a head that says how much reward is still to come.

Dims: T packed tokens, E hidden.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

from unison.core.errors import ModelError
from unison.models.decoder import Decoder
from unison.models.loading import WeightLoader, check_frequencies, read_config, stream_tensors
from unison.models.names import published_tensors
from unison.models.registry import read_spec
from unison.models.spec import DecoderSpec
from unison.ops import basic as ops
from unison.ops.plan import AttentionPlan

VALUE_HEAD: Final = "score.weight"
"""Published name of the value head: that of transformers' sequence classification with one label, which critics and
reward models are commonly kept as."""
_TRUNK: Final = "trunk."


class ValueModel(nn.Module):
    """A decoder without its vocabulary projection, and a value head [1, E] on its last norm.

    The head begins at zero. So every value is 0 at first, and advantages begin as those without a critic; a random head
    would begin with values of the size of the hidden states, which say nothing of the reward. It also means that the
    first update moves the head alone: the gradient of the trunk is 0 until the head points somewhere.

    An untied vocabulary projection is left out of the trunk: it would be a large parameter without a gradient. A tied
    one is the embedding, which stays.
    """

    def __init__(self, spec: DecoderSpec, dtype: torch.dtype) -> None:
        super().__init__()
        self.trunk = Decoder(replace(spec, tied_embeddings=True), dtype)
        self.value_head = nn.Parameter(torch.zeros(1, spec.hidden_size, dtype=dtype))

    @property
    def dtype(self) -> torch.dtype:
        return self.trunk.dtype

    def forward(self, tokens_T: Tensor, positions_AT: Tensor, plan: AttentionPlan) -> Tensor:
        """Value of the state after each token, float32 [T]; rows of padding hold something.

        Under the exact path a value is a function of the tokens up to its own, whatever else is in the batch.
        """
        return ops.row_dots(self.trunk(tokens_T, positions_AT, plan), self.value_head[0]).float()


def published_values(model: ValueModel, parameters: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Published name -> view into the critic's parameters (or into ``parameters``, e.g. masters).

    Written as safetensors beside a config.json they make a folder that ``load_value_model`` reads.
    """
    own = dict(model.named_parameters()) if parameters is None else parameters
    trunk = {name.removeprefix(_TRUNK): tensor for name, tensor in own.items() if name.startswith(_TRUNK)}
    return {**published_tensors(model.trunk, trunk), VALUE_HEAD: own["value_head"].detach()}


def load_value_model(folder: Path, dtype: torch.dtype) -> ValueModel:
    """A critic from the folder of a policy, its head zero, or of a saved critic, with its head.

    Raises ModelError for what does not fit; a vocabulary projection that is not the embedding is passed over.
    """
    spec = read_spec(read_config(folder))
    model = ValueModel(spec, dtype)
    loader = WeightLoader(model.trunk.spec, {name: p.detach() for name, p in model.trunk.named_parameters()})
    for name, tensor in stream_tensors(folder):
        if name == VALUE_HEAD:
            _load_head(model.value_head, tensor)
        elif name.endswith(".rotary_emb.inv_freq"):
            check_frequencies(name, tensor, spec)
        elif spec.tied_embeddings or name != "lm_head.weight":
            loader.write(name, tensor)
    loader.finish()
    return model.requires_grad_(False)


@torch.no_grad()
def _load_head(head: Tensor, tensor: Tensor) -> None:
    if tensor.shape != head.shape or not tensor.dtype.is_floating_point:
        raise ModelError(
            f"tensor {VALUE_HEAD!r} is {tensor.dtype} {list(tensor.shape)}; the head of a critic has one output: "
            f"a float {list(head.shape)}"
        )
    head.copy_(tensor)
