"""What stale and noisy rollouts do to training, and what corrections do about it: a loop of one's own over the parts.

usage: python examples/stale_rollouts.py CONFIG.toml [--arms none,recompute,tis,mis] [--lag N] [--noise S]
                                         [--every N] [--seeds N] [--out FOLDER] [--section.key VALUE ...]

Each arm trains on samples that the policy of LAG steps ago drew, with every weight matrix disturbed by S times its own
deviation (a rough stand-in for a rollout in low precision); the noise is a function of seed and step. Arms differ in
``correction.name`` alone. The policy itself is evaluated clean, every N steps. The script writes results.jsonl and
plot.png; with the same threads it gives the same numbers again. Further flags are keys of the configuration.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from unison.assembly import Parts, build_parts
from unison.config.load import load_config
from unison.core.seeds import derive_seed
from unison.rewards.scoring import score
from unison.rollout.collect import collect
from unison.training.prepare import prepare_columns

WORDS = {
    "fresh": "fresh rollouts",
    "none": "ratio to the rollout (bypass)",
    "recompute": "uncorrected",
    "tis": "TIS",
    "mis": "MIS",
}
"""What arms are called in the plot; ``fresh`` has neither lag nor noise."""


def main() -> None:
    options, flags = parse()
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "results.jsonl").open("w", encoding="utf-8") as file:
        for arm in options.arms.split(","):
            for seed in range(options.seeds):
                for record in asyncio.run(train(arm, seed, options, flags)):
                    print(json.dumps(record), file=file, flush=True)
                    print("  ".join(f"{key} {value}" for key, value in record.items()), flush=True)
    draw(options.out)


async def train(arm: str, seed: int, options: argparse.Namespace, flags: list[str]) -> list[dict[str, float | str]]:
    """One run: its measurements."""
    correction = "recompute" if arm == "fresh" else arm
    settings = ["--correction.name", correction, "--run.seed", str(seed), "--model.numerics", "fast"]
    parts = build_parts(load_config([options.config], [*settings, *flags]).config, dump_dir=options.out)
    lag, noise = (0, 0.0) if arm == "fresh" else (options.lag, options.noise)
    past = deque([copied(parts.trainer.published())], maxlen=lag + 1)
    records: list[dict[str, float | str]] = []
    version = 0
    for step in range(parts.config.trainer.steps + 1):
        if step % options.every == 0:
            version += 1
            parts.policy.publish(past[-1], version)
            result = await parts.evaluation.run(parts.client, version)
            records.append({"arm": arm, "seed": seed, "step": step, "accuracy": result.metrics()["eval/accuracy"]})
        if step == parts.config.trainer.steps:
            break
        version += 1
        parts.policy.publish(dict(disturbed(past[0], noise, derive_seed(seed, "noise", step))), version)
        records.append({"arm": arm, "seed": seed, "step": step + 1, **await learn(parts, step + 1)})
        past.append(copied(parts.trainer.published()))
    parts.reward.close()
    parts.evaluation.close()
    parts.policy.close()
    return records


async def learn(parts: Parts, step: int) -> dict[str, float]:
    """One training step on what the engine's present weights draw."""
    config = parts.config
    tasks = parts.draw(config.rollout.prompts_per_step)
    samples = await collect(parts.client, tasks, parts.sampling, run_seed=config.run.seed)
    score(samples, parts.reward)
    _, columns = prepare_columns(samples, parts.trainer.algorithm.truncated)
    totals = parts.trainer.step(columns, step)
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    metrics = totals.metrics()
    return {
        "reward": sum(rewards) / max(len(rewards), 1),
        "entropy": metrics.get("train/entropy", 0.0),
        "k3": metrics.get("mismatch/k3", 0.0),
        "grad_norm": metrics.get("train/grad_norm", 0.0),
    }


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def disturbed(tensors: Mapping[str, Tensor], noise: float, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Matrices with Gaussian noise of ``noise`` times their own deviation; vectors stay as they are."""
    generator = torch.Generator().manual_seed(seed % (1 << 63))
    for name, tensor in tensors.items():
        if tensor.ndim < 2 or noise == 0:
            yield name, tensor
            continue
        wide = tensor.float()
        error = torch.randn(wide.shape, generator=generator) * (noise * wide.std())
        yield name, (wide + error).to(tensor.dtype)


def draw(folder: Path) -> None:
    """Accuracy of the clean policy and mean reward of the rollouts over the steps, a line for each arm and seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    records = [json.loads(line) for line in (folder / "results.jsonl").read_text(encoding="utf-8").splitlines()]
    figure, axes = pyplot.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    arms = list(dict.fromkeys(record["arm"] for record in records))
    for ax, key, title in zip(
        axes,
        ("accuracy", "entropy", "k3"),
        ("Held-out accuracy of the policy", "Entropy, nats", "Mismatch of rollout and trainer (k3), nats"),
        strict=True,
    ):
        for number, arm in enumerate(arms):
            seeds = sorted({record["seed"] for record in records if record["arm"] == arm})
            for seed in seeds:
                found = [r for r in records if r["arm"] == arm and r["seed"] == seed and key in r]
                ax.plot(
                    [r["step"] for r in found],
                    [r[key] for r in found],
                    color=f"C{number}",
                    alpha=0.9 if len(seeds) == 1 else 0.6,
                    label=WORDS.get(arm, arm) if seed == seeds[0] else None,
                )
        ax.set_title(title, loc="left", fontsize=10)
        ax.set_xlabel("training step")
        ax.grid(alpha=0.3)
    axes[2].set_yscale("log")
    axes[0].legend(fontsize=8)
    figure.savefig(folder / "plot.png", dpi=130)


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0], allow_abbrev=False)
    parser.add_argument("config", type=Path)
    parser.add_argument("--arms", default="fresh,recompute,tis,mis")
    parser.add_argument("--lag", type=int, default=4, help="steps that the rollout's weights lie behind")
    parser.add_argument("--noise", type=float, default=0.05, help="noise of its weights, in their own deviations")
    parser.add_argument("--every", type=int, default=5, help="steps between two evaluations")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/stale"))
    return parser.parse_known_args()


if __name__ == "__main__":
    main()
