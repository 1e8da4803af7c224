"""Programs that try to get out, to look out, to stay, or to take more than they are given."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sandbox.jobs import MIB, TIGHT, attack
from unison.sandbox.base import Sandbox, SandboxLimits


@pytest.fixture
def canary(tmp_path: Path) -> Iterator[Path]:
    """A file of the host that must be neither seen nor changed."""
    path = tmp_path / "canary.txt"
    path.write_text("secret of the host")
    yield path
    assert path.read_text() == "secret of the host"
    assert list(tmp_path.iterdir()) == [path]


@pytest.fixture
def listener() -> Iterator[int]:
    """A port on loopback that must get no connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]
        server.settimeout(0.05)
        with pytest.raises(TimeoutError):
            server.accept()


def test_files_of_the_host_are_not_there(sandbox: Sandbox, canary: Path) -> None:
    paths = [str(canary), str(Path.home()), str(Path.cwd()), __file__, "/etc/passwd", "/etc/shadow", "/sys", "/run"]
    program = f"""
import os
for path in {paths!r}:
    found = os.listdir(path) if os.path.isdir(path) else os.path.exists(path)
    print(path, found if found not in ([".pyenv"], [".local"]) else False)
"""
    result = attack(sandbox, program)
    assert result.outcome == "ok" and result.stdout.count("False") == 8, result.stdout


def test_the_environment_is_not_there(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "canary-7781")
    program = """
import os, glob
print(sorted(os.environ))
for path in glob.glob("/proc/*/environ") + glob.glob("/proc/*/cmdline"):
    try:
        print(open(path).read())
    except OSError:
        pass
"""
    result = attack(sandbox, program)
    assert result.outcome == "ok" and "canary-7781" not in result.stdout
    assert result.stdout.splitlines()[0] in ("['HOME', 'LANG', 'PATH', 'PWD', 'TMPDIR']",)


def test_no_connection_leaves(sandbox: Sandbox, listener: int) -> None:
    program = f"""
import socket
print([name for _, name in socket.if_nameindex()])
for family, address in ((socket.AF_INET, ("127.0.0.1", {listener})), (socket.AF_INET, ("192.0.2.1", 80)),
                        (socket.AF_INET6, ("::1", {listener})), (socket.AF_UNIX, "/run/docker.sock")):
    try:
        socket.socket(family).connect(address)
        print("connected")
    except OSError as error:
        print(type(error).__name__)
for family in (40, 38, 17, 31):
    try:
        socket.socket(family, socket.SOCK_RAW if family == 17 else socket.SOCK_STREAM)
        print("socket", family)
    except OSError as error:
        print("denied")
"""
    result = attack(sandbox, program)
    assert result.stdout.splitlines()[0] == "['lo']"
    assert "connected" not in result.stdout and "socket" not in result.stdout and result.stdout.count("denied") == 4


def test_nothing_can_be_written_but_the_working_folder(sandbox: Sandbox, canary: Path) -> None:
    program = f"""
import os, sys
for folder in ("/", "/usr", "/usr/local", "/usr/bin", "/dev", "/etc", "/proc", "/proc/sys/kernel", "/root",
               os.path.dirname(sys.executable), os.path.dirname(os.__file__), {str(canary.parent)!r}, "/tmp"):
    try:
        open(folder + "/x", "w").write("x")
        print("written", folder)
    except OSError:
        pass
"""
    assert attack(sandbox, program).stdout == "written /tmp\n"


def test_links_lead_nowhere(sandbox: Sandbox, canary: Path) -> None:
    program = f"""
import os
os.symlink({str(canary)!r}, "link")
os.symlink("/proc/1/root" + {str(canary)!r}, "init")
canary = {str(canary)!r}
for path in ("link", "init", "/proc/self/root" + canary, "/proc/1/cwd" + canary, "../" * 9 + "etc/passwd"):
    try:
        print("read", open(path).read())
    except OSError:
        pass
try:
    open("link", "w").write("changed")
except OSError:
    print("not written")
"""
    assert attack(sandbox, program).stdout == "not written\n"


def test_no_descriptor_of_ours_is_open_inside(sandbox: Sandbox) -> None:
    program = """
import os
for process in ("self", "1"):
    for fd in sorted(os.listdir(f"/proc/{process}/fd"), key=int):
        try:
            print(process, fd, os.readlink(f"/proc/{process}/fd/{fd}").split(":")[0])
        except OSError:
            pass
"""
    lines = attack(sandbox, program).stdout.splitlines()
    assert [line for line in lines if line.startswith("self")] == [f"self {fd} pipe" for fd in range(3)]
    assert {line.split()[2] for line in lines if line.startswith("1")} <= {"pipe", "anon_inode"}


