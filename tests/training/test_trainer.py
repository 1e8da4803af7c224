from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.training.make_trainer import columns_of, make_algorithm, make_trainer
from tests.training.oracle import OracleSample, OracleSettings, oracle_loss_and_gradient
from unison.config.schema import EngineConfig, TrainerConfig
from unison.core.errors import NonFiniteError
from unison.core.records import Sample, SampleStatus
from unison.core.sampling import SamplingParams
from unison.engine.engine import Engine
from unison.models.loading import load_model
from unison.models.names import published_tensors
from unison.ops.padding import EXACT
from unison.training.trainer import Trainer

TinyModelDir = Callable[..., Path]
TEMPERATURE = 0.8


def perturbed(folder: Path, target: Path, scale: float) -> Path:
    """A copy of the model with every weight moved a little."""
    target.mkdir()
    for path in folder.iterdir():
        if path.suffix != ".safetensors":
            (target / path.name).write_bytes(path.read_bytes())
    generator = torch.Generator().manual_seed(3)
    tensors = {
        name: tensor + scale * torch.randn(tensor.shape, generator=generator)
        for name, tensor in sorted(load_file(folder / "model.safetensors").items())
    }
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def oracle_batch() -> list[OracleSample]:
    """Ragged groups: stale log-probs on both sides of the clip, a truncated and an unscorable sample, no contrast."""
    generator = torch.Generator().manual_seed(11)

    def ids(count: int) -> list[int]:
        return torch.randint(0, 512, (count,), generator=generator).tolist()

    batch = []
    for group, rewards in enumerate([[1.0, 0.0, None, 0.25], [0.0, 1.0], [1.0, 1.0]]):
        prompt = ids(3 + 11 * group)
        for reward in rewards:
            response = ids(1 + int(torch.randint(1, 9, (1,), generator=generator)))
            old = (-6 - 3 * torch.rand(len(response), generator=generator)).tolist()
            batch.append(OracleSample(prompt, response, old, f"g{group}", reward))
    batch[3].truncated = True
    return batch


def as_samples(batch: list[OracleSample]) -> list[Sample]:
    samples = []
    for i, item in enumerate(batch):
        sample = Sample(
            sample_id=f"s{i}",
            group_id=item.group,
            trajectory_id=f"s{i}",
            sampling=SamplingParams(temperature=TEMPERATURE),
            seed=0,
            prompt_length=len(item.prompt),
        )
        sample.append_world(item.prompt, role="prompt")
        sample.append_sampled(item.response, item.old_logprobs, [0] * len(item.response))
        sample.reward = item.reward
        sample.status = SampleStatus.TRUNCATED if item.truncated else SampleStatus.COMPLETED
        if item.reward is None:
            sample.status = SampleStatus.UNSCORABLE
        samples.append(sample)
    return samples


def gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    own = {name: trainer.masters.gradient(p) for name, p in trainer.masters.parameters.items()}
    return published_tensors(trainer.model, own)


def relative_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert set(a) == set(b)
    difference = math.sqrt(sum(float((a[name].double() - b[name].double()).square().sum()) for name in a))
    return difference / math.sqrt(sum(float(b[name].double().square().sum()) for name in b))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_loss_and_gradient_equal_a_float64_oracle(tiny_model_dir: TinyModelDir, tmp_path: Path, family: str) -> None:
    folder = tiny_model_dir(family)
    reference = perturbed(folder, tmp_path / "reference", 0.02)
    batch = oracle_batch()
    settings = OracleSettings(0.2, 0.28, 0.1, TEMPERATURE, True, 1e-6)
    expected_loss, expected = oracle_loss_and_gradient(folder, reference, batch, settings)

    trainer = make_trainer(
        folder, reference=reference, algorithm={"kl_coef": 0.1}, learning_rate=0.0, max_grad_norm=0.0
    )
    totals = trainer.step(columns_of(as_samples(batch)))

    assert totals.loss == pytest.approx(expected_loss, rel=1e-5)
    assert 0 < totals.num_clipped < totals.num_trained_tokens
    assert relative_difference(gradients(trainer), expected) < 1e-5
    norm = math.sqrt(sum(float(g.square().sum()) for g in expected.values()))
    assert totals.grad_norm == pytest.approx(norm, rel=1e-5)


