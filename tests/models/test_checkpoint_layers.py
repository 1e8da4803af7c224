"""Computing layers again in the backward pass saves memory and changes no bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conftest import TinyModelDir
from unison.models.decoder import Decoder, Taps
from unison.models.loading import load_model
from unison.ops.padding import EXACT
from unison.ops.plan import packed_plan
from unison.ops.vocab import token_logprobs
from unison.training.masters import MasterWeights

MICRO_BATCHES = ((1, 9, 40, 70), (3,), (64, 65))
BOTH_DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def trainable(folder: Path, dtype: torch.dtype) -> MasterWeights:
    masters = load_model(folder, torch.float32)
    model = masters if dtype == torch.float32 else load_model(folder, dtype)
    return MasterWeights(model, {name: parameter.detach() for name, parameter in masters.named_parameters()})


def packed(lengths: tuple[int, ...], seed: int) -> tuple[Any, ...]:
    """Tokens, positions, plan and targets of rows of random text."""
    plan = packed_plan(lengths, path=EXACT)
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(256, (2, plan.num_rows), generator=generator)
    positions = torch.zeros(1, plan.num_rows, dtype=torch.int64)
    for start, end in plan.segments:
        positions[0, start:end] = torch.arange(end - start)
    return tokens, positions, plan, targets


def step(
    masters: MasterWeights, model: Decoder, checkpoint_layers: bool, cut: tuple[tuple[int, ...], ...] = MICRO_BATCHES
) -> list[Tensor]:
    """Log-probs and entropies of the micro-batches, and the gradients they add up to."""
    model.checkpoint_layers = checkpoint_layers
    masters.zero_gradients()
    seen = []
    for seed, lengths in enumerate(cut):
        tokens, positions, plan, targets = packed(lengths, seed)
        hidden = model(tokens, positions, plan)
        logprobs, entropy = token_logprobs(hidden, model.head_weight(), targets, torch.ones(len(targets)), path=EXACT)
        (entropy.mean() - logprobs.mean()).backward()  # type: ignore[no-untyped-call]
        seen += [logprobs.detach(), entropy.detach()]
    return seen + [gradient.clone() for gradient in masters.gradients()]


def assert_same_bits(
    folder: Path, dtype: torch.dtype, *cut: tuple[int, ...], all_threads: tuple[int, ...] = (1, 2)
) -> None:
    masters = trainable(folder, dtype)
    model = masters.model
    assert isinstance(model, Decoder)
    for threads in all_threads:
        torch.set_num_threads(threads)
        kept, computed_again = (step(masters, model, on, cut) for on in (False, True))
        assert all(torch.equal(one, other) for one, other in zip(kept, computed_again, strict=True))
        assert all(bool(gradient.any()) for gradient in kept[2 * len(cut) :])


@BOTH_DTYPES
@pytest.mark.parametrize(
    ("family", "options"),
    [("llama", {"attention_bias": True, "mlp_bias": True}), ("qwen2", {}), ("qwen3", {"tie_word_embeddings": True})],
)
def test_outputs_and_summed_gradients_are_the_same_bits(
    tiny_model_dir: TinyModelDir, family: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    assert_same_bits(tiny_model_dir(family, **options), dtype, *MICRO_BATCHES)


@BOTH_DTYPES
def test_of_a_real_model_too(smollm2: Path, dtype: torch.dtype) -> None:
    assert_same_bits(smollm2, dtype, (12, 5), all_threads=(2,))


def calls_of_layers(model: Decoder, call: Callable[[], object]) -> int:
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    handles = [layer.register_forward_pre_hook(count) for layer in model.layers]
    call()
    for handle in handles:
        handle.remove()
    return calls


@BOTH_DTYPES
def test_layers_run_twice_in_training_alone(tiny_model_dir: TinyModelDir, dtype: torch.dtype) -> None:
    model = load_model(tiny_model_dir(), dtype).requires_grad_(True)
    model.checkpoint_layers = True
    tokens, positions, plan, _ = packed((30, 5), 0)

    def train(taps: Taps | None = None) -> Taps | None:
        model(tokens, positions, plan, taps=taps).sum().backward()
        return taps

    assert calls_of_layers(model, train) == 4
    taps = Taps(frozenset({"layer.0", "final"}))
    assert calls_of_layers(model, lambda: train(taps)) == 2 and taps.values.keys() == taps.wanted
    with torch.no_grad():
        assert calls_of_layers(model, lambda: model(tokens, positions, plan)) == 2


def test_nothing_inside_a_layer_is_kept(tiny_model_dir: TinyModelDir) -> None:
    model = load_model(tiny_model_dir(), torch.float32).requires_grad_(True)
    tokens, positions, plan, _ = packed((200, 200), 0)
    kept_bytes = []
    for model.checkpoint_layers in (False, True):
        kept: dict[int, int] = {}

        def pack(tensor: Tensor, kept: dict[int, int] = kept) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            hidden = model(tokens, positions, plan)
        kept_bytes.append(sum(kept.values()))
        hidden.sum().backward()
    row_bytes = plan.num_rows * model.spec.hidden_size * 4
    # The inputs of two layers and of the last norm, the angles of both layers, which are half as wide twice.
    assert kept_bytes[1] < 4.1 * row_bytes and kept_bytes[0] > 20 * row_bytes
