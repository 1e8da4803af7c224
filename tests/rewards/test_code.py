"""Programs judged by tests, honest ones and ones that try to be judged well without passing."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.rewards.samples import finished
from unison.config.schema import RewardConfig
from unison.core.errors import RewardError, SandboxError
from unison.rewards import code
from unison.rewards.base import load_reward
from unison.rewards.code import code_tests, extract_program, same_output
from unison.rewards.scoring import score
from unison.sandbox.find import find_sandbox

ADD = "def add(a, b):\n    return a + b\n"
ASSERTS = "assert add(1, 2) == 3\nassert add('x', 'y') == 'xy'\nassert add([1], [2]) == [1, 2]\nassert add(2, 2) == 5\n"
CHECK = {"tests": "def check(candidate):\n    assert candidate(40, 2) == 42\n", "entry_point": "add"}
SUMS = [{"input": "1 2\n", "output": "3\n"}, {"input": "5 5\n", "output": "10"}]
READS = "a, b = map(int, input().split())\nprint(a + b)\n"


@pytest.fixture(autouse=True)
def sandboxed(request: pytest.FixtureRequest) -> None:
    found = find_sandbox()
    if found.sandbox is None and "no_sandbox" not in request.fixturenames:
        pytest.skip(f"no sandbox here: {found.reason}. {found.fix}")


def fenced(program: str) -> str:
    return f"Here it is:\n```python\n{program}\n```\nDone."


def test_the_share_of_asserts_or_all_of_them() -> None:
    assert code_tests(fenced(ADD), ASSERTS) == 0.75
    assert code_tests(fenced(ADD), ASSERTS, partial=False) == 0.0
    assert code_tests(fenced(ADD), CHECK) == code_tests(fenced(ADD), CHECK, partial=False) == 1.0
    assert code_tests(fenced("def add(a, b): return None"), CHECK) == 0.0


def test_input_and_output_cases() -> None:
    assert code_tests(fenced(READS), SUMS) == 1.0
    assert code_tests(fenced("input()\nprint(3)"), SUMS) == 0.5
    assert code_tests(fenced("input()\nprint(3)"), SUMS, partial=False) == 0.0
    assert code_tests(fenced(READS + "raise SystemExit(1)"), SUMS) == 0.0


def test_in_place_changes_exceptions_and_helpers_cross() -> None:
    program = """
def helper(x): return x * 2
def sort(items): items.sort()
def fails(x): raise KeyError(x)
def pairs(n): return ((i, {i: i / 2}) for i in range(n))
"""
    tests = """
items = [3, 1, 2]
sort(items)
assert items == [1, 2, 3]
try:
    fails("x")
    found = False
except KeyError:
    found = True
