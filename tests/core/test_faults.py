from __future__ import annotations

import ast
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.hygiene.tree import REPO, name, parse, python_files
from unison.core.errors import ConfigError, FaultError
from unison.core.faults import EXIT_CODE, FAULT_POINTS, arm_faults, fault_point

POINT = "checkpoint.after_file"


@pytest.fixture(autouse=True)
def no_fault_stays_armed() -> Iterator[None]:
    arm_faults(None)
    yield
    arm_faults(None)


def points_in_the_package() -> dict[str, str]:
    found = {}
    for path in python_files("unison"):
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "fault_point":
                place = f"{name(path)}:{node.lineno}"
                argument = node.args[0]
                assert isinstance(argument, ast.Constant) and isinstance(argument.value, str), f"{place}: no plain name"
                found[argument.value] = place
    return found


def test_the_table_names_every_point_of_the_package_and_no_other() -> None:
    used = points_in_the_package()
    assert not {point: place for point, place in used.items() if point not in FAULT_POINTS}
    assert not FAULT_POINTS.keys() - used.keys(), "in the table, passed nowhere"


def test_a_point_does_nothing_unless_armed() -> None:
    fault_point(POINT)
    fault_point("a point that is not in the table")


def test_the_named_passing_of_the_named_point_raises() -> None:
    arm_faults(f"{POINT}:3:raise")
    for _ in range(2):
        fault_point(POINT)
    fault_point("checkpoint.before_file")
    with pytest.raises(FaultError, match=r"pass 3 of checkpoint.after_file"):
        fault_point(POINT)
    fault_point(POINT)


def test_several_faults_can_be_armed_and_sleep_takes_its_time() -> None:
    arm_faults(f"{POINT}:1:sleep=0.05, {POINT}:2:raise")
    start_s = time.perf_counter()
    fault_point(POINT)
    assert time.perf_counter() - start_s >= 0.05
    with pytest.raises(FaultError):
        fault_point(POINT)


def test_an_armed_process_refuses_points_that_are_not_in_the_table() -> None:
    arm_faults(f"{POINT}:9:raise")
    with pytest.raises(ConfigError, match=r"'checkpoint.unknown' is not in"):
        fault_point("checkpoint.unknown")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("x", "write NAME:PASS:ACTION"),
        (f"{POINT}:1", "write NAME:PASS:ACTION"),
        (f"{POINT}:1:kill:", "write NAME:PASS:ACTION"),
        (",", "write NAME:PASS:ACTION"),
        ("checkpoint.after_files:1:kill", "did you mean 'checkpoint.after_file'"),
        ("../x:1:kill", "there is no point"),
        (f"{POINT}:0:kill", "whole number from 1 on"),
        (f"{POINT}:-1:kill", "whole number from 1 on"),
        (f"{POINT}:²:kill", "whole number from 1 on"),
        (f"{POINT}:{'9' * 5000}:kill", "whole number from 1 on"),
        (f"{POINT}:1:explode", "must be kill, stop, exit, raise"),
        (f"{POINT}:1:kill=9", "must be kill, stop, exit, raise"),
        (f"{POINT}:1:sleep", "no number of seconds"),
        (f"{POINT}:1:sleep=nan", "no number of seconds"),
        (f"{POINT}:1:sleep=-1", "no number of seconds"),
        (f"{POINT}:1:sleep=1e300", "no number of seconds"),
    ],
)
def test_a_malformed_variable_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        arm_faults(text)
    fault_point(POINT)


@pytest.mark.parametrize(("action", "code"), [("kill", -signal.SIGKILL), ("exit", EXIT_CODE), ("raise", 1)])
def test_the_environment_arms_a_process(action: str, code: int) -> None:
    program = f"from unison.core.faults import fault_point\nfault_point({POINT!r})\nfault_point({POINT!r})"
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=REPO,
        env={"UNISON_FAULT": f"{POINT}:2:{action}", "PYTHONPATH": str(REPO)},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == code, result.stderr
