"""The project's files, as the checks of this folder read them."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

REPO = Path(__file__).parents[2]
PACKAGE = REPO / "unison"
CODE_FOLDERS = ("unison", "tests", "examples", "benchmarks", "scripts")
NOT_OURS = {".git", ".venv", "__pycache__", "build", "dist", "runs"}


@cache
def project_files() -> tuple[Path, ...]:
    """Files that are, or could be, committed; all files but the usual outputs where there is no git."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True).stdout.split("\0")
        found = [REPO / name for name in listed if name]
    except (OSError, subprocess.CalledProcessError):
        found = [path for path in REPO.rglob("*") if not NOT_OURS & set(path.relative_to(REPO).parts)]
    return tuple(sorted(path for path in found if path.is_file()))


def python_files(*folders: str) -> list[Path]:
    """Python files under the named folders of the repository."""
    return [path for path in project_files() if path.suffix == ".py" and path.relative_to(REPO).parts[0] in folders]


def name(path: Path) -> str:
    return path.relative_to(REPO).as_posix()


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=name(path))


def functions(path: Path) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """All functions of a file with their dotted names, nested ones and methods included."""
    yield from _functions(parse(path), "")


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for child in ast.iter_child_nodes(node):
        inner = prefix
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            inner = f"{prefix}{child.name}."
            if not isinstance(child, ast.ClassDef):
                yield inner[:-1], child
        yield from _functions(child, inner)
