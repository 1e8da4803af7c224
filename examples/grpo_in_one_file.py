r"""GRPO in one file: the run that ``unison train`` makes, written out over an engine, a model and plain torch.

    python examples/grpo_in_one_file.py --model tiny-random --steps 3

The library's own run ends with the same weights, bit for bit, and the same digest:

    unison train examples/sums.toml --model tiny-random --trainer.steps 3 --algorithm.kl_coef 0 \
        --algorithm.truncated keep --trainer.micro_batch_tokens 4096 --eval.problems 0 \
        --reward.function examples.grpo_in_one_file:reward

Likewise with ``--model smollm2-135m``, and with ``--kl-coef 0.001`` here and ``--algorithm.kl_coef 0.001`` there.

A step: sample a group of answers to each of some prompts, score them, compare each answer with its group, make the
tokens of the better ones more likely and those of the others less, give the engine the new weights.

The same bits need the same sums in the same order. Besides data and seeds that takes: all answers in one forward pass,
longest first; logits in the same chunks; weights and gradients in float32 beside a model that computes in bfloat16;
losses and norms added up in float64; the fused AdamW; as many threads.

Dims: T packed tokens, N response tokens, E hidden.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, count, islice
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from unison.config.schema import DataConfig
from unison.core.records import GenerationOutput
from unison.core.sampling import SamplingParams
from unison.core.seeds import derive_seed
from unison.data.cursor import permutation
from unison.data.source import load_source
from unison.engine.engine import Engine
from unison.models.decoder import Decoder
from unison.models.loading import load_model
from unison.models.names import published_tensors
from unison.models.sources import resolve_model
from unison.observability.environment import available_cores
from unison.ops.padding import NumericsPath
from unison.ops.plan import AttentionPlan, packed_plan
from unison.ops.vocab import token_logprobs
from unison.weights.checksum import tensors_digest

SEED = 0
PROMPTS_PER_STEP = 16
SAMPLING = SamplingParams(n=8, max_new_tokens=8, stop=("\n",))
LEARNING_RATE = 2e-5
WARMUP_STEPS = 2
MAX_GRAD_NORM = 1.0
CLIP_LOW, CLIP_HIGH = 0.2, 0.28


class Prompt(NamedTuple):
    key: str
    """Its answers' noise is seeded by it, so it is another one in the next epoch."""
    text: str
    label: str


class Batch(NamedTuple):
    """The answers of a step, one laid after the other. The logits at ``predictors_N`` are those of ``targets_N``."""

    tokens_T: Tensor
    positions_T: Tensor
    plan: AttentionPlan
    predictors_N: Tensor
    targets_N: Tensor
    old_logprobs_N: Tensor
    advantages_N: Tensor


class Step(NamedTuple):
    """What a step came to."""

    reward: float
    loss: float
    grad_norm: float
    digest: str
    """Of the weights after it."""


Groups = list[list[GenerationOutput]]
"""[prompt][copy]"""


def prompts() -> Iterator[Prompt]:
    """Sums like ``3+5=8\\n12+4=16\\n7+9=`` without end, each epoch in an order of its own."""
    rows = load_source(DataConfig(source="sums", options={"max_operand": 30}), "train", SEED)
    for epoch in count():
        for index in permutation(len(rows), derive_seed(derive_seed(SEED, "order"), "epoch", epoch)):
            row = rows[index]
            yield Prompt(f"{row.row_id}@{epoch}", str(row.prompt), str(row.label))


def reward(text: str, label: str) -> float:
    """1 for the right sum; else a tenth of the share of digits, which even a model of random weights can raise."""
    if text.strip() == label:
        return 1.0
    return 0.1 * sum(character in "0123456789" for character in text) / max(len(text), 1)


def sample(engine: Engine, asked: Sequence[Prompt]) -> Groups:
    """A group of answers to each prompt. All run together, and each comes out as it would alone."""
    groups = []
    for prompt in asked:
        sampling = replace(SAMPLING, seed=derive_seed(SEED, prompt.key))
        groups += engine.requests([engine.encode(prompt.text)], sampling)
    for request in chain.from_iterable(groups):
        engine.add_request(request)
    outputs = {output.request_id: output for output in engine.run()}
    return [[outputs[request.request_id] for request in group] for group in groups]


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """How much better each answer is than its group, in standard deviations; all 0 where they are equally good."""
    mean = math.fsum(rewards) / len(rewards)
    centred = [value - mean for value in rewards]
    std = math.sqrt(math.fsum(value * value for value in centred) / (len(rewards) - 1))
    return [value / (std + 1e-6) for value in centred]


def pack(groups: Groups, advantages: Sequence[Sequence[float]], path: NumericsPath) -> Batch:
    """The answers as one row of tokens; attention keeps them apart. The last token of each is only a target."""
    answers = list(zip(chain.from_iterable(groups), chain.from_iterable(advantages), strict=True))
    answers.sort(key=lambda answer: -len(answer[0].prompt_ids) - len(answer[0].token_ids))
    tokens: list[int] = []
    positions: list[int] = []
    predictors: list[int] = []
    lengths: list[int] = []
    for output, _ in answers:
        inputs = [*output.prompt_ids, *output.token_ids[:-1]]
        predictors += range(len(tokens) + len(output.prompt_ids) - 1, len(tokens) + len(inputs))
        tokens += inputs
        positions += range(len(inputs))
        lengths.append(len(inputs))
    plan = packed_plan(lengths, path=path)
    padding = (0, plan.num_rows - len(tokens))
    return Batch(
        tokens_T=F.pad(torch.tensor(tokens), padding),
        positions_T=F.pad(torch.tensor(positions), padding),
        plan=plan,
        predictors_N=torch.tensor(predictors),
        targets_N=torch.tensor([token for output, _ in answers for token in output.token_ids]),
        old_logprobs_N=torch.tensor([logprob for output, _ in answers for logprob in output.logprobs]),
        advantages_N=torch.tensor([advantage for output, advantage in answers for _ in output.token_ids]),
    )


