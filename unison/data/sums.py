"""Two-term sums in raw few-shot form, made up from a seed.

    3+5=8
    12+4=16
    7+9=

The label is the sum as a string. Operands are split between train and eval by unordered pair:
whoever trains on 3+5 is never asked 5+3. The solved lines are drawn from training pairs only, and
never show the pair asked for.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from unison.config.names import did_you_mean
from unison.config.schema import DataConfig
from unison.core.errors import ConfigError
from unison.core.seeds import derive_seed
from unison.data.cursor import permutation
from unison.data.source import PromptRow, PromptSource, Split, refuse_settings

Pair = tuple[int, int]
MAX_PAIRS: Final = 2_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SumsOptions:
    """``train_size`` None takes every training pair in both orders."""

    min_operand: int = 1
    max_operand: int = 30
    train_size: int | None = None
    eval_size: int = 200
    shots: int = 2


class SumsSource:
    """The prompts of one split. ``pairs`` are asked as they are; ``shot_pairs`` fill the solved lines."""

    def __init__(self, pairs: Sequence[Pair], shot_pairs: Sequence[Pair], *, shots: int, seed: int) -> None:
        self.pairs = pairs
        self._shot_pairs = shot_pairs
        self._shots = shots
        self._seed = seed

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int, /) -> PromptRow:
        left, right = self.pairs[index]
        lines = [f"{a}+{b}={a + b}\n" for a, b in self._solved(left, right)]
        return PromptRow(f"sums:{left}+{right}", f"{''.join(lines)}{left}+{right}=", str(left + right))

    def _solved(self, left: int, right: int) -> list[Pair]:
        """Distinct pairs in random order, a function of seed and row."""
        draw = random.Random(derive_seed(self._seed, "sums", "shots", left, right)).random
        seen = {_unordered(left, right)}
        lines: list[Pair] = []
        while len(lines) < self._shots:
            pair = self._shot_pairs[int(draw() * len(self._shot_pairs))]
            swap = draw() < 0.5
            if pair not in seen:
                seen.add(pair)
                lines.append((pair[1], pair[0]) if swap else pair)
        return lines


def open_sums(config: DataConfig, split: Split, seed: int) -> PromptSource:
    """One split of the sums, as configured in ``data.options``. Raises ConfigError on a wrong option."""
    refuse_settings(config, "train", "eval", "layout", "prompt_key", "label_key", "metadata_key", "on_bad_row")
    options = read_options(config.options)
    eval_prompts, train_pairs = _split_pairs(options, seed)
    if split == "eval":
        return SumsSource(eval_prompts, train_pairs, shots=options.shots, seed=seed)
    prompts = [prompt for pair in train_pairs for prompt in _both_orders(pair)]
    order = permutation(len(prompts), derive_seed(seed, "sums", "train"))
    size = len(prompts) if options.train_size is None else options.train_size
    if size > len(prompts):
        raise ConfigError(
            f"data.options.train_size={size} is more than the {len(prompts)} training prompts of operands "
            f"{options.min_operand} to {options.max_operand}; lower it or raise data.options.max_operand"
        )
    return SumsSource([prompts[i] for i in order[:size]], train_pairs, shots=options.shots, seed=seed)


def read_options(given: Mapping[str, object]) -> SumsOptions:
    """Checked options. Raises ConfigError naming the option, its value and what it may be."""
    least = {"min_operand": 0, "max_operand": 0, "train_size": 1, "eval_size": 1, "shots": 0}
    checked: dict[str, int] = {}
    for name, value in given.items():
        if name not in least:
            raise ConfigError(
                f"data.options.{name} is unknown to the sums source{did_you_mean(name, least)}"
                f" (it takes {', '.join(least)})"
            )
        if isinstance(value, bool) or not isinstance(value, int) or value < least[name]:
            raise ConfigError(f"data.options.{name}={value!r} must be a whole number of at least {least[name]}")
        checked[name] = value
    options = SumsOptions(**checked)
    if options.min_operand > options.max_operand:
        raise ConfigError(
            f"data.options.min_operand={options.min_operand} is above data.options.max_operand={options.max_operand}"
        )
    return options


def _split_pairs(options: SumsOptions, seed: int) -> tuple[list[Pair], list[Pair]]:
    """(prompts of eval, unordered training pairs)."""
    operands = range(options.min_operand, options.max_operand + 1)
    num_pairs = len(operands) * (len(operands) + 1) // 2
    if num_pairs > MAX_PAIRS:
        raise ConfigError(
            f"data.options.max_operand={options.max_operand} makes {num_pairs} pairs, over {MAX_PAIRS}; lower it"
        )
    pairs = [(a, b) for a in operands for b in operands if a <= b]
    shuffled = [pairs[i] for i in permutation(len(pairs), derive_seed(seed, "sums", "split"))]
    prompts: list[Pair] = []
    num_eval = 0
    while len(prompts) < options.eval_size and num_eval < len(shuffled):
        prompts += _both_orders(shuffled[num_eval])
        num_eval += 1
    train_pairs = sorted(shuffled[num_eval:])
    if len(prompts) < options.eval_size or len(train_pairs) <= options.shots:
        raise ConfigError(
            f"operands {options.min_operand} to {options.max_operand} make {num_pairs} unordered pairs: too few for "
            f"data.options.eval_size={options.eval_size} held-out prompts and more than "
            f"data.options.shots={options.shots} training pairs; raise data.options.max_operand or lower eval_size"
        )
    return prompts[: options.eval_size], train_pairs


def _both_orders(pair: Pair) -> list[Pair]:
    return [pair] if pair[0] == pair[1] else [pair, (pair[1], pair[0])]


def _unordered(left: int, right: int) -> Pair:
    return (left, right) if left <= right else (right, left)
