"""Constructs that can run foreign code or hide an error do not occur."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hygiene.tree import CODE_FOLDERS, functions, name, parse, python_files

FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
FORBIDDEN_NAMES = {"eval", "exec", "compile", "__import__"}
EVALUATORS = {"parse_expr", "sympify", "recv_pyobj", "send_pyobj"}
"""Called or imported under any module or object: they evaluate text as Python, or unpickle."""
EVALUATING_MODULES = {"sympy.parsing.sympy_parser", "sympy.core.sympify"}
FORBIDDEN_CALLS = {
    ("torch", "load"),
    ("torch", "save"),
    ("os", "system"),
    ("yaml", "load"),
    ("yaml", "load_all"),
    ("yaml", "unsafe_load"),
    ("yaml", "full_load"),
    ("builtins", "eval"),
    ("builtins", "exec"),
}
ALLOWED: dict[str, str] = {}
"""file:what that may stand in the package all the same -> why. Empty, and best kept so."""
FORBIDDEN_KEYWORDS = {"trust_remote_code": True, "weights_only": False, "allow_pickle": True, "shell": True}
INSIDE_SANDBOX = {"unison/rewards/code_driver.py": "compiles the tests of a function, one by one"}
"""Scripts that run in a sandbox only, and may do there what no module may -> why. No module imports them."""
BROAD = {"Exception", "BaseException"}
BROAD_HANDLERS = {
    "unison/checks/plugin_report.py:call": "the result of the check: shown as a problem",
    "unison/checkpoint/save.py:Saver._run": "kept, and raised as a CheckpointError by the next call",
    "unison/rewards/reasoning.py:reasoning_gym": "the answer is wrong; where the entry's own fails too, it raises",
    "unison/engine/client.py:InProcessClient._take_requests": "handed to whoever awaits that request",
    "unison/observability/sinks.py:MultiSink.close": "counted in num_failures and warned of",
    "unison/observability/sinks.py:MultiSink.log": "counted in num_failures and warned of",
    "unison/observability/trackers/background.py:BackgroundSink._finish": "warned of; the run is over by then",
    "unison/observability/trackers/background.py:BackgroundSink._log": "counted in num_failed and warned of",
    "unison/observability/trackers/background.py:BackgroundSink._open": "warned of; every step is counted as dropped",
    "unison/core/describe.py:text_of": "only replaces the text of an error that is counted all the same",
    "unison/processes/pool.py:_Place._open_first": "raised by whoever opens the pool",
    "unison/processes/pool.py:_Place.serve": "raised by whoever waits for that call",
    "unison/processes/worker.py:_answer": "the call's outcome, with the reason",
    "unison/processes/worker.py:main": "the reason why the pool cannot be opened, and raised there",
    "unison/rollout/functions.py:_Contained.__call__": "the sample fails, with the reason, and is counted",
    "unison/server/app.py:_endpoint.call": "logged under an id, and answered as a 500 that names it",
    "unison/server/desk.py:UpdateDesk._on_main.run": "raised in the thread that waits for it",
    "unison/server/engine_process.py:main": "printed, and the process ends; the next one is started",
    "unison/server/host.py:Host._step": "printed, told to the requests it cost, and a series of them ends the process",
    "unison/server/replies.py:answered": "printed, and told to whoever sent the command",
    "unison/server/streaming.py:EventStream._pump": "logged, and told to the client as the last event",
    "unison/rewards/combined.py:call": "the samples become unscorable, with the reason, and are counted",
}
"""file:function that may catch any Exception without raising again -> where the error is counted or shown."""


def dangers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    modules = module_aliases(tree)
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from imports_of(node)
        elif isinstance(node, ast.Call):
            yield from calls_of(node)
        elif isinstance(node, ast.ExceptHandler) and node.type is None:
            yield node.lineno, "bare except"
        if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load):
            yield from uses_of(node, modules, is_called=id(node) in called)


def module_aliases(tree: ast.AST) -> dict[str, str]:
    """Names in the file -> the modules they stand for."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found


def imports_of(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[int, str]]:
    modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
    for module in modules:
        if module.split(".")[0] in FORBIDDEN_MODULES or module in EVALUATING_MODULES:
            yield node.lineno, f"import of {module}"
    if isinstance(node, ast.ImportFrom):
        for alias in node.names:
            if (node.module, alias.name) in FORBIDDEN_CALLS or alias.name in EVALUATORS:
                yield node.lineno, f"import of {node.module}.{alias.name}"