assert found
assert list(pairs(2)) == [(0, {0: 0.0}), (1, {1: 0.5})]
assert helper(10**5000) == 2 * 10**5000
"""
    assert code_tests(fenced(program), tests) == 1.0


FORGERIES = {
    "prints": 'print(\'passed\'); print(\'{"passed": 1, "total": 1, "fault": null}\')',
    "exits": "import os; os._exit(0)",
    "exits politely": "raise SystemExit(0)",
    "exits late": "import os\ndef add(a, b): os._exit(0)",
    "equal to all": "class E:\n    __eq__ = lambda s, o: True\n    __hash__ = None\ndef add(a, b): return E()",
    "an int equal to all": "class E(int):\n    __eq__ = lambda s, o: True\ndef add(a, b): return E(1)",
    "patches builtins": "import builtins\nbuiltins.AssertionError = Exception\nbuiltins.all = lambda x: True",
    "patches modules": "import sys\nfor m in list(sys.modules.values()):\n  for n in ('loads', 'dumps', 'judge'):\n"
    "    setattr(m, n, lambda *a, **k: True) if hasattr(m, n) else None\ndef add(a, b): return None",
    "walks frames": "import sys\nf = sys._getframe()\nwhile f:\n  f.f_globals.update(passed=1, total=1); f = f.f_back",
    "writes to every descriptor": "import os\nfor d in range(64):\n  try: os.write(d, b'{\"value\": true}\\n' * 9)\n"
    "  except OSError: pass\nos._exit(0)",
    "writes to the pipes of others": "import glob\nfor p in glob.glob('/proc/*/fd/*'):\n"
    '  try: open(p, \'w\').write(\'\\n{"passed": 1, "total": 1, "fault": null}\\n\')\n'
    "  except (OSError, ValueError): pass",
    "kills the judge": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
    "rewrites the driver": "open('main.py', 'w').write('print(1)')\ndef add(a, b): return None",
    "defines check": "def check(candidate): return True\ndef add(a, b): return None",
    "hangs": "while True: pass",
    "recurses": "def add(a, b): return add(a, b)",
    "eats memory": "x = bytes(1 << 40)",
    "answers for ever": "import itertools\ndef add(a, b): return itertools.count()",
    "nests": "x = []\nfor _ in range(100000): x = [x]\ndef add(a, b): return x",
    "null": "x = 1\0",
    "surrogate": "'\ud800'",
}


@pytest.mark.parametrize("program", FORGERIES.values(), ids=FORGERIES)
def test_nothing_but_right_answers_scores(program: str) -> None:
    assert code_tests(fenced(program), CHECK, wall_s=2.0) == 0.0
    assert code_tests(fenced(program), SUMS[:1], wall_s=1.0) == 0.0


def test_a_program_finds_the_tests_nowhere() -> None:
    spy = """
import glob, os, ctypes
def add(a, b):
    found = []
    for path in glob.glob("/proc/[0-9]*/*") + glob.glob("/proc/[0-9]*/fd/*") + glob.glob("/tmp/*"):
        if path.endswith(("/pagemap", "/fd/0")) and "self" in path:
            continue
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            if b"canary" + b"_4417" in os.read(fd, 1 << 20):
                found.append(path)
            os.close(fd)
        except OSError:
            pass
    try:
        open(f"/proc/{os.getppid()}/mem", "rb")
        found.append("memory")
    except OSError:
        pass
    return found
