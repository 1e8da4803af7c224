"""Plain use: commands, files, stdin, limits; many at once; and ends that come from outside."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.sandbox.jobs import left_alive, open_descriptors
from unison.core.errors import SandboxError
from unison.sandbox import bubblewrap, cgroup
from unison.sandbox.base import Sandbox, SandboxLimits, run_python
from unison.sandbox.seccomp import seccomp_program


def test_any_command_runs_with_files_and_stdin(sandbox: Sandbox) -> None:
    result = sandbox.run(
        ["/bin/sh", "-c", "cat; cat data/in.txt; pwd; echo oops >&2; exit 3"],
        files={"data/in.txt": b"from a file\n", "data/deep/x": b""},
        stdin=b"from stdin\n",
    )
    assert result.stdout == "from stdin\nfrom a file\n/tmp\n" and result.stderr == "oops\n"
    assert (result.outcome, result.exit_code, result.signal) == ("error", 3, None)
    assert result.bounded_by[0] == "rlimit" and result.wall_s > 0


def test_a_command_that_is_not_there_is_a_result(sandbox: Sandbox) -> None:
    result = sandbox.run(["/no/such/program"])
    assert (result.outcome, result.exit_code) == ("error", 127)


def test_much_input_is_read_whole_or_left(sandbox: Sandbox) -> None:
    many = b"x" * (5 << 20)
    assert run_python(sandbox, "import sys\nprint(len(sys.stdin.read()))", stdin=many).stdout == f"{len(many)}\n"
    assert run_python(sandbox, "print('no')", stdin=many).outcome == "ok"


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", "a//b", "", ".", "a/", "a\nb", "é", "a b"])
def test_file_names_stay_in_the_folder(sandbox: Sandbox, name: str) -> None:
    with pytest.raises(SandboxError, match="file name"):
        sandbox.run(["true"], files={name: b""})


@pytest.mark.parametrize("argv", [[], "true", ["a\0b"], ["\ud800"], [1]])
def test_commands_that_cannot_be_passed_are_refused(sandbox: Sandbox, argv: Any) -> None:
    with pytest.raises(SandboxError):
        sandbox.run(argv)


def test_what_is_too_large_for_the_folder_or_the_command_line_is_refused(sandbox: Sandbox) -> None:
    small = SandboxLimits(disk_bytes=4096, file_bytes=4096)
    with pytest.raises(SandboxError, match="file_bytes"):
        sandbox.run(["true"], files={"x": bytes(4097)}, limits=small)
    with pytest.raises(SandboxError, match="disk_bytes"):
        sandbox.run(["true"], files={"x": bytes(4096), "y": b"1"}, limits=small)
    with pytest.raises(SandboxError, match="cannot be started"):
        sandbox.run(["true", "x" * (1 << 20)])


@pytest.mark.parametrize(
    "wrong",
    [
        {"wall_s": 0},
        {"wall_s": float("nan")},
        {"wall_s": float("inf")},
        {"wall_s": 1e9},
        {"cpu_s": 1.5},
        {"processes": True},
        {"open_files": -1},
        {"memory_bytes": 1000},
        {"output_bytes": "1"},
    ],
)
def test_limits_that_cannot_be_meant_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(SandboxError, match=next(iter(wrong))):
        SandboxLimits(**wrong)


def test_many_at_once_do_not_mix(sandbox: Sandbox) -> None:
    descriptors = open_descriptors()

    def job(i: int) -> str:
        program = f"import os\nopen('mine', 'w').write('{i}')\nprint(os.listdir(), open('mine').read())"
        return run_python(sandbox, program, limits=SandboxLimits(processes=2)).stdout

    with ThreadPoolExecutor(8) as pool:
        shown = list(pool.map(job, range(40)))
    assert all(f" {i}\n" in text and "'mine'" in text for i, text in enumerate(shown))
    assert open_descriptors() == descriptors and left_alive() == []


def test_an_interrupt_leaves_nothing(sandbox: Sandbox) -> None:
    descriptors = open_descriptors()
    timer = threading.Timer(0.5, signal.raise_signal, [signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        run_python(sandbox, "while True: pass")
    timer.join()
    assert left_alive() == [] and open_descriptors() == descriptors


def test_an_error_of_ours_leaves_nothing(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    descriptors = open_descriptors()

    def breaks(self: object) -> None:
        raise OSError("broken")

    monkeypatch.setattr(bubblewrap.Supervisor, "watch", breaks)
    with pytest.raises(SandboxError, match="broken"):
        run_python(sandbox, "while True: pass")
    assert left_alive() == [] and open_descriptors() == descriptors


@pytest.mark.parametrize("delay_s", [0.0, 0.2])
def test_killing_the_caller_ends_the_sandbox(sandbox: Sandbox, delay_s: float) -> None:
    name = f"burn-{uuid.uuid4().hex}.py"
    script = (
        "from unison.sandbox.find import require_sandbox\nsandbox = require_sandbox()\n"
        f"sandbox.run([*sandbox.python, '{name}'], files={{'{name}': b'while True: pass'}})"
    )
    with subprocess.Popen([sys.executable, "-c", script]) as caller:
        assert _becomes(name, True, within_s=20)
        time.sleep(delay_s)
        caller.kill()
    assert _becomes(name, False, within_s=5)


def _becomes(name: str, wanted: bool, *, within_s: float) -> bool:
    """Whether a process comes to have, or no longer has, this name as its last argument."""
    give_up_s = time.monotonic() + within_s
    while time.monotonic() < give_up_s:
        lines = [_command_line(folder) for folder in Path("/proc").glob("[0-9]*")]
        if any(line.endswith(name.encode() + b"\0") for line in lines) == wanted:
            return True
        time.sleep(0.02)
    return False


def _command_line(folder: Path) -> bytes:
    try:
        return (folder / "cmdline").read_bytes()
    except OSError:
        return b""


def test_a_sandbox_that_cannot_be_set_up_is_no_result(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    original = bubblewrap.command

    def broken(*args: Any) -> list[str]:
        line = original(*args)
        return [*line[: line.index("--chdir")], "--ro-bind", "/no/such/folder", "/x", *line[line.index("--chdir") :]]

    monkeypatch.setattr(bubblewrap, "command", broken)
    with pytest.raises(SandboxError, match=r"could not be set up: .*/no/such/folder"):
        sandbox.run(["true"])


def test_starting_costs_under_50_ms(sandbox: Sandbox) -> None:
    def once(argv: list[str]) -> float:
        started_s = time.perf_counter()
        assert sandbox.run(argv).outcome == "ok"
        return time.perf_counter() - started_s

    # The quickest: the others also wait for whatever else runs on these cores.
    assert min(once(["/bin/true"]) for _ in range(15)) < 0.05


def test_unknown_processors_are_refused() -> None:
    with pytest.raises(SandboxError, match="riscv64"):
        seccomp_program("riscv64")
    assert len(seccomp_program("x86_64")) % 8 == 0 and seccomp_program("aarch64") != seccomp_program("x86_64")


def test_a_control_group_is_made_only_where_its_parent_hands_on_the_controllers(tmp_path: Path) -> None:
    """Against a folder that looks like a control group: the files written, and the folder's end."""
    here = tmp_path / "user.slice" / "app"
    here.mkdir(parents=True)
    own = tmp_path / "own"
    own.write_text("0::/user.slice/app\n")
    assert cgroup.find_parent(tmp_path, own) is None
    (here.parent / "cgroup.subtree_control").write_text("cpu memory pids\n")
    assert cgroup.find_parent(tmp_path, own) == here.parent
    own.write_text("9:name=systemd:/\n")
    assert cgroup.find_parent(tmp_path, own) is None
    # A plain folder has no memory.max: no group, no error, and nothing stays behind.
    with cgroup.cgroup(SandboxLimits(), here.parent) as group:
        assert group is None
    assert sorted(path.name for path in here.parent.iterdir()) == ["app", "cgroup.subtree_control"]


def test_a_control_group_tells_what_it_counted(tmp_path: Path) -> None:
    group = cgroup.Cgroup(tmp_path)
    assert group.peak_memory_bytes() is None and not group.was_out_of_memory()
    (tmp_path / "memory.peak").write_text("4096\n")
    (tmp_path / "memory.events").write_text("low 0\noom 2\noom_kill 1\n")
    (tmp_path / "cgroup.procs").write_text("")
    group.add(12)
    assert group.peak_memory_bytes() == 4096 and group.was_out_of_memory()
    assert (tmp_path / "cgroup.procs").read_text() == "12"
