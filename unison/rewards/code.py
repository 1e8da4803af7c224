"""Programs are run against tests, in a sandbox.

What a program can forge. Of input/output cases: nothing. The expected output never enters the sandbox; a program can
only print the right answer. Of function tests: it never shares a process with them. Tests run in a judge's process,
which reads them from a pipe before the program starts, is closed to other processes, and gets back plain values
(numbers, strings, lists, ...) and no object, so exits, prints, patched builtins, odd ``__eq__`` and a search of files
or of memory change no verdict. The verdict counts only behind a number drawn for this run, which the program never
sees. What remains: the arguments of a call are shown to it, so it can answer from a list of those it has learnt; and
a hole of the kernel or of the judge's JSON reader.
"""

from __future__ import annotations

import ast
import json
import re
import resource
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final

from unison.config.names import did_you_mean
from unison.core.errors import RewardError
from unison.rewards.options import check_choice, check_number, check_truth
from unison.sandbox.base import MAX_WALL_S, MIN_MEMORY_BYTES, PROGRAM, Sandbox, SandboxLimits, run_python
from unison.sandbox.find import require_sandbox

FENCES: Final = ("required", "optional")
MIB: Final = 1 << 20
MAX_PROGRAM_BYTES: Final = 8 * MIB
DEFAULT_WALL_S: Final = 5.0
DEFAULT_TOTAL_S: Final = 8.0
"""With the time a sandbox takes to end, within the deadline that a call has by default."""
DEFAULT_MEMORY_MIB: Final = 512
_END_S: Final = 1.0
_DISK_BYTES: Final = 32 * MIB
_LEAST_WALL_S: Final = 0.001
_FUNCTION_KEYS: Final = ("tests", "entry_point", "prefix")
_CASE_KEYS: Final = ("input", "output")
_OPENING: Final = re.compile(r"[ \t]*(`{3,}|~{3,})[ \t]*([\w+-]*)[^`\n]*")
_PYTHON: Final = ("python", "python3", "py")
_DRIVER: Final = Path(__file__).with_name("code_driver.py")


class CodeReward:
    """The reward function ``code_tests``."""

    name: Final = "code_tests"

    def check_options(
        self,
        *,
        partial: bool = True,
        fence: str = "required",
        wall_s: float = DEFAULT_WALL_S,
        total_s: float = DEFAULT_TOTAL_S,
        memory_mib: int = DEFAULT_MEMORY_MIB,
        output_mib: int = 4,
        allow_unsandboxed: bool = False,
    ) -> None:
        """Raise, before a run starts, what each call would: RewardError for options, SandboxError without a sandbox."""
        check_truth(partial=partial, allow_unsandboxed=allow_unsandboxed)
        limits = _limits(fence, wall_s, total_s, memory_mib, output_mib)
        _, own_limit = resource.getrlimit(resource.RLIMIT_AS)
        if 0 <= own_limit < limits.memory_bytes:
            raise RewardError(
                f"the reward code_tests has memory_mib={memory_mib}, but its own process may use {own_limit // MIB} "
                "MiB and can give a program no more; raise reward.memory_mb, or lower memory_mib"
            )
        _sandbox(allow_unsandboxed)

    def most_seconds(
        self, *, wall_s: float = DEFAULT_WALL_S, total_s: float = DEFAULT_TOTAL_S, **_: object
    ) -> tuple[float, str]:
        """The longest that a call takes, and the options that say so."""
        return max(total_s, wall_s) + _END_S, f"total_s={total_s:g} and wall_s={wall_s:g}"

    def __call__(
        self,
        text: str,
        label: object,
        *,
        partial: bool = True,
        fence: str = "required",
        wall_s: float = DEFAULT_WALL_S,
        total_s: float = DEFAULT_TOTAL_S,
        memory_mib: int = DEFAULT_MEMORY_MIB,
        output_mib: int = 4,
        allow_unsandboxed: bool = False,
    ) -> float:
        """The share of a label's test cases that the response's program passes.

        Without ``partial`` it is 1.0 for all of them, else 0.0.

        The program is the last fenced block marked ``python``, ``python3`` or ``py``, else the last without a mark.
        With ``fence = "required"`` a response without a closed block scores 0.0. With ``"optional"`` a block that is
        open at the end counts (where a stop string cuts off its end), and a text without any fence is a program.

        The label is one of

        - a text of top-level ``assert`` statements, each a case, with whatever setup between them;
        - ``{"tests": TEXT, "entry_point": NAME}`` with such a text, or one that defines ``check(candidate)``, which is
          one case; optional ``"prefix"``, code put before the program (imports and helpers the prompt has shown);
        - a list of ``{"input": TEXT, "output": TEXT}``: the program reads the input on stdin, must end with exit code
          0, and its stdout must equal the output but for whitespace at the ends of lines and empty lines at the end.

        Tests call the program's functions from another process: arguments and results are plain values. Classes and
        functions as arguments or results do not cross. Names of Python's builtins stay Python's, but for the entry
        point.

        ``wall_s`` and ``memory_mib`` hold for all tests of a function, or for each input/output case; ``total_s`` for
        all cases of a response together: those not run by then are not passed. A program that fails, hangs, is killed
        or cut off scores 0.0 for what it did not pass, and function tests that do not come to their end pass none.

        Raises RewardError where label or options are unusable, and SandboxError where code cannot be isolated here and
        ``allow_unsandboxed`` is not set: the sample is then unscorable.
        """
        limits = _limits(fence, wall_s, total_s, memory_mib, output_mib)
        tests, sandbox = _checked(label), _sandbox(allow_unsandboxed)
        program = extract_program(text, fence=fence)
        if program is None or len(program.encode("utf-8", "surrogatepass")) > MAX_PROGRAM_BYTES:
            if isinstance(tests, dict):
                _check_cases(tests["tests"], tests.get("entry_point"), limits, allow_unsandboxed)
            return 0.0
        if isinstance(tests, dict):
            share = _function_share(sandbox, program, tests, limits)
        else:
            share = _output_share(sandbox, program, tests, limits, total_s, stop_early=not partial)
        return share if partial else float(share == 1.0)


