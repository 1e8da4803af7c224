"""The answer, exactly, on the first line."""

from __future__ import annotations

from collections.abc import Mapping


def exact_answer(text: str, label: object) -> float:
    """1.0 if the response's first line equals the label, outer whitespace apart, else 0.0.

    What follows the first line is not read: a model shown solved lines goes on with lines of its
    own. A number as label is compared as Python writes it. Raises ValueError without a label, and for a table or list.
    """
    if label is None:
        raise ValueError("exact_answer needs a label, and the sample has none; set data.label_key")
    if not isinstance(label, (str, int, float)):
        raise ValueError(f"exact_answer cannot use a {type(label).__name__} as label; {_fix(label)}")
    return float(text.split("\n", 1)[0].strip() == str(label).strip())


def _fix(label: object) -> str:
    if isinstance(label, Mapping) and {"dataset", "entry"} <= set(label):
        return 'it is one of reasoning-gym: set reward.function = "reasoning_gym"'
    return "give a text or a number, or name by data.label_key the key that holds one"
