"""Runs tests of a function against a program. Lives inside a sandbox only, as a script; no module imports it.

Two processes. The judge reads the job (nonce, program, tests) from its stdin to the end, makes itself unreadable for
others of its user, and starts the host. The host loads the program, which the judge never does, and answers calls.
Calls, answers and exceptions cross as JSON of plain values, so the tests see ints, strings, lists and the like, and
never an object or a name of the program's. The judge writes one line: the nonce, then the verdict.
"""

from __future__ import annotations

import ast
import builtins
import ctypes
import importlib.util
import json
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from typing import IO, Any

PROGRAM = "program.py"
MAX_ITEMS = 200_000
MAX_LINE_CHARS = 64_000_000
PR_SET_DUMPABLE = 4
RECURSION_LIMIT = 20_000
PLAIN = (types.NoneType, bool, str)


class UnusableTests(Exception):
    """The tests themselves are at fault."""


class ProgramError(Exception):
    """What the program raised where the type is none of Python's own."""


def encode(value: Any, budget: list[int]) -> Any:
    """A value as JSON. Subclasses become what they derive from. Raises TypeError for what is no plain data."""
    budget[0] -= 1
    if budget[0] < 0:
        raise ValueError(f"more than {MAX_ITEMS} items")
    if isinstance(value, PLAIN):
        return str(value) if isinstance(value, str) else value
    if isinstance(value, int):
        return {"int": hex(int(value))}
    if isinstance(value, float):
        return {"float": repr(float(value))}
    if isinstance(value, complex):
        return {"complex": repr(complex(value))}
    if isinstance(value, (bytes, bytearray)):
        return (
            {type(value).__name__: bytes(value).hex()} if type(value) in (bytes, bytearray) else {"bytes": value.hex()}
        )
    if isinstance(value, dict):
        return {"dict": [[encode(key, budget), encode(item, budget)] for key, item in value.items()]}
    if isinstance(value, range):
        return {"range": [hex(value.start), hex(value.stop), hex(value.step)]}
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [encode(item, budget) for item in value]}
    if isinstance(value, Iterator):
        return {"iterator": [encode(item, budget) for item in value]}
    raise TypeError(f"a {type(value).__name__} is no plain data")


