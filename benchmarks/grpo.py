"""Seconds and memory of whole GRPO steps, sampling included: ours beside TRL's GRPOTrainer.

usage: grpo.py [--prompts 8] [--samples 4] [--new-tokens 64] [--steps 4] [--model M] [--dtype D] [--threads N]
               [--rounds N] [--trl-python PYTHON]

Both sample with transformers' end token held off, so that every response has all its tokens, use the same prompts,
reward, temperature 1, learning rate and no KL term, and train each response once. Ours keeps float32 masters. The
first step warms up; the figure is the median of the others. ``--trl-python`` is the interpreter of an environment with
trl, datasets and transformers; without it only ours runs. TRL takes a model folder, so give one or a short name.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import Measured, compare, emit

VARIANTS = ("unison", "trl")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--micro-batch-tokens", type=int, default=2048)
    parser.add_argument("--trl-python", default=None)
    parser.add_argument("--variant", choices=VARIANTS, help="run one variant here (used by the script itself)")
    options = parser.parse_args()
    if options.variant is None:
        from unison.models.sources import resolve_model

        options.model = str(resolve_model(options.model))
        names = ("prompts", "samples", "new_tokens", "steps", "model", "dtype", "threads", "micro_batch_tokens")
        arguments = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in names]
        variants = VARIANTS if options.trl_python else VARIANTS[:1]
        compare(__file__, variants, arguments, options.rounds, "steps", {"trl": options.trl_python or sys.executable})
        return
    with tempfile.TemporaryDirectory() as folder:
        emit((run_trl if options.variant == "trl" else run_unison)(options, Path(folder)))


def questions() -> list[dict[str, str]]:
    noise = random.Random(0)
    pairs = [(noise.randint(1, 49), noise.randint(1, 49)) for _ in range(256)]
    return [{"prompt": f"What is {a} plus {b}? Answer with a number.\nAnswer:", "label": str(a + b)} for a, b in pairs]


def reward(response: str, label: str) -> float:
    """The right answer first; a little for each e, so that no group is all alike."""
    return float(response.strip().startswith(label)) + 0.1 * min(response.count("e"), 5) / 5


def measured(seconds: list[float], started_cpu_s: float, **detail: Any) -> Measured:
    """One step of the median's length; CPU seconds of all steps shared out evenly."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    median = statistics.median(seconds[1:])
    cpu_s = (time.process_time() - started_cpu_s) / len(seconds)
    return Measured(median, cpu_s, 1, peak, {"step_s": [round(value, 2) for value in seconds], **detail})


def run_unison(options: argparse.Namespace, folder: Path) -> Measured:
    from unison.config.load import load_config
    from unison.loop import run_training

    data = folder / "sums.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in questions()))
    loaded = load_config(
        [],
        [
            f"--model.path={options.model}",
            f"--model.dtype={options.dtype}",
            f"--run.dir={folder / 'run'}",
            f"--run.threads={options.threads}",
            f"--data.train={data}",
            "--reward.function=grpo:reward",
            f"--rollout.prompts_per_step={options.prompts}",
            f"--rollout.samples_per_prompt={options.samples}",
            f"--rollout.max_new_tokens={options.new_tokens}",
            "--rollout.ignore_eos=true",
            "--algorithm.truncated=keep",
            f"--trainer.steps={options.steps}",
            "--trainer.learning_rate=1e-5",
            f"--trainer.micro_batch_tokens={options.micro_batch_tokens}",
            "--log.export=false",
            "--log.plot=false",
            "--log.progress=off",
        ],
    )
    started = time.process_time()
    run_training(loaded.config)
    steps = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [step for step in steps if "step/seconds" in step]
    parts = {
        name: round(statistics.median(step[name] for step in steps[1:]), 2)
        for name in steps[-1]
        if name.startswith("step/") and "seconds" in name
    }
    return measured([step["step/seconds"] for step in steps], started, **parts)


def run_trl(options: argparse.Namespace, folder: Path) -> Measured:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(options.threads)
    ends: list[float] = []

    class Ends(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    num_samples = options.prompts * options.samples
    config = GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=num_samples,
        gradient_accumulation_steps=1,
        num_generations=options.samples,
        max_completion_length=options.new_tokens,
        max_steps=options.steps,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        temperature=1.0,
        learning_rate=1e-5,
        beta=0.0,
        generation_kwargs={"min_new_tokens": options.new_tokens},
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        disable_tqdm=True,
    )

    def rewards(completions: list[str], label: list[str], **_: Any) -> list[float]:
        return [reward(text, answer) for text, answer in zip(completions, label, strict=True)]

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype)),
        reward_funcs=rewards,
        args=config,
        train_dataset=Dataset.from_list(questions()),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        callbacks=[Ends()],
    )
    started = time.process_time()
    trainer.train()
    return measured([after - before for before, after in itertools.pairwise(ends)], started)


if __name__ == "__main__":
    main()