@pytest.mark.parametrize(
    "bomb",
    [
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        "import os, sys\nwhile os.fork() or not os.execv(sys.executable, [sys.executable, 'main.py']): pass",
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(60,)).start()",
    ],
    ids=["fork", "exec", "threads"],
)
def test_a_bomb_stays_within_its_count(sandbox: Sandbox, bomb: str) -> None:
    counts: list[int] = []
    done = threading.Event()

    def count() -> None:
        while not done.wait(0.05):
            counts.append(sum(name.isdigit() for name in os.listdir("/proc")))

    before = sum(name.isdigit() for name in os.listdir("/proc"))
    counting = threading.Thread(target=count)
    counting.start()
    try:
        result = attack(sandbox, bomb, limits=SandboxLimits(wall_s=1.5, processes=16))
    finally:
        done.set()
        counting.join()
    assert result.outcome in ("timeout", "error", "memory")
    assert max(counts) - before < 16 + 40  # other programs of this machine come and go


def test_the_number_of_processes_is_the_limit(sandbox: Sandbox) -> None:
    program = """
import os, time
n = 1
try:
    while os.fork():
        n += 1
    time.sleep(60)
except OSError:
    print(n)
"""
    assert attack(sandbox, program, limits=SandboxLimits(processes=7)).stdout == "7\n"


def test_two_gibibytes_are_not_given(sandbox: Sandbox) -> None:
    result = attack(sandbox, "x = b'x' * (2 << 30)")
    assert result.outcome == "error" and "MemoryError" in result.stderr
    assert (result.peak_memory_bytes or 0) < TIGHT.memory_bytes


def test_many_processes_together_are_held_to_the_memory_limit(sandbox: Sandbox) -> None:
    program = """
import os, time
for _ in range(3):
    os.fork()
kept = bytearray(128 << 20)
for i in range(0, len(kept), 4096):
    kept[i] = 1
time.sleep(60)
"""
    assert attack(sandbox, program).outcome == "memory"


@pytest.mark.parametrize(
    "call",
    [
        "os.memfd_create('x')",
        "check(libc.shmget(0, 1 << 28, 0o1600))",
        "check(libc.msgget(0, 0o1600))",
        "check(libc.unshare(0x10000000))",
        "check(libc.unshare(0x00020000))",
        "check(libc.ptrace(16, 1, 0, 0))",
        "check(libc.mount(b'none', b'/tmp', b'tmpfs', 0, None))",
        "check(libc.syscall(keyctl, 0, -3, 0))",
        "check(libc.setuid(0))",
        "check(libc.chroot(b'/tmp'))",
        "os.mknod('disk', 0o660 | 0o060000, os.makedev(254, 0))",
        "resource.setrlimit(resource.RLIMIT_NPROC, (9999, 9999))",
        "os.setpriority(os.PRIO_PROCESS, 0, -20)",
    ],
)
def test_calls_round_the_limits_are_denied(sandbox: Sandbox, call: str) -> None:
    program = f"""
import ctypes, os, platform, resource
libc = ctypes.CDLL(None, use_errno=True)
keyctl = 250 if platform.machine() == "x86_64" else 219
def check(code):
    if code < 0:
        raise OSError(ctypes.get_errno(), "denied")
try:
    {call}
    print("done")
except (OSError, ValueError) as error:
    print("denied")
"""
    assert attack(sandbox, program).stdout == "denied\n"


def test_the_disk_does_not_fill(sandbox: Sandbox) -> None:
    program = """
for i in range(100):
    try:
        open(f"f{i}", "wb").write(bytes(1 << 20))
    except OSError as error:
        print(i, error.errno)
        break
try:
    open("/dev/shm/x", "wb").write(bytes(4 << 20))
except OSError as error:
    print(error.errno)
"""
    full, shared = attack(sandbox, program).stdout.splitlines()
    assert full in ("7 28", "8 28") and shared == "28"


def test_a_million_empty_files_end_the_program(sandbox: Sandbox) -> None:
    assert attack(sandbox, "for i in range(1000000): open(f'f{i}', 'w').close()").outcome == "files"