def response_logprobs(model: Decoder, batch: Batch) -> Tensor:
    """[N], what ``log_softmax(hidden @ head.T)`` is at the targets; the logits are made 256 rows at a time."""
    hidden_TE = model(batch.tokens_T, batch.positions_T[None], batch.plan)
    hidden_NE, ids_N = hidden_TE[batch.predictors_N], batch.targets_N
    temperature_N = torch.full(ids_N.shape, SAMPLING.temperature)
    path = batch.plan.path
    return token_logprobs(hidden_NE, model.head_weight(), ids_N, temperature_N, path=path, chunk_tokens=256)[0]


def grpo_loss(logprobs_N: Tensor, reference_N: Tensor | None, batch: Batch, kl_coef: float) -> Tensor:
    """Mean over the tokens of PPO's clipped loss, and of the k3 estimate of the KL to the reference."""
    # Exactly 1 here, for rollout and training are the same function; its gradient is the policy gradient.
    ratio_N = (logprobs_N - batch.old_logprobs_N).exp()
    clipped_N = ratio_N.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    loss_N = -torch.minimum(ratio_N * batch.advantages_N, clipped_N * batch.advantages_N)
    if reference_N is not None:
        difference_N = reference_N.double() - logprobs_N.double()
        kl_N = (torch.expm1(difference_N) - difference_N).clamp(min=0)
        loss_N = loss_N + kl_coef * kl_N.float()
    share = 1 / len(loss_N)  # of each token in the mean
    return (loss_N.double() * share).sum()


def update(policy: Decoder, masters: Decoder, optimizer: torch.optim.AdamW, loss: Tensor, rate: float) -> float:
    """One AdamW step on the float32 masters, which the policy then is the rounded copy of; the gradient's norm."""
    gradients = [gradient.float() for gradient in torch.autograd.grad(loss, list(policy.parameters()))]
    norm = float(torch.stack([gradient.norm() for gradient in gradients]).double().norm())
    for master, gradient in zip(masters.parameters(), gradients, strict=True):
        master.grad = gradient * (MAX_GRAD_NORM / norm) if norm > MAX_GRAD_NORM else gradient
    optimizer.param_groups[0]["lr"] = rate
    optimizer.step()
    with torch.no_grad():
        for weight, master in zip(policy.parameters(), masters.parameters(), strict=True):
            weight.copy_(master)
    return norm


def publish(policy: Decoder, engine: Engine, version: int) -> str:
    """Give the engine the policy's weights, all or none; their digest, the same on both sides."""
    tensors = published_tensors(policy)
    transaction = engine.begin_update(version)
    for name, tensor in tensors.items():
        transaction.stage(name, tensor)
    return engine.commit_update(transaction, expected_checksum=tensors_digest(tensors)).checksum


def train(model: str, steps: int, kl_coef: float = 0.0) -> Iterator[Step]:
    """Each step as it is done."""
    torch.set_num_threads(available_cores())
    engine = Engine.from_pretrained(model)
    folder, dtype = resolve_model(model), engine.model.dtype
    policy = load_model(folder, dtype).requires_grad_(True)
    reference = load_model(folder, dtype) if kl_coef > 0 else None
    # What the optimizer moves: bfloat16 alone would round most of its small steps away.
    masters = load_model(folder, torch.float32)
    optimizer = torch.optim.AdamW(masters.parameters(), weight_decay=0.0, fused=True)
    data = prompts()
    for step in range(1, steps + 1):
        asked = list(islice(data, PROMPTS_PER_STEP))
        groups = sample(engine, asked)
        rewards = [
            [reward(output.text, prompt.label) for output in group] for prompt, group in zip(asked, groups, strict=True)
        ]
        batch = pack(groups, [group_advantages(of_group) for of_group in rewards], engine.path)
        with torch.no_grad():
            reference_N = response_logprobs(reference, batch) if reference is not None else None
        loss = grpo_loss(response_logprobs(policy, batch), reference_N, batch, kl_coef)
        rate = LEARNING_RATE * min(step, WARMUP_STEPS + 1) / (WARMUP_STEPS + 1)
        grad_norm = update(policy, masters, optimizer, loss, rate)
        digest = publish(policy, engine, step)
        yield Step(sum(map(sum, rewards)) / (len(asked) * SAMPLING.n), loss.item(), grad_norm, digest)


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO on sums, in one file.")
    parser.add_argument("--model", default="tiny-random", help="a short name, or a folder")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--kl-coef", type=float, default=0.0, help="weight of the KL to the first weights; 0 is off")
    arguments = parser.parse_args()
    for number, step in enumerate(train(arguments.model, arguments.steps, arguments.kl_coef), start=1):
        print(f"step {number}/{arguments.steps}", end="  ")
        print(f"reward {step.reward:.3f}  loss {step.loss:+.3e}  grad norm {step.grad_norm:.3f}  weights {step.digest}")


if __name__ == "__main__":
    main()
