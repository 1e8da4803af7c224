"""What the documents tell a reader to type works, and their snippets are what they seem to be."""

from __future__ import annotations

import ast
import json
import re
import runpy
from pathlib import Path

import pytest

from tests.docs.blocks import Block, all_blocks, blocks, pages
from tests.hygiene.tree import name
from unison.cli.main import main
from unison.config.load import load_config

FEWER = ("--trainer.steps", "1", "--log.plot", "false")
"""Added to training commands, so that they end in seconds."""
OPEN = ("--data.options.", "--log.tracker_options.", "--algorithm.options.")
"""Tables whose keys are those of a user's own part."""
RUN_PAGES = [page for page in pages() if any(block.runs for block in blocks(page))]


def run(block: Block, workspace: Path) -> None:
    if block.file:
        (workspace / block.file).write_text(block.text, encoding="utf-8")
    elif block.runs and block.language == "python":
        program = workspace / f"snippet_{block.line}.py"
        program.write_text(block.text, encoding="utf-8")
        runpy.run_path(str(program), run_name="__main__")
    elif block.runs:
        for words in block.commands():
            fewer = FEWER if words[0] == "train" and "--dry-run" not in words else ()
            assert main([*words, *fewer]) == 0, f"{block}: unison {' '.join(words)}"


@pytest.mark.parametrize("page", RUN_PAGES, ids=name)
def test_what_a_page_says_can_be_run_is_run_from_top_to_bottom(page: Path, workspace: Path) -> None:
    for block in blocks(page):
        run(block, workspace)


@pytest.mark.parametrize("block", all_blocks("bash"), ids=str)
def test_commands_exist_and_know_their_flags(block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    for words in block.commands():
        if words[0] in ("--help", "--version"):
            continue
        command = words[: 2 if words[0] == "check" else 1]
        assert main([*command, "--help"]) == 0, f"{block}: unison {' '.join(command)}"
        known = set(re.findall(r"--[\w.-]+", capsys.readouterr().out))
        flags = {word.partition("=")[0] for word in words if word.startswith("--")}
        unknown = {flag for flag in flags - known if not flag.startswith(OPEN)}
        assert not unknown, f"{block}: {unknown}"


@pytest.mark.parametrize("block", all_blocks("toml"), ids=str)
def test_configurations_load(block: Block, tmp_path: Path) -> None:
    """A snippet may show a part only; what it leaves out is filled in below it."""
    rest, shown = tmp_path / "rest.toml", tmp_path / "shown.toml"
    rest.write_text('[model]\npath = "tiny-random"\n[data]\ntrain = "train.jsonl"\neval = "eval.jsonl"\n')
    shown.write_text(block.text, encoding="utf-8")
    load_config([rest, shown])


@pytest.mark.parametrize("block", all_blocks("python"), ids=str)
def test_python_parses(block: Block) -> None:
    ast.parse(block.text, filename=str(block))


@pytest.mark.parametrize("block", all_blocks("jsonl"), ids=str)
def test_each_line_of_a_data_file_is_an_object(block: Block) -> None:
    assert all(isinstance(json.loads(line), dict) for line in block.text.splitlines())


def test_each_fence_says_its_language() -> None:
    bare = [str(block) for page in pages() for block in blocks(page) if not block.language]
    assert not bare, bare


def test_blocks_are_read_with_their_orders(tmp_path: Path) -> None:
    shell = "<!-- run -->\n```bash\nunison x \\\n  --y 'a b'  # c\nmake z\n```\n"
    page = tmp_path / "page.md"
    page.write_text(f"text\n{shell}<!-- file: q.toml -->\n```toml\nk = 1\n```\n")
    first, second = blocks(page)
    assert (first.line, first.runs, first.file, first.commands()) == (3, True, None, [["x", "--y", "a b"]])
    assert (second.language, second.text, second.runs, second.file) == ("toml", "k = 1\n", False, "q.toml")
