"""Reading labels. A label that cannot be meant raises, so that its samples are unscorable and not wrong."""

from __future__ import annotations

from collections.abc import Sequence


def text_of(label: object, grader: str) -> str:
    """A label as text: a string, or an integer as Python writes it. Raises ValueError for anything else."""
    if isinstance(label, str):
        return label
    if isinstance(label, int) and not isinstance(label, bool):
        return str(label)
    if label is None:
        raise ValueError(f"{grader} needs a label, and the sample has none; set data.label_key")
    raise ValueError(f"{grader} cannot use {label!r} as label, a {type(label).__name__}; give it as a string")


def references_of(label: object, grader: str) -> list[str]:
    """One reference, or a list of at least one, any of which is right."""
    if isinstance(label, Sequence) and not isinstance(label, str):
        if not label:
            raise ValueError(f"{grader} got an empty list as label; give at least one reference")
        return [text_of(reference, grader) for reference in label]
    return [text_of(label, grader)]
