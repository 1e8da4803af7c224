"""Where the time of a decode step and of a training step goes.

usage: breakdown.py [--model M] [--dtype D] [--numerics N] [--threads N] [--batches 1,8,64] [--context 256]
                    [--shape 32x81:64] [--steps N] [--only decode|training] [--json FILE]

The parts are wrapped from outside (model call, attention, sampling; forward, head, backward, optimizer), and torch's
profiler tells which operators run inside each. A part's time less that of its operators is Python's. The profiler
makes every operator a little slower; the time of a step without it stands in the heading.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from engine_steps import make_engine, start_decoding, stop_all, time_steps
from torch.profiler import ProfilerActivity, profile, record_function
from training import make_rows, make_trainer

import unison.engine.drawing as drawing_module
import unison.ops.attention as attention_module
import unison.training.trainer as trainer_module

PART = "part:"
MATRIX_WORDS = ("linear", "addmm", "aten::mm", "aten::bmm", "matmul")
HEAD_BACKWARD = "_TokenLogprobsBackward"
Owner = Any
Wrapped = Sequence[tuple[Owner, str, str]]
"""(owner, attribute, part it is to be counted as)"""


def main() -> None:
    options = parse()
    if options.threads:
        torch.set_num_threads(options.threads)
    found: dict[str, dict[str, float]] = {}
    if options.only != "training":
        for batch in options.batches:
            found[f"decode, batch {batch}, context {options.context}"] = decode_breakdown(options, batch)
    if options.only != "decode":
        found[f"training, {options.shape}"] = training_breakdown(options)
    for title, parts in found.items():
        print_parts(title, dict(parts))
    if options.json:
        about = {name: getattr(options, name) for name in ("model", "dtype", "numerics", "steps")}
        data = {**about, "threads": torch.get_num_threads(), "seconds": found}
        Path(options.json).write_text(json.dumps(data, indent=1) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--numerics", default="exact", choices=("exact", "fast"))
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--batches", type=lambda text: [int(word) for word in text.split(",")], default=[1, 8, 64])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--shape", default="32x81:64", help="sequences x tokens : trained tokens of each")
    parser.add_argument("--micro-batch-tokens", type=int, default=2592)
    parser.add_argument("--steps", type=int, default=8, help="decode steps profiled; a training step is profiled once")
    parser.add_argument("--only", choices=("decode", "training"))
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args()


def decode_breakdown(options: argparse.Namespace, batch: int) -> dict[str, float]:
    """Seconds of one step by part."""
    tokens = options.context + 2 * options.steps + batch + 64
    engine = make_engine(options.model, options.dtype, options.numerics, batch, tokens)
    start_decoding(engine, batch, options.context, 2 * options.steps + 8, one_prompt=False)
    time_steps(engine, 2)
    plain_s = statistics.median(time_steps(engine, options.steps))
    parts_to_wrap = [
        (engine.rollout_model, "forward", "model"),
        (attention_module, "attention", "attention"),
        (drawing_module, "sample", "sampling"),
    ]
    with wrapped(parts_to_wrap):
        spent = profiled(lambda: time_steps(engine, options.steps), "scheduling")
    stop_all(engine)
    sums = {name: seconds / options.steps for name, seconds in spent.items()}
    python = take(sums, "model", "Python")
    return {
        "step without profiler": plain_s,
        "linear": take(sums, "model", "matrix") + take(sums, "scheduling", "matrix"),
        "attention": take(sums, "attention"),
        "sampling": take(sums, "sampling"),
        "scheduling and building tensors": take(sums, "scheduling"),
        "Python in the model call": python,
        "rest (norms, rotation, activation, residuals)": sum(sums.values()),
    }


def training_breakdown(options: argparse.Namespace) -> dict[str, float]:
    """Seconds of one optimizer step by part."""
    sizes, scored = options.shape.split(":")
    num_sequences, length = map(int, sizes.split("x"))
    trainer = make_trainer(options.model, options.dtype, options.numerics, options.micro_batch_tokens)
    rows = make_rows(num_sequences, length, int(scored), trainer.model.spec.vocab_size)
    trainer.step(rows)
    started = time.perf_counter()
    trainer.step(rows)
    plain_s = time.perf_counter() - started
    parts_to_wrap = [
        (trainer.model, "forward", "forward"),
        (attention_module, "attention", "attention"),
        (trainer_module, "token_logprobs", "head"),
        (torch.Tensor, "backward", "backward"),
        (trainer, "_checked_norm", "optimizer"),
        (trainer, "_update", "optimizer"),
    ]
    with wrapped(parts_to_wrap):
        sums = profiled(lambda: trainer.step(rows), "other")
    return {
        "step without profiler": plain_s,
        "forward: linear": take(sums, "forward", "matrix"),
        "forward: attention": take(sums, "attention"),
        "forward: rest": take(sums, "forward"),
        "head and log-probs, forward": take(sums, "head"),
        "head and log-probs, backward": take(sums, "head backward"),
        "backward: linear": take(sums, "backward", "matrix"),
        "backward: attention": take(sums, "backward", "attention"),
        "backward: rest": take(sums, "backward"),
        "optimizer, clipping, publishing": take(sums, "optimizer"),
        "packing, loss, bookkeeping": sum(sums.values()),
    }


Sums = dict[tuple[str, str], float]
"""(part, kind of operator) -> seconds"""


def take(sums: Sums, part: str, kind: str | None = None) -> float:
    """Remove a part, or one kind of operator in it, from the sums and return its seconds."""
    keys = [key for key in sums if key[0] == part and kind in (None, key[1])]
    return sum(sums.pop(key) for key in keys)


@contextmanager
def wrapped(parts: Wrapped) -> Iterator[None]:
    """While it lasts, each of the callables leaves a span of its part's name in the profile."""
    kept = [(owner, name, name in vars(owner), getattr(owner, name)) for owner, name, _ in parts]
    for (owner, name, part), (_, _, _, original) in zip(parts, kept, strict=True):
        setattr(owner, name, spanned(original, part))
    try:
        yield
    finally:
        for owner, name, own, original in kept:
            if own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)