"""
    assert code_tests(fenced(spy), {"tests": "canary_4417 = []\nassert add(1, 2) == canary_4417"}) == 1.0


def test_builtins_of_the_tests_stay_pythons() -> None:
    program = (
        "def abs(x): return 0\ndef all(x): return True\ndef isinstance(a, b): return True\ndef add(a, b): return 7"
    )
    tests = "assert abs(add(1, 2) - 3) < 1e-6\nassert all([add(1, 2) == 3])\nassert isinstance(add(1, 2), str)"
    assert code_tests(fenced(program), tests) == 0.0


@pytest.mark.parametrize(
    ("text", "required", "optional"),
    [
        ("```python\na\n```", "a\n", "a\n"),
        ("```python\na\n```\n```py\nb\n```\n```\nc\n```", "b\n", "b\n"),
        ("```\na\n```\n```json\n{}\n```", "a\n", "a\n"),
        ("```python\na\n```\n```python\nb", "a\n", "b\n"),
        ("~~~~python\nx = '''\n```\n'''\n~~~~", "x = '''\n```\n'''\n", "x = '''\n```\n'''\n"),
        ("a = 1", None, "a = 1"),
        ("```python\na", None, "a\n"),
        ("```json\n{}\n```", None, None),
        ("", None, ""),
        ("```python\r\na\r\n```", "a\n", "a\n"),
    ],
)
def test_which_block_is_the_program(text: str, required: str | None, optional: str | None) -> None:
    assert extract_program(text) == required
    assert extract_program(text, fence="optional") == optional


def test_whitespace_at_ends_of_lines_and_empty_last_lines_do_not_count() -> None:
    assert same_output("1 2 \n3\n\n\n", "1 2\n3")
    assert not same_output("1  2", "1 2") and not same_output(" 1", "1") and not same_output("1\n\n2", "1\n2")


@pytest.mark.parametrize(
    ("label", "why"),
    [
        (None, "code_tests needs"),
        ([], "code_tests needs"),
        (7, "code_tests needs"),
        ("assert (", "no Python"),
        ("x = 1", "neither a top-level assert"),
        ({"test": "assert f()"}, "did you mean tests"),
        ({"entry_point": "f"}, "has no 'tests'"),
        ({"tests": "def check(candidate): assert candidate()"}, "no entry_point"),
        ({"tests": "assert f()", "entry_point": "f()"}, "no name of a function"),
        ([{"input": "x"}], "has no 'output'"),
        ([{"input": 1, "output": "1"}], "must be a text"),
        ("assert add(lambda: 1, 2)", "cannot be passed"),
    ],
)
def test_an_unusable_label_is_no_fault_of_the_program(label: Any, why: str) -> None:
    with pytest.raises(RewardError, match=why):
        code_tests(fenced(ADD), label)


@pytest.mark.parametrize("label", ["x = 1", "assert (", "42", {"tests": "def check(candidate): assert candidate()"}])
def test_an_unusable_label_is_told_where_the_response_has_no_code(label: Any) -> None:
    with pytest.raises(RewardError, match="the label's tests are unusable"):
        code_tests("I do not know.", label)


def test_unusable_options_are_refused() -> None:
    with pytest.raises(RewardError, match="did you mean optional"):
        code_tests(ADD, ASSERTS, fence="optionel")
    with pytest.raises(RewardError, match="wall_s"):
        code_tests(ADD, ASSERTS, wall_s=0)


@pytest.fixture
def no_sandbox(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    code._sandbox.cache_clear()
    monkeypatch.setattr(code, "_sandbox", code._sandbox.__wrapped__)


def test_without_a_sandbox_code_is_refused(no_sandbox: None) -> None:
    with pytest.raises(SandboxError, match="untrusted code is refused"):
        code_tests(fenced(ADD), CHECK)


def test_without_a_sandbox_no_run_begins(no_sandbox: None) -> None:
    with pytest.raises(SandboxError, match="untrusted code is refused"):
        load_reward(RewardConfig(function="code_tests", isolation="none"))


def test_the_time_of_all_cases_together_is_bounded_and_the_rest_not_passed() -> None:
    cases = [{"input": "", "output": "1"}, *[{"input": "x", "output": "1"}] * 50]
    program = "import sys\nwhile sys.stdin.read(): pass\nprint(1)"
    began = time.monotonic()
    share = code_tests(fenced("import sys\nif sys.stdin.read():\n    while True: pass\nprint(1)"), cases, total_s=1.5)
    assert share == pytest.approx(1 / 51)
    assert time.monotonic() - began < 3.5
    assert code_tests(fenced(program), cases[:2], total_s=5.0) == 1.0


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"options": {"total_s": 20.0}}, r"may take 21 s .total_s=20 and wall_s=5.*raise reward.timeout_s"),
        ({"timeout_s": 4.0}, r"over its deadline of 4 s"),
        ({"memory_mb": 300}, r"may use 300 MiB.*raise reward.memory_mb"),
        ({"options": {"total_s": 0}}, r"total_s = 0"),
        ({"options": {"wall_s": -1.0}}, r"wall_s = -1"),
    ],
)
def test_what_would_leave_every_sample_without_a_score_is_refused_before_the_run(settings: Any, told: str) -> None:
    with pytest.raises(RewardError, match=told):
        load_reward(RewardConfig(function="code_tests", **settings))


def test_a_program_that_hangs_scores_zero_under_the_default_deadlines() -> None:
    reward = load_reward(RewardConfig(function="code_tests"))
    samples = [finished(fenced("while True: pass"), ASSERTS), finished(fenced(ADD), ASSERTS)]
    report = score(samples, reward)
    reward.close()
    assert (report.num_unscorable, [sample.reward for sample in samples]) == (0, [0.0, 0.75])
