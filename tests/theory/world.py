"""A policy small enough to write down every answer it can give, with its probability and gradient.

Dims: K tokens of all answers, one after the other; P parameters.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from unison.algorithms.aggregation import logprobs_from_logits
from unison.models.decoder import Decoder
from unison.models.spec import DecoderSpec, RopeSpec
from unison.ops.padding import FAST
from unison.ops.plan import packed_plan

LETTERS, END = (0, 1), 2
MAX_TOKENS = 3
PROMPTS = ((1, 0), (0, 1, 1), (1,))
SPEC = DecoderSpec(
    family="llama",
    vocab_size=3,
    hidden_size=6,
    intermediate_size=8,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    max_positions=16,
    norm_epsilon=1e-5,
    rope=RopeSpec(theta=1e4),
    tied_embeddings=False,
)

State = tuple[int, tuple[int, ...]]
"""Number of the prompt, and the tokens written so far."""


@dataclass(frozen=True, eq=False)
class Answer:
    prompt: int
    tokens: tuple[int, ...]
    places: Tensor
    """Which of the K tokens are its own."""

    @property
    def truncated(self) -> bool:
        return self.tokens[-1] != END

    @cached_property
    def reward(self) -> float:
        """Any function of the whole answer will do, its length among what it depends on."""
        return random.Random(f"reward {self.prompt} {self.tokens}").gauss(0.0, 1.0) + 0.5 * len(self.tokens)

    @property
    def succeeds(self) -> bool:
        return self.reward > 1.0

    @cached_property
    def states(self) -> list[State]:
        """The state each token was chosen in."""
        return [(self.prompt, self.tokens[:i]) for i in range(len(self.tokens))]

    @cached_property
    def turn_rewards(self) -> list[float]:
        """A reward for each token, of what was written up to it and not of what comes."""
        return [
            random.Random(f"turn {self.prompt} {self.tokens[: i + 1]}").gauss(0.0, 1.0) for i in range(len(self.tokens))
        ]


@dataclass(frozen=True, eq=False)
class World:
    answers: list[Answer]
    policy_K: Tensor
    """Log-prob of each token of each answer, float64."""
    jacobian_KP: Tensor
    """Its gradient."""
    stale_K: Tensor
    """The same under an older policy."""
    reference_K: Tensor

    def of_prompt(self, prompt: int) -> list[Answer]:
        return [answer for answer in self.answers if answer.prompt == prompt]

    def gradient(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """d function(log-probs [K]) / d parameters -> [P]."""
        leaf_K = self.policy_K.clone().requires_grad_()
        (slope_K,) = torch.autograd.grad(function(leaf_K), leaf_K)
        return slope_K @ self.jacobian_KP

    def gradient_of_mean(self, value: Callable[[Answer], float], prompts: Iterable[int] = (0,)) -> Tensor:
        """d E[value(answer)] / d parameters by enumeration; the mean over the prompts -> [P]."""
        return torch.stack(
            [self.gradient(lambda logprobs_K, at=at: self.mean(value, logprobs_K, at)) for at in prompts]
        ).mean(0)

    def mean(self, value: Callable[[Answer], float], logprobs_K: Tensor | None = None, prompt: int = 0) -> Tensor:
        logprobs_K = self.policy_K if logprobs_K is None else logprobs_K
        return torch.stack([probability(a, logprobs_K) * value(a) for a in self.of_prompt(prompt)]).sum()

    def score(self, answer: Answer) -> Tensor:
        """d log pi(answer) / d parameters -> [P]."""
        return self.jacobian_KP[answer.places].sum(0)

    @cached_property
    def greedy(self) -> list[Answer]:
        """For each prompt the answer of the likeliest tokens."""
        return [self._greedy(prompt) for prompt in range(len(PROMPTS))]

    def _greedy(self, prompt: int) -> Answer:
        choices, tokens = self.choices(prompt), ()
        while (prompt, tokens) in choices:
            places = choices[prompt, tokens]
            tokens = (*tokens, max(places, key=lambda token: float(self.policy_K[places[token]])))
        return next(answer for answer in self.of_prompt(prompt) if answer.tokens == tokens)

    def choices(self, prompt: int = 0) -> dict[State, dict[int, int]]:
        """Of each state the tokens that may follow, and a place where each of them stands."""
        found: dict[State, dict[int, int]] = {}
        for answer in self.of_prompt(prompt):
            for state, token, place in zip(answer.states, answer.tokens, answer.places.tolist(), strict=True):
                found.setdefault(state, {})[token] = place
        return found

    def visits(self, logprobs_K: Tensor, prompt: int = 0) -> dict[State, float]:
        """Probability of coming through each state."""
        found: dict[State, float] = {}
        for answer in self.of_prompt(prompt):
            for state in answer.states:
                found[state] = found.get(state, 0.0) + float(probability(answer, logprobs_K))
        return found

    def value_of(self, state: State, logprobs_K: Tensor) -> float:
        """Mean reward of the answers that come through a state."""
        through = [a for a in self.of_prompt(state[0]) if state in a.states]
        chances = [float(probability(a, logprobs_K)) for a in through]
        return sum(p * a.reward for p, a in zip(chances, through, strict=True)) / sum(chances)


def probability(answer: Answer, logprobs_K: Tensor) -> Tensor:
    return logprobs_K[answer.places].sum().exp()


@cache
def make_world() -> World:
    texts = [
        (prompt, letters + end)
        for prompt in range(len(PROMPTS))
        for length in range(MAX_TOKENS + 1)
        for letters in itertools.product(LETTERS, repeat=length)
        for end in ([(END,)] if length < MAX_TOKENS else [()])
    ]
    answers, at = [], 0
    for prompt, tokens in texts:
        answers.append(Answer(prompt, tokens, torch.arange(at, at + len(tokens))))
        at += len(tokens)
    model = _random_model()
    logprobs_K = token_logprobs(model, answers)
    jacobian = [_flat_gradient(logprob, model) for logprob in logprobs_K]
    others = [token_logprobs(_moved(model, seed), answers).detach() for seed in (1, 2)]
    return World(answers, logprobs_K.detach(), torch.stack(jacobian), *others)


def token_logprobs(model: Decoder, answers: list[Answer]) -> Tensor:
    rows = [PROMPTS[answer.prompt] + answer.tokens for answer in answers]
    lengths = [len(row) for row in rows]
    positions_1T = torch.cat([torch.arange(length) for length in lengths])[None]
    tokens_T = torch.tensor([token for row in rows for token in row])
    hidden_TE = model(tokens_T, positions_1T, packed_plan(lengths, path=FAST))
    ends = torch.tensor(lengths).cumsum(0).tolist()
    targets = torch.cat([torch.arange(end - len(a.tokens), end) for end, a in zip(ends, answers, strict=True)])
    logits = hidden_TE[targets - 1] @ model.head_weight().T
    return logprobs_from_logits(logits, tokens_T[targets], 1.0)


def _random_model() -> Decoder:
    model = Decoder(SPEC, torch.float64)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.4, generator=generator)
    return model


def _moved(model: Decoder, seed: int) -> Decoder:
    other = Decoder(SPEC, torch.float64)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for target, source in zip(other.parameters(), model.parameters(), strict=True):
            target.copy_(source + 0.15 * torch.randn(source.shape, generator=generator, dtype=torch.float64))
    return other


def _flat_gradient(value: Tensor, model: Decoder) -> Tensor:
    slopes = torch.autograd.grad(value, list(model.parameters()), retain_graph=True)
    return torch.cat([slope.flatten() for slope in slopes])
