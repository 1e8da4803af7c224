"""Import directions: a folder imports only from the rows above its own."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hygiene.tree import PACKAGE, REPO, name, parse, python_files

ROWS = (
    "core",
    "config",
    "observability",
    "processes",
    "ops",
    "algorithms",
    "quantization",
    "models",
    "parallel",
    "weights",
    "text",
    "engine",
    "clients",
    "server",
    "sandbox",
    "rewards",
    "environments",
    "data",
    "rollout",
    "training",
    "checkpoint",
    "evaluation",
    "bench",
    "assembly",
    "run",
    "loop",
    "cluster",
    "checks",
    "viewer",
    "cli",
)
STRANGERS = {("training", "engine")}
"""Pairs (importer, imported) that must not meet although the order alone would let them."""
NO_TENSORS = ("core", "config")
HEAVY = {"torch", "transformers", "numpy", "tokenizers", "safetensors", "gguf", "matplotlib", "scipy"}


def row_of(path: Path) -> str | None:
    """The row a file belongs to; None for the package's own front door."""
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return {"__init__": None, "__main__": "cli"}.get(first, first)


def imported_modules(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of every import in a file: lazy ones and those for types only included."""
    package = path.relative_to(REPO).parent.parts
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from unison import engine` names a folder in its second half.
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def test_every_folder_of_the_package_has_a_row() -> None:
    rows = {row_of(path) for path in python_files("unison")} - {None}
    assert rows <= set(ROWS), f"not in the table: {sorted(map(str, rows - set(ROWS)))}"


def test_folders_import_only_from_rows_above_their_own() -> None:
    wrong = []
    for path in python_files("unison"):
        importer = row_of(path)
        if importer not in ROWS:
            continue
        for line, module in imported_modules(path):
            parts = module.split(".")
            if parts[0] != "unison" or len(parts) == 1 or parts[1] not in ROWS or parts[1] == importer:
                continue
            if ROWS.index(parts[1]) > ROWS.index(importer) or (importer, parts[1]) in STRANGERS:
                wrong.append(f"{name(path)}:{line} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_core_and_config_name_no_tensor_library() -> None:
    wrong = [
        f"{name(path)}:{line} imports {module}"
        for path in python_files("unison")
        if row_of(path) in NO_TENSORS
        for line, module in imported_modules(path)
        if module.split(".")[0] in HEAVY
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("module", ["unison", "unison.core.records", "unison.config", "unison.config.schema"])
def test_light_modules_load_nothing_heavy_and_load_fast(module: str) -> None:
    program = f"""
import sys, time
start_s = time.process_time()
import {module}
spent_s = time.process_time() - start_s
loaded = {HEAVY!r} & set(sys.modules)
sys.exit(f"loaded {{loaded}}" if loaded else 0 if spent_s < 0.3 else f"took {{spent_s}} s of CPU time")
"""
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=REPO, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