code_tests: Final = CodeReward()


def _limits(fence: str, wall_s: float, total_s: float, memory_mib: int, output_mib: int) -> SandboxLimits:
    """Raises RewardError or SandboxError for options that cannot be meant."""
    check_choice("fence", fence, FENCES)
    check_number("wall_s", wall_s, _LEAST_WALL_S, MAX_WALL_S)
    check_number("total_s", total_s, _LEAST_WALL_S, MAX_WALL_S)
    check_number("memory_mib", memory_mib, MIN_MEMORY_BYTES // MIB, MIB, whole=True)
    check_number("output_mib", output_mib, 1, MIB, whole=True)
    return SandboxLimits(
        wall_s=wall_s,
        cpu_s=max(1, round(wall_s)),
        memory_bytes=memory_mib * MIB,
        disk_bytes=_DISK_BYTES,
        file_bytes=_DISK_BYTES,
        output_bytes=output_mib * MIB,
        processes=16,
    )


def extract_program(text: str, *, fence: str = "required") -> str | None:
    """The program in a response, as ``code_tests`` says; None where there is none."""
    blocks, is_open = _blocks(text)
    if is_open and fence == "required":
        blocks.pop()
    if not blocks:
        return text if fence == "optional" and not is_open else None
    marked = [body for mark, body in blocks if mark.lower() in _PYTHON]
    plain = [body for mark, body in blocks if not mark]
    chosen = marked or plain
    return chosen[-1] if chosen else None


def same_output(got: str, wanted: str) -> bool:
    """Equal but for whitespace at the ends of lines and empty lines at the end."""
    return _lines(got) == _lines(wanted)


def _lines(text: str) -> list[str]:
    return "\n".join(line.rstrip() for line in text.split("\n")).rstrip("\n").split("\n")


def _blocks(text: str) -> tuple[list[tuple[str, str]], bool]:
    """(mark, body) of each fenced block, and whether the last one is open at the end."""
    blocks: list[tuple[str, str]] = []
    fence, mark, body = "", "", list[str]()
    for line in text.replace("\r\n", "\n").split("\n"):
        if not fence:
            opening = _OPENING.fullmatch(line)
            if opening:
                fence, mark, body = opening[1], opening[2], []
        elif line.strip().startswith(fence) and not line.strip().strip(fence[0]):
            blocks.append((mark, "\n".join(body) + "\n"))
            fence = ""
        else:
            body.append(line)
    if fence:
        blocks.append((mark, "\n".join(body) + "\n"))
    return blocks, bool(fence)


def _function_share(sandbox: Sandbox, program: str, tests: Mapping[str, str], limits: SandboxLimits) -> float:
    whole = tests.get("prefix", "") + "\n" + program
    return _judged(sandbox, whole, tests["tests"], tests.get("entry_point"), limits)


@lru_cache(maxsize=1024)
def _check_cases(tests: str, entry_point: str | None, limits: SandboxLimits, allow_unsandboxed: bool) -> None:
    """Raises RewardError where the tests hold no case: what the judge finds before it starts a program."""
    _judged(_sandbox(allow_unsandboxed), None, tests, entry_point, limits)


def _judged(sandbox: Sandbox, program: str | None, tests: str, entry_point: str | None, limits: SandboxLimits) -> float:
    """The share of the cases that pass; without a program the tests are looked at, and none passes."""
    nonce = secrets.token_hex(32)
    job = {"nonce": nonce, "program": program, "tests": tests, "entry_point": entry_point}
    result = sandbox.run(
        [*sandbox.python, PROGRAM],
        files={PROGRAM: _DRIVER.read_bytes()},
        stdin=json.dumps(job).encode("ascii"),
        limits=limits,
    )
    said = [line.removeprefix(nonce) for line in result.stdout.split("\n") if line.startswith(nonce)]
    if len(said) != 1:
        return 0.0
    verdict = json.loads(said[0])
    if verdict["fault"] is not None:
        raise RewardError(f"the label's tests are unusable: {verdict['fault']}")
    share: float = verdict["passed"] / verdict["total"]
    return share


def _output_share(
    sandbox: Sandbox,
    program: str,
    cases: Sequence[Mapping[str, str]],
    limits: SandboxLimits,
    total_s: float,
    *,
    stop_early: bool,
) -> float:
    passed, end_s = 0, time.monotonic() + total_s
    for case in cases:
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            break
        limits = replace(limits, wall_s=min(limits.wall_s, left_s))
        result = run_python(sandbox, program, stdin=case["input"].encode("utf-8", "surrogatepass"), limits=limits)
        if result.outcome == "ok" and same_output(result.stdout, case["output"]):
            passed += 1
        elif stop_early:
            break
    return passed / len(cases)


@cache
def _sandbox(allow_unsandboxed: bool) -> Sandbox:
    """Asked for once a process, so that a warning comes once a start."""
    return require_sandbox(allow_unsandboxed=allow_unsandboxed)


def _checked(label: object) -> dict[str, str] | list[dict[str, str]]:
    """A label in its full form. Raises RewardError where it is none."""
    if isinstance(label, str):
        label = {"tests": label}
    if isinstance(label, Mapping):
        return _checked_function(label)
    if isinstance(label, (list, tuple)) and label:
        return [_checked_case(case, i) for i, case in enumerate(label)]
    raise RewardError(
        f"the label is {label!r:.100}; code_tests needs a text of asserts, a table with tests and entry_point, or a "
        "list of cases with input and output"
    )


def _checked_function(label: Mapping[Any, Any]) -> dict[str, str]:
    _check_keys(label, _FUNCTION_KEYS, required=("tests",), what="the label")
    name = label.get("entry_point")
    if name is not None and not name.isidentifier():
        raise RewardError(f"the label's entry_point is {name!r:.100}, which is no name of a function")
    try:
        ast.parse(label["tests"])
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise RewardError(f"the label's tests are unusable: they are no Python: {error}") from error
    return dict(label)


def _checked_case(case: object, index: int) -> dict[str, str]:
    if not isinstance(case, Mapping):
        raise RewardError(f"case {index} of the label is {case!r:.100}; it must have input and output")
    _check_keys(case, _CASE_KEYS, required=_CASE_KEYS, what=f"case {index} of the label")
    return dict(case)


def _check_keys(table: Mapping[Any, Any], known: Sequence[str], *, required: Sequence[str], what: str) -> None:
    for key, value in table.items():
        if key not in known:
            raise RewardError(f"{what} has the key {key!r:.100}{did_you_mean(str(key), known)}")
        if not isinstance(value, str):
            raise RewardError(f"{what} has a {type(value).__name__} as {key}; it must be a text")
    missing = [key for key in required if key not in table]
    if missing:
        raise RewardError(f"{what} has no {missing[0]!r}")
