"""Models of odd sizes: the self-test refuses them, or rollout and training agree in every bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from unison.checks.exactness import training_logprobs
from unison.config.schema import EngineConfig
from unison.core.records import GenerationOutput, GenerationRequest
from unison.core.sampling import SamplingParams
from unison.engine.engine import Engine
from unison.models.decoder import Decoder
from unison.models.numerics import choose_numerics
from unison.models.spec import DecoderSpec, RopeSpec
from unison.ops.padding import EXACT
from unison.ops.plan import packed_plan
from unison.ops.vocab import token_logprobs

BASE = DecoderSpec(
    family="llama",
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    max_positions=2048,
    norm_epsilon=1e-5,
    rope=RopeSpec(theta=1e4),
    tied_embeddings=True,
)
ODD_SHAPES = {
    "vocabulary of 1000": replace(BASE, vocab_size=1000),
    "inner size of 100": replace(BASE, intermediate_size=100, mlp_bias=True),
    "head dim of 20": replace(BASE, head_dim=20),
    "one key head": replace(BASE, num_heads=3, num_kv_heads=1, head_dim=16),
    "biases and norms of heads": replace(BASE, hidden_size=36, qkv_bias=True, output_bias=True, qk_norm=True),
    "all odd": replace(BASE, vocab_size=2049, hidden_size=100, intermediate_size=52, head_dim=12, qkv_bias=True),
    "head dim of 10": replace(BASE, num_heads=3, num_kv_heads=3, head_dim=10),
    "hidden size of 7": replace(BASE, hidden_size=7, intermediate_size=33),
    "hidden size of 16": replace(BASE, hidden_size=16, intermediate_size=24),
}
PROMPT_TOKENS = (1, 2, 31, 33, 97, 130, 5, 5, 390, 64)
BOTH_DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def random_model(spec: DecoderSpec, dtype: torch.dtype) -> Decoder:
    model = Decoder(spec, dtype).requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        parameter.normal_(1.0 if "norm" in name else 0.0, 0.2, generator=generator)
    return model


def rollout(model: Decoder, chunk: int, max_running: int, threads: int) -> list[GenerationOutput]:
    torch.set_num_threads(threads)
    engine = Engine(model, path=EXACT, config=EngineConfig(max_running=max_running, prefill_chunk=chunk, page_size=64))
    generator = torch.Generator().manual_seed(1)
    for i, length in enumerate(PROMPT_TOKENS):
        prompt = tuple(torch.randint(model.spec.vocab_size, (length,), generator=generator).tolist())
        sampling = SamplingParams(temperature=0.7, max_new_tokens=3 + 5 * (i % 3), seed=i)
        engine.add_request(GenerationRequest(request_id=str(i), prompt_ids=prompt, sampling=sampling))
    return sorted(engine.run(), key=lambda output: int(output.request_id))


@BOTH_DTYPES
@pytest.mark.parametrize("shape", ODD_SHAPES)
def test_what_passes_the_self_test_is_exact(shape: str, dtype: str) -> None:
    spec = ODD_SHAPES[shape]
    choice = choose_numerics(spec, dtype, "auto")
    if choice.path is not EXACT:
        assert any("the self-test failed" in note for note in choice.notes)
        return
    model = random_model(spec, choice.dtype)
    with torch.no_grad():
        expected = rollout(model, chunk=512, max_running=1, threads=1)
        trained = training_logprobs(model, expected, 0.7, EXACT)
        for chunk, max_running, threads in ((13, 3, 1), (64, 64, 2)):
            for output, reference, logprobs in zip(
                rollout(model, chunk, max_running, threads), expected, trained, strict=True
            ):
                assert output.token_ids == reference.token_ids
                assert output.logprobs == reference.logprobs == logprobs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_sampled_can_be_trained(dtype: torch.dtype) -> None:
    """Rope tables grown while sampling, without autograd, serve the backward pass as well."""
    model = random_model(BASE, dtype)
    (first, *_) = rollout(model, chunk=512, max_running=8, threads=1)
    model.requires_grad_(True)
    plan = packed_plan([40, 8], path=EXACT)
    positions = torch.tensor([[*range(40), *range(8)]])
    hidden = model(torch.full((48,), first.token_ids[0]), positions, plan)
    targets = torch.zeros(48, dtype=torch.int64)
    values, _ = token_logprobs(hidden, model.head_weight(), targets, torch.ones(48), path=EXACT)
    values.sum().backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad is not None and bool(parameter.grad.isfinite().all()) for parameter in model.parameters())