def test_gradient_does_not_depend_on_how_the_batch_is_cut(tiny_model_dir: TinyModelDir) -> None:
    samples = as_samples(oracle_batch())
    found = []
    for budget, order in ((8, 1), (40, 1), (4096, 1), (4096, -1)):
        trainer = make_trainer(tiny_model_dir(), learning_rate=0.0, max_grad_norm=0.0, micro_batch_tokens=budget)
        totals = trainer.step(columns_of(samples[::order]))
        found.append((totals.loss, gradients(trainer), totals.num_micro_batches))
    assert len({count for _, _, count in found}) > 2
    for loss, gradient, _ in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-5)
        assert relative_difference(gradient, found[0][1]) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_the_trainer_finds_the_very_log_probs_of_the_rollout(
    tiny_model_dir: TinyModelDir, dtype: torch.dtype, temperature: float
) -> None:
    folder = tiny_model_dir("qwen3")
    engine = Engine(load_model(folder, dtype), path=EXACT, config=EngineConfig(prefill_chunk=5, page_size=64))
    prompts = [[7 * i % 512 for i in range(1, length)] for length in (2, 9, 40, 130)]
    outputs = engine.generate(prompts, SamplingParams(temperature=temperature, n=3, max_new_tokens=20, seed=4))
    samples = []
    for prompt, copies in enumerate(outputs):
        for k, output in enumerate(copies):
            sample = Sample(
                sample_id=f"{prompt}/{k}",
                group_id=str(prompt),
                trajectory_id="",
                sampling=output.sampling,
                seed=output.seed,
                prompt_length=len(output.prompt_ids),
                status=SampleStatus.COMPLETED,
                reward=float(k == 0),
            )
            sample.append_world(output.prompt_ids, role="prompt")
            sample.append_sampled(output.token_ids, output.logprobs, [0] * len(output.token_ids))
            samples.append(sample)
    trainer = make_trainer(
        folder, dtype=dtype, algorithm={"kl_coef": 0.1}, micro_batch_tokens=256, logprob_chunk_tokens=24
    )
    totals = trainer.step(columns_of(samples))
    assert totals.num_trained_tokens == 4 * 3 * 20
    assert totals.num_micro_batches > 2
    assert totals.logp_diff_max == 0
    assert totals.ratio_max == 1
    assert totals.ratio_sum == totals.num_trained_tokens
    assert totals.kl_sum == 0 and totals.first_reference_diff == 0


def test_one_update_is_adamw_with_clipped_gradient_and_decay_on_matrices_only(tiny_model_dir: TinyModelDir) -> None:
    settings = {"learning_rate": 1e-3, "warmup_steps": 1, "weight_decay": 0.1, "max_grad_norm": 0.5}
    trainer = make_trainer(tiny_model_dir(), **settings)  # type: ignore[arg-type]
    before = {name: p.detach().double().clone() for name, p in trainer.masters.parameters.items()}
    totals = trainer.step(columns_of(as_samples(oracle_batch())))
    assert totals.learning_rate == 0.5e-3
    assert totals.grad_norm > 0.5
    for name, parameter in trainer.masters.parameters.items():
        gradient = trainer.masters.gradient(parameter).double()
        decay = 0.1 if parameter.ndim > 1 else 0.0
        step = gradient / (gradient.abs() + 1e-8)  # both bias-corrected moments of a first step
        expected = before[name] * (1 - 0.5e-3 * decay) - 0.5e-3 * step
        torch.testing.assert_close(parameter.detach().double(), expected, rtol=0, atol=2e-6)
    clipped = math.sqrt(sum(float(g.double().square().sum()) for g in gradients(trainer).values()))
    assert clipped == pytest.approx(0.5, rel=1e-5)


