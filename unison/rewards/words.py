"""Answers in words: exact match and token F1, with the normalisation of SQuAD.

Source: the evaluation script of SQuAD (Rajpurkar et al. 2016, 2018): lower case, ASCII punctuation removed, the
articles a, an and the removed, white space joined. Punctuation goes with the decimal point in it, so that "1.5" and
"15" are alike: compare numbers by ``math_answer``.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from typing import Final

from unison.rewards.extract import check_source, pick
from unison.rewards.labels import references_of
from unison.rewards.options import check_truth, checked_by

_ARTICLES: Final = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION: Final = str.maketrans("", "", string.punctuation)


def normalise(text: str, *, case: bool = True, punctuation: bool = True, articles: bool = True) -> str:
    """The text as it is compared. Each option set to False leaves its part as it is."""
    if case:
        text = text.lower()
    if punctuation:
        text = text.translate(_NO_PUNCTUATION)
    if articles:
        text = _ARTICLES.sub(" ", text)
    return " ".join(text.split())


def _check_options(*, source: str = "text", tag: str = "answer", **switches: bool) -> None:
    check_source(source, tag)
    check_truth(**switches)


@checked_by(_check_options)
def exact_match(
    text: str,
    label: object,
    *,
    source: str = "text",
    tag: str = "answer",
    case: bool = True,
    punctuation: bool = True,
    articles: bool = True,
) -> float:
    """1.0 if the normalised answer equals a normalised reference, else 0.0.

    ``label`` is a string, an integer, or a list of them. ``source`` says where the answer stands: in the whole
    ``"text"``, the last ``"box"``, or the last ``"tag"`` named ``tag``. No answer there is wrong. Raises ValueError
    where the label is no reference.
    """
    options = {"case": case, "punctuation": punctuation, "articles": articles}
    references = {normalise(reference, **options) for reference in references_of(label, "exact_match")}
    answer = pick(text, source, tag)
    return float(answer is not None and normalise(answer, **options) in references)


@checked_by(_check_options)
def f1(text: str, label: object, *, source: str = "text", tag: str = "answer") -> float:
    """The F1 of the answer's tokens against the reference's, in [0, 1]; the best over several references.

    Where one side has no tokens, it is 1.0 if both have none, else 0.0. Label and ``source`` as in ``exact_match``.
    """
    references = [normalise(reference).split() for reference in references_of(label, "f1")]
    answer = pick(text, source, tag)
    if answer is None:
        return 0.0
    tokens = normalise(answer).split()
    return max(_f1(tokens, reference) for reference in references)


def _f1(tokens: list[str], reference: list[str]) -> float:
    if not tokens or not reference:
        return float(tokens == reference)
    num_common = sum((Counter(tokens) & Counter(reference)).values())
    if num_common == 0:
        return 0.0
    precision, recall = num_common / len(tokens), num_common / len(reference)
    return 2 * precision * recall / (precision + recall)