@pytest.mark.parametrize("fd", [1, 2])
def test_a_gigabyte_of_output_is_cut_and_not_kept(sandbox: Sandbox, fd: int) -> None:
    limits = SandboxLimits(wall_s=5, output_bytes=100_000)
    program = f"import os\nfor _ in range(1 << 14): os.write({fd}, b'x' * 65536)"
    result = attack(sandbox, program, limits=limits)
    assert result.outcome == "output" and result.wall_s < 1
    assert len(result.stdout) + len(result.stderr) == 100_000
    assert (result.stdout_truncated, result.stderr_truncated) == (fd == 1, fd == 2)


def test_output_of_just_the_limit_is_kept_whole(sandbox: Sandbox) -> None:
    result = attack(sandbox, "print('x' * 999)", limits=SandboxLimits(output_bytes=1000))
    assert result.outcome == "ok" and len(result.stdout) == 1000 and not result.stdout_truncated


def test_a_daemon_does_not_stay(sandbox: Sandbox) -> None:
    program = """
import os, time, signal
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in (1, 2, 13, 15):
            signal.signal(number, signal.SIG_IGN)
        while True:
            time.sleep(1)
    os._exit(0)
print("parent done")
"""
    result = attack(sandbox, program)
    assert result.outcome == "ok" and result.stdout == "parent done\n" and result.wall_s < 1


def test_signals_reach_nobody_else(sandbox: Sandbox) -> None:
    program = f"""
import os, signal
for pid in (1, os.getppid(), {os.getpid()}, {os.getppid()}, -1):
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError as error:
        print(type(error).__name__)
print("still here")
"""
    result = attack(sandbox, program)
    assert result.stdout.endswith("still here\n")


@pytest.mark.parametrize(
    "program",
    [
        "import signal, time\nfor n in (1, 2, 3, 15): signal.signal(n, signal.SIG_IGN)\nwhile True: time.sleep(1)",
        "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
        "import os\nos.close(0); os.close(1); os.close(2)\nwhile True: pass",
        "import re\nre.match('(a+)+b', 'a' * 60)",
    ],
    ids=["deaf", "stopped", "closed", "regex"],
)
def test_a_program_that_goes_on_is_ended_at_the_deadline(sandbox: Sandbox, program: str) -> None:
    result = attack(sandbox, program, limits=SandboxLimits(wall_s=1.0))
    assert result.outcome == "timeout" and result.exit_code is None and result.signal == 9
    assert 1.0 <= result.wall_s < 2.0


def test_cpu_time_is_limited_apart_from_wall_time(sandbox: Sandbox) -> None:
    result = attack(sandbox, "while True: pass", limits=SandboxLimits(wall_s=10.0, cpu_s=1))
    assert result.outcome == "timeout" and 0.8 < result.cpu_s < 2.2


def test_deep_recursion_ends_only_its_own_process(sandbox: Sandbox) -> None:
    program = """
import sys
sys.setrecursionlimit(10**9)
class Deep:
    def __repr__(self):
        return repr(self)
repr(Deep())
"""
    result = attack(sandbox, program)
    assert result.outcome in ("killed", "error", "timeout", "memory")


def test_a_killed_program_says_by_which_signal(sandbox: Sandbox) -> None:
    result = attack(sandbox, "import os\nos.abort()")
    assert (result.outcome, result.signal, result.exit_code) == ("killed", 6, None)


def test_no_package_of_the_host_can_be_imported(sandbox: Sandbox) -> None:
    program = """
import importlib
for name in ("unison", "torch", "numpy", "pip", "tests", "conftest"):
    try:
        importlib.import_module(name)
        print(name)
    except ImportError:
        pass
"""
    result = attack(sandbox, program)
    assert (result.outcome, result.stdout) == ("ok", "")


@pytest.mark.parametrize(
    ("program", "outcome"),
    [
        ("print(1)\0", "error"),
        ("print('\ud800')", "error"),
        (b"\xff\xfe\x00", "error"),
        ("", "ok"),
        ("x = '" + "a" * (7 * MIB) + "'", "ok"),
        ("(" * 5000 + ")" * 5000, "error"),
        ("\ufeffprint(1)\r\n", "ok"),
    ],
    ids=["null", "surrogate", "bytes", "empty", "long", "nested", "bom"],
)
def test_odd_program_texts_are_results(sandbox: Sandbox, program: str | bytes, outcome: str) -> None:
    assert attack(sandbox, program).outcome == outcome


def test_binary_output_becomes_readable_text(sandbox: Sandbox) -> None:
    result = attack(sandbox, "import os\nos.write(1, b'ok \\xc3\\xa9 \\xff\\x00')")
    assert result.stdout == "ok é \\xff\x00"
