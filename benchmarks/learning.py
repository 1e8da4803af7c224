"""Draws how runs have learnt, from their folders alone: reward of each step, and held-out accuracy before and after.

usage: learning.py RUN_FOLDER... --out FILE.png [--title TEXT]

Prints one line for each run: steps, mean reward of the first and of the last three steps, held-out accuracies, minutes.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0], allow_abbrev=False)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--title", default="")
    options = parser.parse_args()
    runs = {folder.name: read(folder) for folder in options.runs}
    for name, records in runs.items():
        print(line(name, records))
    draw(runs, options.out, options.title)


def read(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(text) for text in lines if text]


def line(name: str, records: list[dict[str, Any]]) -> str:
    rewards = [record["rollout/reward_mean"] for record in records if "rollout/reward_mean" in record]
    evaluations = [record for record in records if "eval/accuracy" in record]
    before, after = evaluations[0], evaluations[-1]
    seconds = sum(record.get("step/seconds", 0.0) for record in records)
    return (
        f"{name:14} {len(rewards):3} steps  reward {statistics.fmean(rewards[:3]):.3f} -> "
        f"{statistics.fmean(rewards[-3:]):.3f}  held-out sampled {before['eval/accuracy']:.3f} -> "
        f"{after['eval/accuracy']:.3f}, greedy {before.get('eval/accuracy_greedy', float('nan')):.3f} -> "
        f"{after.get('eval/accuracy_greedy', float('nan')):.3f}  {seconds / 60:.1f} min"
    )


def draw(runs: dict[str, list[dict[str, Any]]], out: Path, title: str) -> None:
    """Left the mean reward of each rollout, right the mean entropy, a line for each run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    panels = (("rollout/reward_mean", "Mean reward of the rollout"), ("train/entropy", "Entropy, nats"))
    for ax, (key, words) in zip(axes, panels, strict=True):
        for number, (name, records) in enumerate(runs.items()):
            points = [(record["step"], record[key]) for record in records if key in record]
            style = "--" if "control" in name else "-"
            ax.plot(*zip(*points, strict=True), style, color=f"C{number}", label=name, linewidth=1.6)
        ax.set_title(words, loc="left", fontsize=10)
        ax.set_xlabel("training step")
        ax.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    if title:
        figure.suptitle(title, fontsize=11)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    main()