def spanned(original: Callable[..., Any], part: str) -> Callable[..., Any]:
    def call(*arguments: Any, **keywords: Any) -> Any:
        with record_function(PART + part):
            return original(*arguments, **keywords)

    return call


def profiled(work: Callable[[], object], outermost: str) -> Sums:
    """Seconds by part and kind of operator; what no part covers is ``outermost``'s."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function(PART + outermost):
        work()
    sums: Sums = defaultdict(float)
    for event in profiler.events() or ():
        if event.cpu_parent is None and event.name == PART + outermost:
            add(event, outermost, sums)
    if not sums:
        raise SystemExit("the profiler recorded nothing")
    return dict(sums)


def add(event: Any, part: str, sums: Sums) -> None:
    """Distribute the time of a span over what ran inside it; what is left is Python's."""
    inside_us = 0.0
    for child in event.cpu_children:
        inside_us += child.cpu_time_total
        if child.name.startswith(PART):
            add(child, child.name.removeprefix(PART), sums)
        elif HEAD_BACKWARD in child.name:
            sums["head backward", "all"] += 1e-6 * child.cpu_time_total
        elif "::" in child.name and not child.name.startswith("autograd::"):
            sums[part, kind_of(child.name)] += 1e-6 * child.cpu_time_total
        else:
            add(child, part, sums)
    sums[part, "Python"] += 1e-6 * max(0.0, event.cpu_time_total - inside_us)


def kind_of(operator: str) -> str:
    if "scaled_dot_product" in operator:
        return "attention"
    return "matrix" if any(word in operator for word in MATRIX_WORDS) else "other"


def print_parts(title: str, parts: dict[str, float]) -> None:
    plain_s = parts.pop("step without profiler")
    whole_s = sum(parts.values())
    print(f"\n{title}: {1e3 * plain_s:.2f} ms ({1e3 * whole_s:.2f} ms under the profiler)")
    for name, seconds in parts.items():
        print(f"  {name:<48} {1e3 * seconds:>9.2f} ms {seconds / whole_s:>7.1%}")


if __name__ == "__main__":
    main()