def decode(value: Any) -> Any:
    """The value again, of exactly the built-in type. Raises any Exception for what ``encode`` never wrote."""
    if value is None or isinstance(value, (bool, str)):
        return value
    ((kind, body),) = value.items()
    match kind:
        case "int":
            return int(body, 16)
        case "float":
            return float(body)
        case "complex":
            return complex(body)
        case "bytes":
            return bytes.fromhex(body)
        case "bytearray":
            return bytearray.fromhex(body)
        case "range":
            return range(*(int(part, 16) for part in body))
        case "dict":
            return {decode(key): decode(item) for key, item in body}
        case "iterator":
            return iter([decode(item) for item in body])
    collections: dict[str, Callable[[Any], Any]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
    return collections[kind](decode(item) for item in body)


def send(file: IO[str], message: Any) -> None:
    file.write(json.dumps(message) + "\n")
    file.flush()


def host() -> None:
    """Load the program and answer calls, one JSON line each. The program's own prints go nowhere."""
    calls, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    spec = importlib.util.spec_from_file_location("program", PROGRAM)
    if spec is None or spec.loader is None:
        raise ImportError(PROGRAM)
    program = sys.modules["program"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    send(answers, [name for name, value in vars(program).items() if callable(value) and name.isidentifier()])
    for line in calls:
        name, arguments, options = json.loads(line)
        send(answers, answer(vars(program)[name], decode(arguments), decode(options)))


def answer(function: Callable[..., Any], arguments: list[Any], options: dict[str, Any]) -> dict[str, Any]:
    """What a call came to, with the arguments as they are after it."""
    try:
        value = function(*arguments, **options)
        budget = [MAX_ITEMS]
        return {"value": encode(value, budget), "arguments": encode(arguments, budget)}
    except BaseException as error:
        return {"error": type(error).__name__, "text": f"{error}"[:500]}


class Program:
    """The judge's side of the host. ``fault`` says what was wrong with a call that the tests made."""

    def __init__(self, source: str) -> None:
        with open(PROGRAM, "wb") as file:
            file.write(source.encode("utf-8", "surrogatepass"))
        self._host = subprocess.Popen(
            [sys.executable, "-I", "-B", "-X", "utf8", __file__, "host"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="ascii",
        )
        self.fault: str | None = None

    def names(self) -> set[str]:
        """Of its callables. Raises ProgramError where it does not load."""
        return {str(name) for name in self._receive()}

    def call(self, name: str, arguments: list[Any], options: dict[str, Any]) -> Any:
        try:
            message = [name, encode(arguments, budget := [MAX_ITEMS]), encode(options, budget)]
        except TypeError as error:
            self.fault = f"the tests call {name} with what cannot be passed to another process: {error}"
            raise
        try:
            send(self._host.stdin, message)  # type: ignore[arg-type]
        except OSError as error:
            raise ProgramError("the program has ended") from error
        reply = self._receive()
        if "error" in reply:
            raise exception_type(reply["error"])(reply["text"])
        for argument, after in zip(arguments, decode(reply["arguments"]), strict=True):
            update(argument, after)
        return decode(reply["value"])

    def _receive(self) -> Any:
        try:
            return json.loads(self._host.stdout.readline(MAX_LINE_CHARS))  # type: ignore[union-attr]
        except (ValueError, RecursionError) as error:
            raise ProgramError("the program has ended, or wrote nonsense") from error


def update(argument: Any, after: Any) -> None:
    """Let a change the function made in place be seen."""
    if type(argument) is not type(after) or argument == after:
        return
    if isinstance(argument, (list, bytearray)):
        argument[:] = after
    elif isinstance(argument, (dict, set)):
        argument.clear()
        argument.update(after)


def exception_type(name: object) -> type[Exception]:
    found = getattr(builtins, str(name), None)
    return found if isinstance(found, type) and issubclass(found, Exception) else ProgramError


def cases_of(tests: str, entry_point: str | None) -> list[tuple[ast.stmt, bool]]:
    """Top-level statements, each with whether it is a case: it holds an assert, or is the call of ``check``."""
    try:
        statements = ast.parse(tests).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UnusableTests(f"the tests are no Python: {error}") from error
    found = [(statement, is_case(statement)) for statement in statements]
    defines_check = any(
        isinstance(statement, ast.FunctionDef) and statement.name == "check" for statement in statements
    )
    calls_check = any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "check"
        for statement in statements
        if not isinstance(statement, ast.FunctionDef)
        for node in ast.walk(statement)
    )
    if defines_check and not calls_check:
        if entry_point is None:
            raise UnusableTests("the tests define check(candidate), and no entry_point names the candidate")
        found.append((ast.parse(f"check({entry_point})").body[0], True))
    if not any(case for _, case in found):
        raise UnusableTests("the tests hold neither a top-level assert nor check(candidate)")
    return found


def is_case(statement: ast.stmt) -> bool:
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return False
    calls_check = isinstance(statement, ast.Expr) and any(
        isinstance(node, ast.Name) and node.id == "check" for node in ast.walk(statement)
    )
    return calls_check or any(isinstance(node, ast.Assert) for node in ast.walk(statement))


def judge(program: Program, tests: str, entry_point: str | None) -> tuple[int, int]:
    """(passed, cases). After a statement that is no case has failed, nothing more can pass."""
    cases = cases_of(tests, entry_point)
    total = sum(case for _, case in cases)
    try:
        names = program.names()
    except ProgramError:
        return 0, total
    # A name of Python's own stays Python's, so that no program redefines `abs` or `all` for the tests.
    known = {name for name in names if not hasattr(builtins, name)} | ({entry_point} & names)
    space: dict[str, Any] = {"__name__": "tests", **{name: caller(program, name) for name in known if name}}
    passed = 0
    for statement, case in cases:
        try:
            exec(compile(ast.Module([statement], []), "tests", "exec"), space)
            passed += case
        except BaseException:
            if not case:
                break
    return passed, total


def caller(program: Program, name: str) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        return program.call(name, list(arguments), options)

    call.__name__ = name
    return call


def main() -> None:
    if ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0):
        sys.exit("this process cannot be closed to others")
    job = json.loads(sys.stdin.buffer.read())
    verdicts = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        # Judged before the program is started, so that unusable tests are no matter of the program.
        total = len(cases_of(job["tests"], job["entry_point"]))
        passed, fault = 0, None
        if job["program"] is not None:
            program = Program(job["program"])
            passed, total = judge(program, job["tests"], job["entry_point"])
            fault = program.fault
        verdict = {"passed": passed, "total": total, "fault": fault}
    except UnusableTests as error:
        verdict = {"passed": 0, "total": 0, "fault": str(error)}
    verdicts.write(f"\n{job['nonce']}{json.dumps(verdict)}\n")
    verdicts.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.setrecursionlimit(RECURSION_LIMIT)
    host() if sys.argv[1:] == ["host"] else main()