def uses_of(node: ast.Name | ast.Attribute, modules: dict[str, str], *, is_called: bool) -> Iterator[tuple[int, str]]:
    """Forbidden functions, whether they are called, given another name, or handed on."""
    if isinstance(node, ast.Name):
        # A parameter or variable may be called compile; a call or another name for eval and exec may not.
        if node.id in FORBIDDEN_NAMES and (is_called or node.id in ("eval", "exec", "__import__")):
            yield node.lineno, f"{node.id} (the built-in)"
        return
    if node.attr in EVALUATORS:
        yield node.lineno, f".{node.attr}"
    path = ast.unparse(node.value)
    head, _, tail = path.partition(".")
    module = ".".join(part for part in (modules.get(head, head), tail) if part)
    if (module, node.attr) in FORBIDDEN_CALLS:
        yield node.lineno, f"{module}.{node.attr}"


def calls_of(node: ast.Call) -> Iterator[tuple[int, str]]:
    if isinstance(node.func, ast.Name) and node.func.id == "getattr" and len(node.args) > 1:
        wanted = node.args[1]
        if isinstance(wanted, ast.Constant) and wanted.value in EVALUATORS | FORBIDDEN_NAMES - {"eval", "compile"}:
            yield node.lineno, f"getattr of {wanted.value}"
    if "import_module" in ast.unparse(node.func) or ast.unparse(node.func).endswith("optional_module"):
        for argument in node.args[:1]:
            if isinstance(argument, ast.Constant) and str(argument.value).split(".")[0] in FORBIDDEN_MODULES:
                yield node.lineno, f"import of {argument.value}"
    for keyword in node.keywords:
        if keyword.arg in FORBIDDEN_KEYWORDS and not (
            isinstance(keyword.value, ast.Constant) and keyword.value.value is not FORBIDDEN_KEYWORDS[keyword.arg]
        ):
            yield node.lineno, f"{keyword.arg}={ast.unparse(keyword.value)}"
        if keyword.arg is None and isinstance(keyword.value, ast.Dict):
            keys = [key.value for key in keyword.value.keys if isinstance(key, ast.Constant)]
            for key in set(keys) & set(FORBIDDEN_KEYWORDS):
                yield node.lineno, f"{key} in a table of keywords"


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
    found = {
        f"{name(path)}:{line} {what}": f"{name(path)}:{what}"
        for path in python_files(*CODE_FOLDERS)
        if name(path) not in INSIDE_SANDBOX
        for line, what in dangers(parse(path))
    }
    assert not (wrong := [place for place, what in found.items() if what not in ALLOWED]), "\n".join(wrong)
    assert set(ALLOWED) <= set(found.values()), f"listed but gone: {sorted(set(ALLOWED) - set(found.values()))}"


def test_no_module_imports_a_script_of_the_sandbox() -> None:
    scripts = {Path(script).stem for script in INSIDE_SANDBOX}
    found = [
        f"{name(path)}:{node.lineno}"
        for path in python_files(*CODE_FOLDERS)
        for node in ast.walk(parse(path))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
        if scripts & {alias.name, *alias.name.split("."), *(getattr(node, "module", None) or "").split(".")}
    ]
    assert not found, found


def test_whoever_catches_every_exception_raises_or_counts_it() -> None:
    scanned = [path for path in python_files("unison") if name(path) not in INSIDE_SANDBOX]
    found = set().union(*map(broad_handlers, scanned))
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
        "run = eval",
        "table = {'run': exec}",
        "list(map(eval, texts))",
        "import builtins\nbuiltins.eval(text)",
        "import builtins as b\nb.exec(text)",
        "from builtins import eval as run",
        "import torch as t\nt.load(path)",
        "read = torch.load",
        "import yaml as y\ny.load(text)",
        "yaml.unsafe_load(text)",
        "from yaml import load",
        "import dill as d",
        "import sympy\nsympy.sympify(text)",
        "import sympy as s\ns.parse_expr(text)",
        "sympy.parsing.sympy_parser.parse_expr(text)",
        "from sympy import sympify as s",
        "from sympy.parsing.sympy_parser import standard_transformations",
        "import sympy.parsing.sympy_parser as p",
        "getattr(sympy, 'parse_expr')(text)",
        "getattr(builtins, 'exec')(text)",
        "socket.recv_pyobj()",
        "parse = socket.recv_pyobj",
        "importlib.import_module('pickle')",
        "optional_module('dill', 'dill')",
        "load(path, **{'trust_remote_code': True})",
    ],
)
def test_the_check_sees(line: str) -> None:
    assert list(dangers(ast.parse(line)))


@pytest.mark.parametrize(
    "line",
    [
        "model.eval()",
        "re.compile('x')",
        "load(path, trust_remote_code=False)",
        "yaml.safe_load(text)",
        "json.load(file)",
        "def run(compile: bool) -> bool:\n    return compile",
        "import sympy\nsympy.simplify(x)",
        "text = 'eval(1)'",
        "getattr(model, 'eval')()",
    ],
)
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
