"""What a token costs against batch size, context and cached share of the prompt: a cliff shows as a jump.

usage: curves.py [--model M] [--dtype D] [--numerics N] [--threads N] [--steps N] [--json FILE]
                 [--batches 1,2,...] [--contexts 128,...] [--shares 0,...]

batch    one decode step of B sequences at --batch-context tokens each, per token
context  one decode step of --context-batch sequences of one prompt of C tokens, per token
cached   time to the first token of a prompt of --prompt-tokens, of which a share is in the prefix cache, per prompt
         token

Each figure is the median of several steps or repeats.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from engine_steps import make_engine, random_prompt, start_decoding, stop_all, time_steps

from unison import Engine, SamplingParams


def main() -> None:
    options = parse()
    import torch

    if options.threads:
        torch.set_num_threads(options.threads)
    curves = {
        "batch": batch_curve(options),
        "context": context_curve(options),
        "cached": cached_curve(options),
    }
    for name, points in curves.items():
        print_curve(name, points)
    if options.json:
        about = {name: getattr(options, name) for name in ("model", "dtype", "numerics", "steps")}
        data = {**about, "threads": torch.get_num_threads(), "us_per_token": curves}
        Path(options.json).write_text(json.dumps(data, indent=1) + "\n")


def parse() -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(word) for word in text.split(",") if word]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--numerics", default="exact")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--steps", type=int, default=9, help="decode steps timed at each point")
    parser.add_argument("--repeats", type=int, default=3, help="prefills timed at each point of the cached curve")
    parser.add_argument("--batches", type=numbers, default=[1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64])
    parser.add_argument("--batch-context", type=int, default=256)
    parser.add_argument("--contexts", type=numbers, default=[128, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8064])
    parser.add_argument("--context-batch", type=int, default=4)
    parser.add_argument("--shares", type=numbers, default=[0, 10, 25, 50, 75, 90, 95], help="per cent")
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--json", metavar="FILE", help="write the points to this file too")
    return parser.parse_args()


Curve = list[tuple[int, float]]
"""(batch, context or per cent; microseconds per token)"""


def decode_cost(engine: Engine, batch: int, context: int, steps: int, *, one_prompt: bool) -> float:
    start_decoding(engine, batch, context, steps + 2, one_prompt=one_prompt)
    time_steps(engine, 2)
    cost = statistics.median(time_steps(engine, steps)) / batch
    stop_all(engine)
    return 1e6 * cost


def batch_curve(options: argparse.Namespace) -> Curve:
    if not options.batches:
        return []
    tokens = options.batch_context + options.steps + 128
    engine = make_engine(options.model, options.dtype, options.numerics, max(options.batches), tokens)
    return [
        (batch, decode_cost(engine, batch, options.batch_context, options.steps, one_prompt=False))
        for batch in options.batches
    ]


def context_curve(options: argparse.Namespace) -> Curve:
    if not options.contexts:
        return []
    extra = options.steps + 16
    engine = make_engine(
        options.model, options.dtype, options.numerics, options.context_batch, max(options.contexts) + extra
    )
    points = []
    for context in options.contexts:
        if context + extra > engine.context_length:
            print(f"context {context} is left out: the model admits {engine.context_length} tokens")
            continue
        points.append((context, decode_cost(engine, options.context_batch, context, options.steps, one_prompt=True)))
    return points


def cached_curve(options: argparse.Namespace) -> Curve:
    if not options.shares:
        return []
    engine = make_engine(options.model, options.dtype, options.numerics, 2, options.prompt_tokens + 1)
    prompt = random_prompt(engine, options.prompt_tokens, 0)
    return [(share, 1e6 * prefill_cost(engine, prompt, share, options.repeats)) for share in options.shares]


def prefill_cost(engine: Engine, prompt: Sequence[int], share_percent: int, repeats: int) -> float:
    """Seconds per prompt token until the first token, the given share of the prompt cached beforehand."""
    one_token = SamplingParams(max_new_tokens=1, ignore_eos=True, seed=0)
    cached = len(prompt) * share_percent // 100
    times = []
    for _ in range(repeats):
        engine.flush_cache()
        if cached:
            engine.generate([prompt[:cached]], one_token)
        started = time.perf_counter()
        ((output,),) = engine.generate([prompt], one_token)
        times.append(time.perf_counter() - started)
        if output.num_cached_tokens < cached:
            raise SystemExit(f"{cached} tokens were to be cached, {output.num_cached_tokens} were")
    return statistics.median(times) / len(prompt)


def print_curve(name: str, points: Curve) -> None:
    print(f"\n{name:>8} {'us/token':>10}")
    highest = max((cost for _, cost in points), default=1.0)
    for place, cost in points:
        print(f"{place:>8} {cost:>10.1f}  {'#' * round(50 * cost / highest)}")


if __name__ == "__main__":
    main()
