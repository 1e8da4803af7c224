"""No sandbox, no untrusted code: unless somebody asks for it, and is told each time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from unison.cli import doctor
from unison.core.errors import SandboxError
from unison.sandbox import find
from unison.sandbox.base import Sandbox, SandboxLimits, run_python
from unison.sandbox.find import find_sandbox, require_sandbox
from unison.sandbox.plain import find_plain


@pytest.fixture
def no_bwrap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A PATH on which prlimit is, and bwrap is not."""
    (tmp_path / "prlimit").symlink_to("/usr/bin/prlimit")
    monkeypatch.setenv("PATH", str(tmp_path))


def test_the_tests_of_this_folder_are_skipped_only_where_the_machine_has_no_sandbox() -> None:
    found = find_sandbox()
    if found.sandbox is None:
        pytest.skip(f"tests that need a sandbox are skipped on this machine: {found.reason}. {found.fix}")
    assert found.sandbox.isolated and not found.reason


def test_a_hidden_program_is_named_with_what_to_install(no_bwrap: None) -> None:
    with pytest.raises(SandboxError, match=r"refused.*not on the PATH: bwrap, setpriv.*apt-get install bubblewrap"):
        require_sandbox()
    (finding,) = doctor.check_sandbox()
    assert finding.status == "warn" and "bwrap" in finding.text and "apt-get install" in finding.fix


def test_forbidden_namespaces_are_named_with_what_to_enable(sandbox: Sandbox) -> None:
    """In a namespace that allows no further ones."""
    script = "from unison.sandbox.find import require_sandbox; require_sandbox()"
    closed = ["bwrap", "--unshare-user", "--disable-userns", "--dev-bind", "/", "/", "--chdir", os.getcwd(), "--"]
    result = subprocess.run([*closed, sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "SandboxError: untrusted code is refused" in result.stderr and "max_user_namespaces" in result.stderr


def test_a_kernel_that_denies_a_call_we_need_is_a_refusal(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(name: str) -> int:
        raise PermissionError("memfd_create is not allowed")

    monkeypatch.setattr(os, "memfd_create", denied)
    found = find._probed.__wrapped__(find.Tools("bwrap", "prlimit", "setpriv"), 0)
    assert found.sandbox is None and "memfd_create is not allowed" in found.reason and found.fix


def test_a_sandbox_that_does_not_isolate_is_not_used(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bwrap that only pretends: it runs the command as it is."""
    monkeypatch.setattr(find, "Bubblewrap", lambda tools: find_plain())
    found = find._probed.__wrapped__(find.Tools("bwrap", "prlimit", "setpriv"), 0)
    assert found.sandbox is None and "the probe found" in found.reason and "canary = True" in found.reason


def test_the_probe_runs_once(sandbox: Sandbox) -> None:
    started_s = time.monotonic()
    assert all(find_sandbox().sandbox is sandbox for _ in range(100))
    assert time.monotonic() - started_s < 0.2


def test_the_opt_in_warns_at_each_start_and_still_limits(no_bwrap: None) -> None:
    warnings: list[str] = []
    for _ in range(2):
        plain = require_sandbox(allow_unsandboxed=True, warn=warnings.append)
    assert len(warnings) == 2 and all("WITHOUT a sandbox" in warning for warning in warnings)
    assert not plain.isolated
    limits = SandboxLimits(wall_s=1.0, memory_bytes=128 << 20, output_bytes=1000)
    assert run_python(plain, "print(6 * 7)", limits=limits).stdout == "42\n"
    assert run_python(plain, "while True: print('x' * 1000)", limits=limits).outcome == "output"
    assert "MemoryError" in run_python(plain, "x = bytes(1 << 30)", limits=limits).stderr
    late = run_python(plain, "import os, time\nos.fork()\ntime.sleep(60)", limits=limits)
    assert late.outcome == "timeout" and late.wall_s < 2
    folder = run_python(plain, "import os\nopen('x', 'w').close()\nprint(os.getcwd())", limits=limits).stdout.strip()
    assert "unison-" in folder and not Path(folder).exists()


def test_where_there_is_a_sandbox_the_opt_in_changes_nothing(sandbox: Sandbox) -> None:
    warnings: list[str] = []
    assert require_sandbox(allow_unsandboxed=True, warn=warnings.append) is sandbox
    assert not warnings


def test_without_prlimit_not_even_the_opt_in_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match="util-linux"):
        require_sandbox(allow_unsandboxed=True, warn=lambda message: None)


def test_the_sandbox_loads_no_tensor_library() -> None:
    program = "import sys, unison.sandbox.find, unison.rewards.code; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
