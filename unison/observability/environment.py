"""What machine and libraries a run had, as plain data. Loads none of the libraries it names."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import unison

LIBRARIES: Final = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "msgspec")
CPU_FLAGS: Final = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_tile", "bf16", "i8mm", "sve")
"""Instruction sets that decide which kernels run; the last three are ARM's."""
VARIABLES: Final = (
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "GOMP_SPINCOUNT",
    "MKL_NUM_THREADS",
    "MKL_CBWR",
    "ONEDNN_MAX_CPU_ISA",
    "TOKENIZERS_PARALLELISM",
)
"""The only environment variables that are recorded: others may hold secrets."""

_GIT_TIMEOUT_S: Final = 10


def describe_environment(numerics: Mapping[str, Any]) -> dict[str, Any]:
    """Everything a run's results may depend on beside its configuration. ``numerics`` is the caller's."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": {"model": cpu_model(), "flags": cpu_flags(), "cores": available_cores()},
        "libraries": {"unison": unison.__version__, **{name: library_version(name) for name in LIBRARIES}},
        "threads": torch_threads(),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "code": git_state(Path(__file__).parents[2]),
        "numerics": dict(numerics),
    }


def library_version(name: str) -> str | None:
    """The installed version, without importing the library; None where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_flags(cpuinfo: str | None = None) -> list[str]:
    """Those of ``CPU_FLAGS`` the processor has; empty where the system does not tell."""
    found = _cpuinfo_field(cpuinfo, ("flags", "Features"))
    return [flag for flag in CPU_FLAGS if flag in set(found.split())]


def cpu_model(cpuinfo: str | None = None) -> str:
    return _cpuinfo_field(cpuinfo, ("model name",)) or platform.processor() or platform.machine()


def available_cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def torch_threads() -> int | None:
    """Threads of torch, where it is loaded."""
    torch = sys.modules.get("torch")
    return None if torch is None else int(torch.get_num_threads())


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit of the repository whose top is ``folder`` and whether files differ; None where it is none."""
    top = _git(folder, "rev-parse", "--show-toplevel")
    commit = _git(folder, "rev-parse", "--verify", "HEAD")
    if top is None or commit is None or Path(top).resolve() != folder.resolve():
        return None
    return {"commit": commit, "dirty": bool(_git(folder, "status", "--porcelain"))}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _cpuinfo_field(cpuinfo: str | None, names: tuple[str, ...]) -> str:
    if cpuinfo is None:
        try:
            cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in names:
            return value.strip()
    return ""
