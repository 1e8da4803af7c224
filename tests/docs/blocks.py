"""Fenced blocks of the documents, with what an HTML comment above a block says is to be done with it.

- ``<!-- file: NAME -->``: the block is the content of a file, written for the blocks below it.
- ``<!-- run -->``: the block is run; it holds ``unison`` commands, or is a Python program.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from tests.hygiene.tree import REPO, name, project_files

_BLOCK = re.compile(
    r"(?:^<!-- (?P<order>run|file: (?P<file>[\w./-]+)) -->\n\n?)?^```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block; ``line`` is that of its opening fence."""

    page: Path
    line: int
    language: str
    text: str
    runs: bool
    file: str | None

    def __str__(self) -> str:
        return f"{name(self.page)}:{self.line}"

    def commands(self) -> list[list[str]]:
        """The ``unison`` commands of a shell block, each without its first word."""
        if self.language != "bash":
            return []
        lines = self.text.replace("\\\n", " ").splitlines()
        words = [shlex.split(line, comments=True) for line in lines]
        return [line[1:] for line in words if line and line[0] == "unison"]


def pages() -> list[Path]:
    """Those at the top, and all under docs/."""
    documents = [path for path in project_files() if path.suffix == ".md"]
    return [path for path in documents if path.parent == REPO or path.is_relative_to(REPO / "docs")]


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            page=page,
            line=1 + text.count("\n", 0, match.start("language")),
            language=match["language"],
            text=match["text"],
            runs=match["order"] == "run",
            file=match["file"],
        )
        for match in _BLOCK.finditer(text)
    ]


def all_blocks(*languages: str) -> list[Block]:
    return [block for page in pages() for block in blocks(page) if block.language in languages]
