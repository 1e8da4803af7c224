"""The machine as a run meets it: versions, cores, memory, disk, instructions, terminal. Loads no torch."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import unison
from unison.cli.findings import Finding
from unison.observability.environment import available_cores, cpu_flags, cpu_model, library_version

GIB: Final = 1 << 30
MIN_PYTHON: Final = (3, 11)
ESSENTIAL: Final = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "msgspec", "jinja2")
OPTIONAL: Final = {
    "gguf": "short model names like smollm2-135m",
    "matplotlib": "plot.png",
    "rich": "the progress bar",
}
WANTED_MEMORY_BYTES: Final = 6 * GIB
LEAST_MEMORY_BYTES: Final = 1 * GIB
WANTED_DISK_BYTES: Final = 2 * GIB
LEAST_DISK_BYTES: Final = GIB // 4
MIN_COLUMNS: Final = 128

_CGROUP: Final = Path("/sys/fs/cgroup")


def check_python() -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info >= MIN_PYTHON:
        yield Finding("ok", "python", version)
    else:
        wanted = ".".join(map(str, MIN_PYTHON))
        yield Finding("fail", "python", f"{version} is too old", f"install Python {wanted} or newer")


def check_libraries() -> Iterator[Finding]:
    found = {"unison": unison.__version__, **{name: library_version(name) for name in ESSENTIAL}}
    there = ", ".join(f"{name} {version}" for name, version in found.items() if version)
    yield Finding("ok", "libraries", there)
    for name in ESSENTIAL:
        if found[name] is None:
            yield Finding("fail", name, "is not installed", f"pip install {name}")
    for name, use in OPTIONAL.items():
        version = library_version(name)
        if version:
            yield Finding("ok", "optional", f"{name} {version}: {use}")
        else:
            yield Finding("warn", "optional", f"{name} is not installed: no {use}", f"pip install {name}")


def check_cores() -> Iterator[Finding]:
    cores, quota = available_cores(), cpu_quota()
    text = f"{cores} for this process, {cpu_model()}"
    if quota is not None and quota < cores:
        yield Finding(
            "warn",
            "cores",
            f"{text}; but the container may use only {quota:g} of them at a time",
            f"--run.threads {max(1, int(quota))}",
        )
    else:
        yield Finding("ok", "cores", text)


def check_memory() -> Iterator[Finding]:
    free = available_memory_bytes()
    if free is None:
        yield Finding("ok", "memory", "this system does not tell how much is free")
    elif free < LEAST_MEMORY_BYTES:
        yield Finding("fail", "memory", f"{_gib(free)} free", "close other programs: no model fits")
    elif free < WANTED_MEMORY_BYTES:
        yield Finding(
            "warn",
            "memory",
            f"{_gib(free)} free",
            f"training smollm2-135m takes up to {_gib(WANTED_MEMORY_BYTES)}: close other programs, or lower "
            "engine.kv_tokens and trainer.micro_batch_tokens",
        )
    else:
        yield Finding("ok", "memory", f"{_gib(free)} free")


def check_disk() -> Iterator[Finding]:
    from unison.models.sources import cache_dir

    for name, path, fix in (
        ("cache", cache_dir(), "set UNISON_CACHE to a folder with room"),
        ("temporary", Path(tempfile.gettempdir()), "set TMPDIR to a folder with room"),
        ("run folder", Path.cwd(), "start where there is room, or give --run.dir"),
    ):
        yield disk_finding(name, path, fix)


def disk_finding(name: str, path: Path, fix: str) -> Finding:
    """Room and permission at ``path``, or at the nearest folder above that exists."""
    folder = next(parent for parent in (path, *path.parents) if parent.exists())
    if not os.access(folder, os.W_OK):
        return Finding("fail", name, f"{path} cannot be written", fix)
    free = shutil.disk_usage(folder).free
    text = f"{_gib(free)} free at {path}"
    if free < LEAST_DISK_BYTES:
        return Finding("fail", name, text, fix)
    return Finding("warn", name, text, fix) if free < WANTED_DISK_BYTES else Finding("ok", name, text)


def check_wait_policy() -> Iterator[Finding]:
    policy = os.environ.get("OMP_WAIT_POLICY", "")
    if policy.upper() == "PASSIVE":
        spin = f", GOMP_SPINCOUNT={os.environ['GOMP_SPINCOUNT']}" if "GOMP_SPINCOUNT" in os.environ else ""
        yield Finding("ok", "OpenMP", f"OMP_WAIT_POLICY=PASSIVE{spin}: idle threads soon sleep")
    else:
        yield Finding(
            "warn",
            "OpenMP",
            f"OMP_WAIT_POLICY={policy or '(unset)'}: idle threads spin, which slows processes that share cores",
            "unset OMP_WAIT_POLICY, and unison sets PASSIVE",
        )


def check_bfloat16(flags: list[str] | None = None) -> Iterator[Finding]:
    found = [flag for flag in (cpu_flags() if flags is None else flags) if "bf16" in flag]
    if found:
        yield Finding("ok", "bfloat16", f"instructions: {', '.join(found)}")
    else:
        yield Finding(
            "warn",
            "bfloat16",
            "this processor has no instructions for it",
            "nothing breaks: model.dtype = auto takes float32 here, which needs twice the memory",
        )


def check_terminal() -> Iterator[Finding]:
    encoding = (sys.stdout.encoding or "").lower().replace("-", "")
    if encoding != "utf8":
        yield Finding("warn", "terminal", f"encoding is {sys.stdout.encoding}", "set LANG=C.UTF-8")
    if not sys.stdout.isatty():
        yield Finding("ok", "terminal", "output is not a terminal: no progress bar")
        return
    columns = shutil.get_terminal_size().columns
    if columns < MIN_COLUMNS:
        yield Finding("warn", "terminal", f"{columns} columns", f"widen it to {MIN_COLUMNS}, or step lines wrap")
    else:
        yield Finding("ok", "terminal", f"{columns} columns")


def available_memory_bytes(meminfo: str | None = None, cgroup: Path = _CGROUP) -> int | None:
    """Free memory of the machine, or of the container where that is less; None where nothing tells."""
    if meminfo is None:
        meminfo = _read(Path("/proc/meminfo"))
    free = next(
        (int(line.split()[1]) * 1024 for line in meminfo.splitlines() if line.startswith("MemAvailable:")), None
    )
    limit, used = _read(cgroup / "memory.max").strip(), _read(cgroup / "memory.current").strip()
    if limit.isdigit() and used.isdigit():
        room = max(0, int(limit) - int(used))
        return room if free is None else min(free, room)
    return free


def cpu_quota(cgroup: Path = _CGROUP) -> float | None:
    """Cores a container may use at a time; None where it is not limited."""
    quota, _, period = _read(cgroup / "cpu.max").strip().partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
