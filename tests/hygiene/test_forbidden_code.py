"""Constructs that can run foreign code or hide an error do not occur."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hygiene.tree import CODE_FOLDERS, functions, name, parse, python_files

FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
FORBIDDEN_NAMES = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_CALLS = {("torch", "load"), ("torch", "save"), ("os", "system"), ("yaml", "load")}
FORBIDDEN_KEYWORDS = {"trust_remote_code": True, "weights_only": False, "allow_pickle": True, "shell": True}
BROAD = {"Exception", "BaseException"}
BROAD_HANDLERS = {
    "unison/engine/client.py:InProcessClient._take_requests": "handed to whoever awaits that request",
    "unison/observability/sinks.py:MultiSink.close": "counted in num_failures and warned of",
    "unison/observability/sinks.py:MultiSink.log": "counted in num_failures and warned of",
    "unison/processes/faults.py:text_of": "only replaces the text of an error that is counted all the same",
    "unison/processes/pool.py:_Place._open_first": "raised by whoever opens the pool",
    "unison/processes/pool.py:_Place.serve": "raised by whoever waits for that call",
    "unison/processes/worker.py:_answer": "the call's outcome, with the reason",
    "unison/processes/worker.py:main": "the reason why the pool cannot be opened, and raised there",
    "unison/rewards/combined.py:call": "the samples become unscorable, with the reason, and are counted",
}
"""file:function that may catch any Exception without raising again -> where the error is counted or shown."""


def dangers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from imports_of(node)
        elif isinstance(node, ast.Call):
            yield from calls_of(node)
        elif isinstance(node, ast.ExceptHandler) and node.type is None:
            yield node.lineno, "bare except"


def imports_of(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[int, str]]:
    modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
    for module in modules:
        if module.split(".")[0] in FORBIDDEN_MODULES:
            yield node.lineno, f"import of {module}"
    if isinstance(node, ast.ImportFrom):
        for alias in node.names:
            if (node.module, alias.name) in FORBIDDEN_CALLS:
                yield node.lineno, f"import of {node.module}.{alias.name}"


def calls_of(node: ast.Call) -> Iterator[tuple[int, str]]:
    match node.func:
        case ast.Name(id=called) if called in FORBIDDEN_NAMES:
            yield node.lineno, f"{called}()"
        case ast.Attribute(value=ast.Name(id=module), attr=called) if (module, called) in FORBIDDEN_CALLS:
            yield node.lineno, f"{module}.{called}()"
    for keyword in node.keywords:
        if keyword.arg in FORBIDDEN_KEYWORDS and not (
            isinstance(keyword.value, ast.Constant) and keyword.value.value is not FORBIDDEN_KEYWORDS[keyword.arg]
        ):
            yield node.lineno, f"{keyword.arg}={ast.unparse(keyword.value)}"


def swallows_everything(handler: ast.ExceptHandler) -> bool:
    """True where any Exception is caught and never raised again, as itself or as another."""
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    if not any(isinstance(kind, ast.Name) and kind.id in BROAD for kind in caught):
        return False
    return not any(isinstance(node, ast.Raise) for statement in handler.body for node in ast.walk(statement))


def broad_handlers(path: Path) -> set[str]:
    found = set()
    for function, node in functions(path):
        if any(isinstance(inner, ast.ExceptHandler) and swallows_everything(inner) for inner in ast.walk(node)):
            found.add(f"{name(path)}:{function}")
    # A nested function's handler counts for the innermost function only.
    return {place for place in found if not any(other.startswith(f"{place}.") for other in found)}


def test_nothing_runs_foreign_code_or_hides_all_errors() -> None:
    found = [
        f"{name(path)}:{line} {what}" for path in python_files(*CODE_FOLDERS) for line, what in dangers(parse(path))
    ]
    assert not found, "\n".join(found)


def test_whoever_catches_every_exception_raises_or_counts_it() -> None:
    found = set().union(*(broad_handlers(path) for path in python_files("unison")))
    assert found <= set(BROAD_HANDLERS), f"not listed: {sorted(found - set(BROAD_HANDLERS))}"
    assert set(BROAD_HANDLERS) <= found, f"listed but gone: {sorted(set(BROAD_HANDLERS) - found)}"


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from cloudpickle import loads",
        "from torch import load",
        "import os.path, marshal",
        "x = eval('1')",
        "exec(code)",
        "torch.load(path)",
        "load(path, trust_remote_code=True)",
        "load(path, trust_remote_code=chosen)",
        "load(path, weights_only=False)",
        "try:\n    go()\nexcept:\n    pass",
    ],
)
def test_the_check_sees(line: str) -> None:
    assert list(dangers(ast.parse(line)))


@pytest.mark.parametrize("line", ["model.eval()", "re.compile('x')", "load(path, trust_remote_code=False)"])
def test_the_check_lets_pass(line: str) -> None:
    assert not list(dangers(ast.parse(line)))


@pytest.mark.parametrize(
    ("handler", "swallows"),
    [
        ("except Exception:\n    pass", True),
        ("except (ValueError, Exception) as error:\n    log(error)", True),
        ("except Exception as error:\n    raise ModelError('x') from error", False),
        ("except ValueError:\n    pass", False),
    ],
)
def test_a_swallowed_exception_is_told_from_one_raised_again(handler: str, swallows: bool) -> None:
    tree = ast.parse(f"try:\n    go()\n{handler}")
    assert [swallows_everything(node) for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)] == [swallows]
