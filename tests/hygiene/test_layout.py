from __future__ import annotations

import ast

from tests.hygiene.tree import PACKAGE, name, parse, python_files


def test_every_folder_with_code_is_a_package() -> None:
    folders = {path.parent for path in python_files("unison", "tests")}
    missing = [name(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()]
    assert not missing, f"no __init__.py in {missing}"


def test_package_front_doors_stay_light() -> None:
    """An `__init__.py` says what the folder is; what it does stands in named files."""
    long = [
        name(path)
        for path in python_files("unison")
        if path.name == "__init__.py" and len(path.read_text(encoding="utf-8").splitlines()) > 60
    ]
    assert not long, long


def test_the_package_says_that_it_is_typed() -> None:
    assert (PACKAGE / "py.typed").exists()


def test_every_module_and_package_says_what_it_is() -> None:
    silent = [name(path) for path in python_files("unison") if not ast.get_docstring(parse(path))]
    assert not silent, f"no module docstring in {silent}"