def test_bfloat16_training_keeps_float32_masters(tiny_model_dir: TinyModelDir) -> None:
    trainer = make_trainer(tiny_model_dir(), dtype=torch.bfloat16, learning_rate=1e-6)
    before = {name: p.detach().clone() for name, p in trainer.masters.parameters.items()}
    trainer.step(columns_of(as_samples(oracle_batch())))
    model = dict(trainer.model.named_parameters())
    for name, master in trainer.masters.parameters.items():
        assert master.dtype == torch.float32
        assert model[name].dtype == torch.bfloat16
        assert torch.equal(model[name].detach(), master.detach().bfloat16())
    # Steps of 1e-6 vanish in bfloat16; the masters must have taken them all the same.
    moved = [name for name, master in trainer.masters.parameters.items() if not torch.equal(master, before[name])]
    assert len(moved) == len(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loss_that_is_not_finite_stops_before_the_update_and_writes_the_batch(
    tiny_model_dir: TinyModelDir, tmp_path: Path, dtype: torch.dtype
) -> None:
    trainer = make_trainer(tiny_model_dir(), dtype=dtype, dump_dir=tmp_path / "failures", learning_rate=1e-2)
    samples = as_samples(oracle_batch())
    trainer.step(columns_of(samples))
    with torch.no_grad():
        next(iter(trainer.model.parameters()))[samples[0].token_ids[0]] = math.nan
    before = {name: p.detach().clone() for name, p in trainer.masters.parameters.items()}
    with pytest.raises(NonFiniteError, match=r"no weight was changed.*batch-2\.jsonl"):
        trainer.step(columns_of(samples))
    for name, parameter in trainer.masters.parameters.items():
        assert torch.equal(parameter.nan_to_num(), before[name].nan_to_num())
    assert trainer.num_steps == 1
    written = [json.loads(line) for line in (tmp_path / "failures" / "batch-2.jsonl").read_text().splitlines()]
    assert [row["token_ids"] for row in written] == [sample.token_ids for sample in samples]


def test_a_gradient_that_is_not_finite_stops_before_the_update(tiny_model_dir: TinyModelDir) -> None:
    trainer = make_trainer(tiny_model_dir(), learning_rate=1e-2)
    before = {name: p.detach().clone() for name, p in trainer.masters.parameters.items()}
    parameter = next(iter(trainer.model.parameters()))
    handle = parameter.register_hook(lambda gradient: gradient * math.inf)
    samples = as_samples(oracle_batch())
    with pytest.raises(NonFiniteError, match="gradient norm"):
        trainer.step(columns_of(samples))
    assert all(torch.equal(p, before[name]) for name, p in trainer.masters.parameters.items())
    handle.remove()
    # The broken gradient is not carried over: the next step is that of a fresh trainer.
    trainer.step(columns_of(samples))
    fresh = make_trainer(tiny_model_dir(), learning_rate=1e-2)
    fresh.step(columns_of(samples))
    for name, own in trainer.masters.parameters.items():
        assert torch.equal(own, fresh.masters.parameters[name])


def test_nothing_moves_where_no_token_is_trained(tiny_model_dir: TinyModelDir) -> None:
    batch = oracle_batch()
    for sample in batch:
        sample.truncated = True
    trainer = make_trainer(tiny_model_dir(), learning_rate=1e-2)
    before = {name: p.detach().clone() for name, p in trainer.masters.parameters.items()}
    totals = trainer.step(columns_of(as_samples(batch)))
    assert not totals.updated
    assert all(torch.equal(p, before[name]) for name, p in trainer.masters.parameters.items())


def test_a_kl_weight_needs_a_reference(tiny_model_dir: TinyModelDir) -> None:
    model = load_model(tiny_model_dir(), torch.float32)
    with pytest.raises(ValueError, match="reference"):
        Trainer(model, {}, path=EXACT, config=TrainerConfig(), algorithm=make_algorithm(kl_coef=0.1))


def test_weights_that_are_not_finite_are_never_published(tiny_model_dir: TinyModelDir) -> None:
    trainer = make_trainer(tiny_model_dir(), dtype=torch.bfloat16, learning_rate=1e-2)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    step = trainer._policy._optimizer.step

    def broken_step() -> None:
        step()
        next(iter(trainer.masters.parameters.values())).data[0, 0] = 3.4e38  # finite in float32, infinite in bfloat16

    trainer._policy._optimizer.step = broken_step  # type: ignore[method-assign,assignment]
    with pytest.raises(NonFiniteError, match="not published"):
        trainer.step(columns_of(as_samples(oracle_batch())))
    assert all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())
