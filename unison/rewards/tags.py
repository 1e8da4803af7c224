"""The format of a response: parts in tags, in their order, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from unison.core.errors import RewardError
from unison.rewards.extract import check_tag
from unison.rewards.options import check_truth, checked_by


def _check_options(*, tags: str | Sequence[str] = ("think", "answer"), opened: bool = False) -> None:
    _names(tags)
    check_truth(opened=opened)


@checked_by(_check_options)
def format_tags(
    text: str, label: object, *, tags: str | Sequence[str] = ("think", "answer"), opened: bool = False
) -> float:
    """1.0 if the response is ``<think>...</think><answer>...</answer>`` and no more, else 0.0.

    Each tag opens once and closes once, in the order of ``tags`` (names, or one text with commas between them); only
    white space stands around them. With ``opened`` the prompt ended in the first opening tag, and the response begins
    inside it. What the parts say, and the label, are not read. Raises RewardError where ``tags`` are no names.
    """
    names = _names(tags)
    whole = f"<{names[0]}>{text}" if opened else text
    position = 0
    for name in names:
        opening, closing = f"<{name}>", f"</{name}>"
        if whole.count(opening) != 1 or whole.count(closing) != 1:
            return 0.0
        start, end = whole.find(opening), whole.find(closing)
        if start < position or whole[position:start].strip() or end < start:
            return 0.0
        position = end + len(closing)
    return float(not whole[position:].strip())


def _names(tags: str | Sequence[str]) -> list[str]:
    names = [name.strip() for name in tags.split(",")] if isinstance(tags, str) else tags
    if not isinstance(names, Sequence) or not names or len(set(names)) != len(names):
        raise RewardError(f"tags = {tags!r}; give different names with commas between them, as in 'think,answer'")
    return [check_tag(name) for name in names]
