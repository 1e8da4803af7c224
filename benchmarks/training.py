"""Seconds of one training step: ours, exact and fast, beside a bare step on the transformers model.

usage: training.py [--shape 32x81:64] [--model M] [--dtype D] [--threads N] [--rounds N] [--steps N]

A shape BxT:S is B sequences of T tokens of which the last S are trained. The bare step is forward,
token cross-entropy times an advantage, backward and fused AdamW in the compute dtype; ours adds the
ratio and its clip, entropy, global denominators, float32 masters and gradient sums, and the check
for finite values.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import TYPE_CHECKING

from harness import Measured, Meter, compare, emit

if TYPE_CHECKING:
    from unison.training.rows import TrainingRow
    from unison.training.trainer import Trainer

VARIANTS = ("unison-exact", "unison-fast", "bare-transformers")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="32x81:64")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--micro-batch-tokens", type=int, default=2592)
    parser.add_argument("--micro", type=int, default=0, help="sequences of a micro-batch of the bare step; 0: all")
    parser.add_argument("--variant", choices=VARIANTS, help="run one variant here (used by the script itself)")
    options = parser.parse_args()
    if options.variant is None:
        names = ("shape", "model", "dtype", "threads", "steps", "micro_batch_tokens", "micro")
        arguments = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in names]
        compare(__file__, VARIANTS, arguments, options.rounds, "tokens")
        return
    import torch

    torch.set_num_threads(options.threads)
    sizes, scored = options.shape.split(":")
    num_sequences, length = map(int, sizes.split("x"))
    run = bare_step if options.variant == "bare-transformers" else unison_step
    emit(run(options, num_sequences, length, int(scored)))


def make_trainer(model: str, dtype_name: str, numerics: str, micro_batch_tokens: int) -> Trainer:
    import torch

    from unison.algorithms.assemble import assemble
    from unison.config.schema import ModelConfig, TrainConfig, TrainerConfig
    from unison.models.loading import load_model
    from unison.models.sources import resolve_model
    from unison.ops.padding import numerics_path
    from unison.training.trainer import Trainer

    folder, dtype = resolve_model(model), getattr(torch, dtype_name)
    masters = load_model(folder, torch.float32)
    return Trainer(
        load_model(folder, dtype) if dtype != torch.float32 else masters,
        {name: parameter.data for name, parameter in masters.named_parameters()},
        path=numerics_path(numerics),
        config=TrainerConfig(micro_batch_tokens=micro_batch_tokens, learning_rate=1e-5),
        algorithm=assemble(TrainConfig(model=ModelConfig(path=model))),
    )


def make_rows(num_sequences: int, length: int, scored: int, vocab_size: int) -> list[TrainingRow]:
    """Random ids; the last ``scored`` tokens of each row are trained, rewards alternate."""
    import torch

    from unison.training.rows import TrainingRow

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, min(40000, vocab_size), (num_sequences, length), generator=generator).tolist()
    return [
        TrainingRow(
            sample_id=str(i),
            group_id="0",
            trajectory_id=str(i),
            token_ids=row,
            sampled=[False] * (length - scored) + [True] * scored,
            loss_weight=[0.0] * (length - scored) + [1.0] * scored,
            rollout_logprobs=[-10.0] * length,
            temperature=1.0,
            reward=float(i % 2),
        )
        for i, row in enumerate(ids)
    ]


def unison_step(options: argparse.Namespace, num_sequences: int, length: int, scored: int) -> Measured:
    from unison.training.columns import TokenColumns

    numerics = options.variant.removeprefix("unison-")
    trainer = make_trainer(options.model, options.dtype, numerics, options.micro_batch_tokens)
    rows = make_rows(num_sequences, length, scored, trainer.model.spec.vocab_size)
    trainer.step(TokenColumns.of(rows))
    parts: dict[str, list[float]] = {"forward_s": [], "backward_s": [], "optimizer_s": []}
    with Meter() as meter:
        for _ in range(options.steps):
            totals = trainer.step(TokenColumns.of(rows))
            for name, values in parts.items():
                values.append(getattr(totals, name))
    detail = {name: round(statistics.median(values), 3) for name, values in parts.items()}
    return meter.result(options.steps * num_sequences * length, **detail)


def bare_step(options: argparse.Namespace, num_sequences: int, length: int, scored: int) -> Measured:
    import torch
    from transformers import AutoModelForCausalLM

    from unison.models.sources import resolve_model

    model = AutoModelForCausalLM.from_pretrained(resolve_model(options.model), dtype=getattr(torch, options.dtype))
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    most = min(40000, model.config.vocab_size)
    ids = torch.randint(5, most, (num_sequences, length), generator=torch.Generator().manual_seed(0))
    advantages = torch.where(torch.arange(num_sequences) % 2 == 1, 1.0, -1.0)[:, None]
    size = options.micro or num_sequences
    parts: dict[str, list[float]] = {"forward_s": [], "backward_s": [], "optimizer_s": []}

    def step() -> None:
        spent = dict.fromkeys(parts, 0.0)
        for start in range(0, num_sequences, size):
            batch = ids[start : start + size]
            begun = time.perf_counter()
            logits = model(batch, logits_to_keep=scored + 1, use_cache=False).logits[:, :-1]
            losses = torch.nn.functional.cross_entropy(
                logits.reshape(-1, logits.shape[-1]).float(), batch[:, -scored:].reshape(-1), reduction="none"
            )
            loss = (losses.view(-1, scored) * advantages[start : start + size]).mean() * (size / num_sequences)
            between = time.perf_counter()
            loss.backward()
            spent["forward_s"] += between - begun
            spent["backward_s"] += time.perf_counter() - between
        begun = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        spent["optimizer_s"] = time.perf_counter() - begun
        for name, seconds in spent.items():
            parts[name].append(seconds)

    step()
    for values in parts.values():
        values.clear()
    with Meter() as meter:
        for _ in range(options.steps):
            step()
    detail = {name: round(statistics.median(values), 3) for name, values in parts.items()}
    return meter.result(options.steps * num_sequences * length, **detail)


if __name__ == "__main__":
    main()
