"""Links and paths in the documents exist, and the architecture page names each folder once."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.hygiene.tree import CODE_FOLDERS, PACKAGE, REPO, name, project_files

ARCHITECTURE = REPO / "docs" / "architecture.md"
LINK = re.compile(r"!?\[[^\]]*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
QUOTED_PATH = re.compile(rf"`((?:{'|'.join((*CODE_FOLDERS, 'docs'))})/[\w./-]*)`")
# A row or heading of the architecture page begins with the folder it is about.
FOLDER_ROW = re.compile(r"^(?:\|\s*|#+\s+|[-*]\s+)`(unison/\w+)(?:/|\.py)?`", re.MULTILINE)


def documents() -> list[Path]:
    return [path for path in project_files() if path.suffix == ".md"]


def broken_links(page: Path, text: str) -> list[str]:
    broken = []
    for target in LINK.findall(FENCE.sub("", text)):
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue
        path, _, anchor = target.partition("#")
        goal = (page.parent / path) if path else page
        if not goal.exists() or (anchor and goal.suffix == ".md" and anchor not in anchors(goal)):
            broken.append(f"{name(page)}: {target}")
    return broken


def anchors(page: Path) -> set[str]:
    """Anchors of a page: those set by hand, and those of headings, spelt as code hosts spell them."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+\s+(.*?)\s*#*$", text, re.MULTILINE)
    return set(re.findall(r'<a id="([^"]+)"></a>', text)) | {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings
    }


def test_relative_links_lead_somewhere() -> None:
    broken = [link for page in documents() for link in broken_links(page, page.read_text(encoding="utf-8"))]
    assert not broken, "\n".join(broken)


def test_quoted_paths_exist() -> None:
    missing = [
        f"{name(page)}: {path}"
        for page in documents()
        for path in QUOTED_PATH.findall(page.read_text(encoding="utf-8"))
        if not (REPO / path).exists()
    ]
    assert not missing, "\n".join(missing)


def test_the_architecture_page_has_one_row_for_each_folder() -> None:
    if not ARCHITECTURE.exists():
        pytest.skip("docs/architecture.md is not written yet")
    rows = Counter(FOLDER_ROW.findall(ARCHITECTURE.read_text(encoding="utf-8")))
    assert rows == Counter(package_parts())


def package_parts() -> list[str]:
    """`unison/<folder>` for each folder with code, `unison/<module>` for each module beside them."""
    parts = {
        path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for path in project_files()
        if path.suffix == ".py" and path.is_relative_to(PACKAGE)
    }
    return [f"unison/{part}" for part in sorted(parts) if not part.startswith("__")]


def test_the_link_check_sees_a_missing_page_and_a_missing_heading() -> None:
    page = REPO / "CONTRIBUTING.md"
    text = "[a](docs/no-such-page.md) [b](#no-such-heading) [c](LICENSE) [d](https://example.com)"
    assert broken_links(page, text) == ["CONTRIBUTING.md: docs/no-such-page.md", "CONTRIBUTING.md: #no-such-heading"]


def test_rows_are_read_from_tables_lists_and_headings() -> None:
    text = "| `unison/core/` | x `unison/ops/` |\n- `unison/loop.py`: y\n## `unison/text`\nsee `unison/cli/`\n"
    assert FOLDER_ROW.findall(text) == ["unison/core", "unison/loop", "unison/text"]
