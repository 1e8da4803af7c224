"""Files and functions stay small enough to read at one sitting."""

from __future__ import annotations

from statistics import median, quantiles

from tests.hygiene.tree import CODE_FOLDERS, functions, name, python_files

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80
MAX_MEDIAN_FILE_LINES = 150
MAX_P90_FUNCTION_LINES = 40
EXCEPTIONS: dict[str, str] = {}
"""File or file:function -> the reason why it may be longer."""


def lengths_of_files(*folders: str) -> dict[str, int]:
    return {name(path): len(path.read_text(encoding="utf-8").splitlines()) for path in python_files(*folders)}


def lengths_of_functions(*folders: str) -> dict[str, int]:
    return {
        f"{name(path)}:{function}": (node.end_lineno or node.lineno) - node.lineno + 1
        for path in python_files(*folders)
        for function, node in functions(path)
    }


def over(lengths: dict[str, int], limit: int) -> dict[str, int]:
    return {place: lines for place, lines in lengths.items() if lines > limit and place not in EXCEPTIONS}


def test_no_file_is_too_long() -> None:
    assert not over(lengths_of_files(*CODE_FOLDERS), MAX_FILE_LINES)


def test_no_function_is_too_long() -> None:
    assert not over(lengths_of_functions(*CODE_FOLDERS), MAX_FUNCTION_LINES)


def test_the_usual_file_and_function_are_short() -> None:
    files = [lines for lines in lengths_of_files("unison").values() if lines > 1]
    assert median(files) < MAX_MEDIAN_FILE_LINES
    assert quantiles(lengths_of_functions("unison").values(), n=10)[-1] < MAX_P90_FUNCTION_LINES


def test_exceptions_are_still_needed() -> None:
    long = over_any()
    assert set(EXCEPTIONS) <= long, f"no longer too long: {sorted(set(EXCEPTIONS) - long)}"


def over_any() -> set[str]:
    files = {place for place, lines in lengths_of_files(*CODE_FOLDERS).items() if lines > MAX_FILE_LINES}
    return files | {place for place, lines in lengths_of_functions(*CODE_FOLDERS).items() if lines > MAX_FUNCTION_LINES}
