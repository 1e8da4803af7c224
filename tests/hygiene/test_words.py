"""The project speaks of itself alone: no trace of where or how it was written."""

from __future__ import annotations

import re

import pytest

from tests.hygiene.tree import name, project_files

MAX_TEXT_BYTES = 1_000_000
# Each word is cut in two, so that this file does not contain it.
WORDS = [
    "".join(parts)
    for parts in (
        ("/wo", r"rk/"),
        ("/ro", r"ot/"),
        ("/fa", r"rm/"),
        ("/opt/wh", r"eels"),
        (r"\.lib", r"rary\b"),
        (r"\bsub", r"agents?\b"),
        (r"\bhelper se", r"ssions?\b"),
        (r"\bissue ", r"#?\d"),
        (r"case[s ]*[ _]c", r"\d\d\b"),
        (r"(?-i:\bC", r"[0-3]\d\b)"),
        (r"\bshared/(?:design|style|facts|cases|ref", r"erence|perf)"),
        (r"\bbrief\.", "md"),
        ("pypi", r"\.org"),
        ("pythonhosted", r"\.org"),
        ("registry", r"\.npm"),
        ("deb", r"\.debian"),
        ("download", r"\.pytorch"),
    )
]
PATTERN = re.compile("|".join(WORDS), re.IGNORECASE)


def test_no_file_contains_a_word_from_outside_the_project() -> None:
    found = []
    for path in project_files():
        if path.stat().st_size > MAX_TEXT_BYTES:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        lines = enumerate(text.splitlines(), 1)
        found += [f"{name(path)}:{number} {hit.group()!r}" for number, line in lines if (hit := PATTERN.search(line))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "parts", [("see /wo", "rk/main"), ("see is", "sue #2"), ("test_ca", "se_c01"), ("https://pyp", "i.org/simple")]
)
def test_the_check_sees(parts: tuple[str, str]) -> None:
    assert PATTERN.search("".join(parts))


@pytest.mark.parametrize("text", ["an issue with 2 sides", "workers/", "PyPI packages", "a C compiler", "in case of"])
def test_the_check_lets_pass(text: str) -> None:
    assert not PATTERN.search(text)
