"""The answer, exactly, on the first line."""

from __future__ import annotations


def exact_answer(text: str, label: object) -> float:
    """1.0 if the response's first line equals the label, outer whitespace apart, else 0.0.

    What follows the first line is not read: a model shown solved lines goes on with lines of its
    own. A number as label is compared as Python writes it. Raises ValueError without a label.
    """
    if label is None:
        raise ValueError("exact_answer needs a label, and the sample has none; set data.label_key")
    return float(text.split("\n", 1)[0].strip() == str(label).strip())
