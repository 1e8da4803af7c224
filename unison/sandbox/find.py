"""Which sandbox this machine has, proven by one probe; without one, untrusted code is refused."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from functools import cache
from typing import Final

from unison.core.errors import SandboxError
from unison.observability.warn import Warn, warn_on_stderr
from unison.sandbox.base import Sandbox, SandboxLimits, run_python
from unison.sandbox.bubblewrap import Bubblewrap
from unison.sandbox.command import ENVIRONMENT, Tools
from unison.sandbox.plain import find_plain

INSTALL: Final = (
    "install bubblewrap 0.8 or newer and util-linux (Debian, Ubuntu: apt-get install bubblewrap util-linux)"
)
ENABLE: Final = (
    "user namespaces must be allowed: sysctl user.max_user_namespaces=15000, kernel.unprivileged_userns_clone=1 where "
    "it exists, kernel.apparmor_restrict_unprivileged_userns=0 on Ubuntu; in a container, start it with a seccomp "
    "profile that allows them, e.g. docker run --security-opt seccomp=unconfined --security-opt apparmor=unconfined "
    "--security-opt systempaths=unconfined"
)
OPT_IN: Final = "allow_unsandboxed=True runs it with your rights instead"

_PROBE_LIMITS: Final = SandboxLimits(wall_s=20.0, memory_bytes=256 << 20, disk_bytes=1 << 20, file_bytes=1 << 20)
_PROBE: Final = r"""
import json, os, socket, sys
def writable(folder):
    try:
        open(os.path.join(folder, "unison-probe"), "w").close()
    except OSError:
        return False
    return True
status = dict(line.split(":\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\t" in line)
print(json.dumps({
    "interfaces": [name for _, name in socket.if_nameindex()],
    "canary": os.path.exists(sys.stdin.read()),
    "environment": sorted(os.environ),
    "uid": os.getuid(),
    "capabilities": int(status["CapEff"], 16) | int(status["CapBnd"], 16),
    "no_new_privileges": status["NoNewPrivs"],
    "processes": sum(name.isdigit() for name in os.listdir("/proc")),
    "writable": [folder for folder in ("/", "/usr", "/usr/local", "/dev", "/root", os.getcwd()) if writable(folder)],
}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSandbox:
    """``sandbox`` is there, or ``reason`` says why not and ``fix`` what to do."""

    sandbox: Sandbox | None
    reason: str = ""
    fix: str = ""


def find_sandbox() -> FoundSandbox:
    """The sandbox of this machine, probed once for each set of programs on the PATH."""
    tools = {name: shutil.which(name) for name in ("bwrap", "prlimit", "setpriv")}
    missing = [name for name, path in tools.items() if path is None]
    if missing:
        return FoundSandbox(sandbox=None, reason=f"not on the PATH: {', '.join(missing)}", fix=INSTALL)
    return _probed(Tools(**{name: str(path) for name, path in tools.items()}), os.geteuid())


def require_sandbox(*, allow_unsandboxed: bool = False, warn: Warn = warn_on_stderr) -> Sandbox:
    """The sandbox. Raises SandboxError, with what to install or to enable, where there is none.

    With ``allow_unsandboxed`` untrusted code runs there with the rights of this process, under limits alone;
    each call says so through ``warn``.
    """
    found = find_sandbox()
    if found.sandbox is not None:
        return found.sandbox
    if not allow_unsandboxed:
        raise SandboxError(
            f"untrusted code is refused: it cannot be isolated here ({found.reason}). To mend it: {found.fix}. {OPT_IN}"
        )
    warn(f"untrusted code runs WITHOUT a sandbox, with all your rights ({found.reason}). To mend it: {found.fix}")
    return find_plain()


@cache
def _probed(tools: Tools, user: int) -> FoundSandbox:
    sandbox = Bubblewrap(tools)
    try:
        faults = _probe(sandbox)
    except SandboxError as error:
        outdated = "nknown option" in str(error)
        return FoundSandbox(sandbox=None, reason=str(error), fix=INSTALL if outdated else ENABLE)
    if faults:
        return FoundSandbox(sandbox=None, reason=f"the probe found {'; '.join(faults)}", fix="please report it")
    return FoundSandbox(sandbox=sandbox)


def _probe(sandbox: Bubblewrap) -> list[str]:
    """What a program inside can see or do that it must not. Raises SandboxError where nothing runs at all."""
    with tempfile.NamedTemporaryFile(prefix="unison-canary-") as canary:
        result = run_python(sandbox, _PROBE, stdin=os.fsencode(canary.name), limits=_PROBE_LIMITS)
    if result.outcome != "ok":
        raise SandboxError(f"the probe ended with {result.outcome}, {result.exit_code}: {result.stderr[-300:].strip()}")
    seen = json.loads(result.stdout)
    expected = {
        "interfaces": ["lo"],
        "canary": False,
        "no_new_privileges": "1",
        "capabilities": 0,
        "writable": ["/tmp"],
    }
    faults = [f"{name} = {seen[name]}" for name, value in expected.items() if seen[name] != value]
    faults += [f"variable {name}" for name in seen["environment"] if name not in (*ENVIRONMENT, "PWD", "LC_CTYPE")]
    if seen["uid"] == 0 or seen["processes"] > 3:
        faults.append(f"user {seen['uid']}, {seen['processes']} processes")
    return faults
