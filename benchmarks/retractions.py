"""Sequences pushed back because memory ran short, as a share of the requests, in a pool little larger than needed.

usage: retractions.py --workload FILE [FILE ...] [--pool 1.2] [--model M] [--dtype D] [--threads N]

The working set is the most pages that running sequences ever held, measured in a pool with room for everything; the
second run has a pool of --pool times that, for running sequences and cached prefixes together.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from rollout import turns_of

from unison import Engine, SamplingParams
from unison.core.records import GenerationRequest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", required=True, nargs="+")
    parser.add_argument("--pool", type=float, default=1.2)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{'workload':<12} {'requests':>8} {'working set':>12} {'pool':>8} {'retractions':>12} {'share':>7}")
    for name in options.workload:
        workload = json.loads(Path(name).read_text())
        _, working_set, _ = run(options, workload, 0)
        kv_tokens = int(options.pool * working_set)
        num_requests, _, num_retractions = run(options, workload, kv_tokens)
        share = num_retractions / num_requests
        sizes = f"{num_requests:>8} {working_set:>12} {kv_tokens:>8} {num_retractions:>12}"
        print(f"{Path(name).stem:<12} {sizes} {share:>7.1%}")


def run(options: argparse.Namespace, workload: dict[str, Any], kv_tokens: int) -> tuple[int, int, int]:
    """Requests, most tokens of pages held by running sequences, retractions."""
    engine = Engine.from_pretrained(options.model, dtype=options.dtype, kv_tokens=kv_tokens)
    histories: dict[int, list[int]] = {}
    num_requests, most_pages = 0, 0
    for turn in turns_of(workload):
        for i, ids, max_new_tokens, copies in turn:
            histories[i] = histories.get(i, []) + ids
            for k in range(copies):
                sampling = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True, seed=1000 * i + k)
                engine.add_request(
                    GenerationRequest(request_id=f"{i}/{k}", prompt_ids=tuple(histories[i]), sampling=sampling)
                )
                num_requests += 1
        while engine.has_work:
            for output in engine.step():
                if workload["kind"] == "multiturn":
                    histories[int(output.request_id.split("/")[0])] += output.token_ids
            most_pages = max(most_pages, engine.pool.num_owned_pages)
    return num_requests, most_pages * engine.pool.page_size, engine.stats.num_retractions


if __name__ == "__main__":
    main()
