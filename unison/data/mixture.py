"""Mixtures: several sources drawn in fixed shares, each with its own epochs.

Which part a position belongs to is decided by Tijdeman's rule (Discrete Mathematics 32, 1980, "The
chairman assignment problem"): among the parts that are far enough behind their share, the one that
would be too late first. After t draws each of k parts has had its share of t to within
1 - 1/(2k-2), at every t: no run is long enough to drift. Weights are the decimal fractions they are
written as, computed with whole numbers, so that no rounding of a machine decides anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, Final

from unison.config.schema import DataConfig, MixConfig
from unison.core.errors import DataError
from unison.core.seeds import derive_seed
from unison.data.cursor import PromptCursor, check_identity, permutation
from unison.data.sections import SectionConfig
from unison.data.source import PromptRow, PromptSource, identity_of

PART_KEY: Final = "mix_part"
"""Metadata key under which a row names its part."""


class PartSource:
    """A source as a part of a mixture: row ids begin with the part's name, metadata name it."""

    def __init__(self, name: str, source: PromptSource) -> None:
        self._name = name
        self._source = source
        identity = identity_of(source)
        self.identity = None if identity is None else f"{name} {identity}"

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int, /) -> PromptRow:
        row = self._source[index]
        if PART_KEY in row.metadata:
            raise DataError(f"{row.row_id}: the metadata hold the key {PART_KEY!r}, which names the mixture's part")
        return PromptRow(f"{self._name}/{row.row_id}", row.prompt, row.label, {**row.metadata, PART_KEY: self._name})


def part_config(config: DataConfig, name: str, part: MixConfig) -> DataConfig:
    """The part as a data section of its own; what a part cannot say is the mixture's."""
    return SectionConfig(
        section=f"data.mix.{name}",
        source=part.source,
        train=part.train,
        layout=part.layout,
        prompt_key=part.prompt_key,
        label_key=part.label_key,
        metadata_key=part.metadata_key,
        filter=part.filter,
        options=part.options,
        on_bad_row=config.on_bad_row,
    )


class Shares:
    """Which part is drawn next: a pure function of weights, seed and the counts drawn so far."""

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        fractions = [Fraction(str(weight)) for weight in weights]
        total = sum(fractions, Fraction(0))
        self.shares = [fraction / total for fraction in fractions]
        # Parts equally late are drawn in an order that the seed decides.
        self._order = permutation(len(weights), seed)

    def next_part(self, counts: Sequence[int]) -> int:
        """The part of the draw after these counts."""
        if len(counts) == 1:
            return 0
        t = sum(counts) + 1
        slack = Fraction(1, 2 * len(counts) - 2)
        behind = [share * t - count for share, count in zip(self.shares, counts, strict=True)]
        ready = [part for part in self._order if behind[part] >= slack]
        return min(ready, key=lambda part: (1 - slack - behind[part]) / self.shares[part])

    def possible(self, counts: Sequence[int]) -> bool:
        """Whether these counts can come out at all."""
        t = sum(counts)
        return all(abs(share * t - count) < 1 for share, count in zip(self.shares, counts, strict=True))


class MixtureCursor:
    """Draws from the parts' cursors in fixed shares. A row's epoch is its part's."""

    def __init__(self, parts: Mapping[str, PromptCursor], weights: Mapping[str, float], seed: int) -> None:
        if not parts:
            raise DataError("there are no parts to mix")
        self._parts = dict(parts)
        self._weights = {name: float(weights[name]) for name in parts}
        self._seed = seed
        self._shares = Shares(list(self._weights.values()), derive_seed(seed, "mix"))
        self._counts = [0] * len(parts)

    @property
    def epoch(self) -> int:
        """The epoch that every part has reached."""
        return min(part.epoch for part in self._parts.values())

    @property
    def num_resting(self) -> int:
        return sum(part.num_resting for part in self._parts.values())

    def next_batch(self, n: int) -> list[tuple[PromptRow, int]]:
        """The next ``n`` rows, each with its part's epoch (from 0)."""
        if n < 1:
            raise ValueError(f"next_batch({n}): at least one row must be drawn")
        cursors = list(self._parts.values())
        drawn: list[tuple[PromptRow, int]] = []
        for _ in range(n):
            part = self._shares.next_part(self._counts)
            drawn += cursors[part].next_batch(1)
            self._counts[part] += 1
        return drawn

    def record(self, row_id: str, reward: float) -> None:
        """As ``PromptCursor.record``, of the part that the row id begins with."""
        name = row_id.partition("/")[0]
        if name not in self._parts:
            raise DataError(f"a reward was recorded for the prompt {row_id!r}, which is of no part of the mixture")
        self._parts[name].record(row_id, reward)

    def state_dict(self) -> dict[str, Any]:
        return {
            "seed": self._seed,
            "weights": dict(self._weights),
            "counts": dict(zip(self._parts, self._counts, strict=True)),
            "parts": {name: part.state_dict() for name, part in self._parts.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved place. Raises DataError where it was saved over other data or settings."""
        ours = self.state_dict()
        if set(state) != set(ours):
            raise DataError(f"the saved data position has the keys {sorted(state)}; expected {sorted(ours)}")
        check_identity(state, {"seed": self._seed, "weights": self._weights})
        counts, parts = state["counts"], state["parts"]
        if not _same_names(counts, self._parts) or not _same_names(parts, self._parts):
            raise DataError(f"the saved data position is not one of the parts {', '.join(self._parts)}")
        numbers = [counts[name] for name in self._parts]
        if any(type(number) is not int or number < 0 for number in numbers) or not self._shares.possible(numbers):
            raise DataError(f"the saved data position (drawn so far: {counts}) is impossible with these weights")
        before = ours["parts"]
        try:
            for name, part in self._parts.items():
                part.load_state_dict(parts[name])
        except DataError:
            for name, part in self._parts.items():
                part.load_state_dict(before[name])
            raise
        self._counts = numbers


def _same_names(value: Any, parts: Mapping[str, Any]) -> bool:
    return isinstance(value, Mapping) and set(value) == set(parts)
