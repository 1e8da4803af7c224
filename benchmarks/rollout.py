"""Tokens per second of rollouts: our engine, exact and fast, beside transformers' ``generate``.

usage: rollout.py --workload FILE [--model M] [--dtype D] [--threads N] [--rounds N] [--only VARIANT ...]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from harness import Measured, Meter, compare, emit

VARIANTS = ("unison-exact", "unison-fast", "transformers-generate")
HF_BATCH = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", required=True)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=VARIANTS, nargs="+", default=VARIANTS, help="variants to compare")
    parser.add_argument("--variant", choices=VARIANTS, help="run one variant here (used by the script itself)")
    options = parser.parse_args()
    if options.variant is None:
        arguments = ["--workload", options.workload, "--model", options.model, "--dtype", options.dtype]
        compare(__file__, options.only, [*arguments, "--threads", str(options.threads)], options.rounds, "tokens")
        return
    import torch

    torch.set_num_threads(options.threads)
    workload = json.loads(Path(options.workload).read_text())
    if options.variant == "transformers-generate":
        emit(run_transformers(options.model, options.dtype, workload))
    else:
        emit(run_unison(options.model, options.dtype, options.variant.removeprefix("unison-"), workload))


def turns_of(workload: dict[str, Any]) -> list[list[tuple[int, list[int], int, int]]]:
    """Rounds of (conversation, ids to append, new tokens, samples); all requests of a round are sent together."""
    if workload["kind"] == "requests":
        return [[(i, r["prompt_ids"], r["max_new_tokens"], r["n"]) for i, r in enumerate(workload["requests"])]]
    conversations = workload["conversations"]
    rounds = []
    for k in range(len(conversations[0]["turns"])):
        prefix = [c["system_ids"] if k == 0 else [] for c in conversations]
        rounds.append(
            [
                (i, prefix[i] + c["turns"][k]["user_ids"], c["turns"][k]["max_new_tokens"], 1)
                for i, c in enumerate(conversations)
            ]
        )
    return rounds


def run_unison(model: str, dtype: str, numerics: str, workload: dict[str, Any]) -> Measured:
    from unison import Engine, SamplingParams
    from unison.core.records import GenerationRequest

    engine = Engine.from_pretrained(model, dtype=dtype, numerics=numerics)
    engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=4))
    histories: dict[int, list[int]] = {}
    num_tokens = 0
    with Meter() as meter:
        for turn in turns_of(workload):
            for i, ids, max_new_tokens, copies in turn:
                histories[i] = histories.get(i, []) + ids
                for k in range(copies):
                    sampling = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True, seed=1000 * i + k)
                    engine.add_request(
                        GenerationRequest(request_id=f"{i}/{k}", prompt_ids=tuple(histories[i]), sampling=sampling)
                    )
            for output in engine.run():
                num_tokens += len(output.token_ids)
                if workload["kind"] == "multiturn":
                    histories[int(output.request_id.split("/")[0])] += output.token_ids
    return meter.result(num_tokens)


def run_transformers(model: str, dtype: str, workload: dict[str, Any]) -> Measured:
    import torch
    import transformers

    from unison.models.sources import resolve_model

    transformers.logging.set_verbosity_error()
    network = transformers.AutoModelForCausalLM.from_pretrained(
        resolve_model(model), dtype=getattr(torch, dtype), attn_implementation="sdpa"
    ).eval()

    @torch.inference_mode()
    def generate(batch: list[tuple[list[int], int]]) -> list[list[int]]:
        """Left-padded; everyone runs to the longest, only what was asked for is counted."""
        longest, most = max(len(ids) for ids, _ in batch), max(count for _, count in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.int64)
        attention = torch.zeros_like(ids)
        for row, (prompt, _) in enumerate(batch):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            attention[row, longest - len(prompt) :] = 1
        out = network.generate(
            ids,
            attention_mask=attention,
            max_new_tokens=most,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            eos_token_id=None,
            pad_token_id=0,
        )
        return [out[row, longest : longest + count].tolist() for row, (_, count) in enumerate(batch)]

    generate([([1, 2, 3], 4)] * 2)
    histories: dict[int, list[int]] = {}
    num_tokens = 0
    with Meter() as meter:
        for turn in turns_of(workload):
            jobs: list[tuple[int, int]] = []
            for i, ids, max_new_tokens, copies in turn:
                histories[i] = histories.get(i, []) + ids
                jobs += [(i, max_new_tokens)] * copies
            for start in range(0, len(jobs), HF_BATCH):
                part = jobs[start : start + HF_BATCH]
                for (i, _), tokens in zip(part, generate([(histories[i], n) for i, n in part]), strict=True):
                    num_tokens += len(tokens)
                    histories[i] += tokens if workload["kind"] == "multiturn" else []
    return meter.result(num_tokens)


if __name__ == "__main__":
    main()
