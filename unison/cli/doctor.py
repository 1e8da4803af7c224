"""``unison doctor``: one line for each thing that can be wrong or slow, with its fix."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from unison.cli.arguments import ArgumentParser
from unison.cli.findings import Finding, Status
from unison.cli.machine import (
    check_bfloat16,
    check_cores,
    check_disk,
    check_libraries,
    check_memory,
    check_python,
    check_terminal,
    check_wait_policy,
)

Check = Callable[[], Iterable[Finding]]

_COLORS: Final[dict[Status, str]] = {"ok": "\x1b[32m", "warn": "\x1b[33m", "fail": "\x1b[31m"}
_PLAIN: Final = "\x1b[0m"


def run(arguments: Sequence[str]) -> int:
    """Print the findings as they come; returns 1 where any says fail."""
    ArgumentParser("unison doctor", "Looks for what is wrong or slow on this machine.").parse(arguments)
    counts: dict[Status, int] = {"ok": 0, "warn": 0, "fail": 0}
    colored = sys.stdout.isatty()
    for check in CHECKS:
        for finding in _findings(check):
            counts[finding.status] += 1
            print(render(finding, colored=colored), flush=True)
    print(_verdict(counts))
    return 1 if counts["fail"] else 0


def render(finding: Finding, *, colored: bool = False) -> str:
    """``ok    memory        11.2 GiB free``, with the fix on a line below."""
    mark = f"{finding.status:<4}"
    if colored:
        mark = f"{_COLORS[finding.status]}{mark}{_PLAIN}"
    fix = f"\n{'':<22}fix: {finding.fix}" if finding.fix else ""
    return f"{mark}  {finding.name:<14}  {finding.text}{fix}"


def check_selftest() -> Iterator[Finding]:
    """Whether the operators are exact here, in each dtype."""
    try:
        from unison.ops.selftest import run_selftest
    except ImportError as error:
        yield Finding("fail", "self-test", f"cannot be run: {error}", "pip install --force-reinstall unison")
        return
    for dtype in ("float32", "bfloat16"):
        result = run_selftest(dtype)
        if result.passed:
            yield Finding("ok", "self-test", f"{dtype}: operators are exact here ({result.seconds:.1f} s)")
        else:
            yield Finding(
                "warn",
                "self-test",
                f"{dtype}: {len(result.failures)} operators are not exact here, e.g. {result.failures[0]}",
                f"nothing breaks: with model.numerics = auto, {dtype} runs fall back and measure the mismatch",
            )


def check_sandbox() -> Iterator[Finding]:
    """Whether rewards may run a model's code here."""
    from unison.sandbox.find import find_sandbox

    found = find_sandbox()
    if found.sandbox is not None:
        yield Finding("ok", "sandbox", "bubblewrap isolates here: rewards may run a model's code")
    else:
        yield Finding("warn", "sandbox", f"rewards that run a model's code are refused here: {found.reason}", found.fix)


CHECKS: Final[tuple[Check, ...]] = (
    check_python,
    check_libraries,
    check_cores,
    check_memory,
    check_disk,
    check_wait_policy,
    check_bfloat16,
    check_selftest,
    check_sandbox,
    check_terminal,
)


def _findings(check: Check) -> Iterator[Finding]:
    """The findings of a check; one that breaks is itself a finding, and the others still run."""
    try:
        yield from check()
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        name = getattr(check, "__name__", "check").removeprefix("check_")
        yield Finding("fail", name, f"the check itself broke: {type(error).__name__}: {error}", "please report it")


def _verdict(counts: dict[Status, int]) -> str:
    if counts["fail"]:
        return f"\n{counts['fail']} to mend before training, {counts['warn']} to look at."
    if counts["warn"]:
        return f"\nReady to train; {counts['warn']} to look at."
    return "\nAll well."
