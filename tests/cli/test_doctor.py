from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from unison.cli import doctor, machine
from unison.cli.findings import Finding
from unison.cli.main import main

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def selftest(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Failures by dtype that a fake self-test reports."""
    failures: dict[str, list[str]] = {"float32": [], "bfloat16": []}
    module = ModuleType("unison.ops.selftest")
    module.run_selftest = lambda dtype: SimpleNamespace(  # type: ignore[attr-defined]
        passed=not failures[dtype], failures=failures[dtype], seconds=0.5
    )
    monkeypatch.setitem(sys.modules, "unison.ops.selftest", module)
    return failures


def test_every_line_is_judged_and_bad_ones_have_a_fix(selftest: dict[str, list[str]], capsys: Capture) -> None:
    assert main(["doctor"]) in (0, 1)
    lines = capsys.readouterr().out.splitlines()
    judged = [line for line in lines[:-2] if not line.startswith(" ")]
    assert all(line.startswith(("ok    ", "warn  ", "fail  ")) for line in judged)
    for line, below in pairwise(lines):
        assert line.startswith(("warn", "fail")) == below.strip().startswith("fix: ")
    text = "\n".join(lines)
    for name in ("python", "libraries", "cores", "memory", "cache", "temporary", "OpenMP", "bfloat16", "self-test"):
        assert f"  {name} " in text
    assert "float32: operators are exact here (0.5 s)" in text


def test_a_failed_selftest_is_a_warning_with_its_reason(selftest: dict[str, list[str]]) -> None:
    selftest["bfloat16"] = ["linear 1x2: 3 of 8 rows", "rope"]
    found = list(doctor.check_selftest())
    assert [finding.status for finding in found] == ["ok", "warn"]
    assert "2 operators are not exact here, e.g. linear 1x2" in found[1].text and "fall back" in found[1].fix


def test_a_missing_selftest_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "unison.ops.selftest", None)
    (finding,) = doctor.check_selftest()
    assert finding.status == "fail" and "cannot be run" in finding.text


def test_a_failure_sets_the_exit_code_and_a_broken_check_stops_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def check_odd() -> Iterator[Finding]:
        yield Finding("ok", "first", "fine")
        raise OSError("gone")

    monkeypatch.setattr(doctor, "CHECKS", (check_odd, machine.check_python))
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "fail  odd             the check itself broke: OSError: gone" in shown
    assert "ok    python" in shown and "1 to mend before training" in shown
    monkeypatch.setattr(doctor, "CHECKS", (lambda: [Finding("warn", "w", "hm", "do")],))
    assert main(["doctor"]) == 0
    assert "Ready to train; 1 to look at." in capsys.readouterr().out
    monkeypatch.setattr(doctor, "CHECKS", ())
    assert main(["doctor"]) == 0
    assert "All well." in capsys.readouterr().out


def test_colours_are_for_terminals() -> None:
    finding = Finding("fail", "x", "y", "z")
    assert "\x1b" not in doctor.render(finding)
    assert doctor.render(finding, colored=True).startswith("\x1b[31mfail")


def test_missing_libraries_are_told_by_how_much_they_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "library_version", lambda name: None if name in ("torch", "rich") else "1.0")
    bad = {(finding.status, finding.name, finding.fix) for finding in machine.check_libraries() if finding.fix}
    assert bad == {("fail", "torch", "pip install torch"), ("warn", "optional", "pip install rich")}


@pytest.mark.parametrize(("gib", "status"), [(0.5, "fail"), (4, "warn"), (16, "ok")])
def test_memory_is_judged_by_what_a_run_takes(monkeypatch: pytest.MonkeyPatch, gib: float, status: str) -> None:
    monkeypatch.setattr(machine, "available_memory_bytes", lambda: int(gib * machine.GIB))
    (finding,) = machine.check_memory()
    assert finding.status == status and f"{gib:.1f} GiB free" in finding.text


def test_a_containers_limit_counts_where_it_is_lower(tmp_path: Path) -> None:
    meminfo = "MemTotal: 99 kB\nMemAvailable:    4096 kB\n"
    assert machine.available_memory_bytes(meminfo, tmp_path) == 4096 * 1024
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("400\n")
    assert machine.available_memory_bytes(meminfo, tmp_path) == 600
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.available_memory_bytes(meminfo, tmp_path) == 4096 * 1024
    assert machine.available_memory_bytes("", tmp_path) is None


def test_a_containers_share_of_the_cores_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.cpu_quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert machine.cpu_quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert machine.cpu_quota(tmp_path) == 1.5
    monkeypatch.setattr(machine, "cpu_quota", lambda: 1.5)
    monkeypatch.setattr(machine, "available_cores", lambda: 8)
    (finding,) = machine.check_cores()
    assert finding.status == "warn" and finding.fix == "--run.threads 1"


@pytest.mark.parametrize(("gib", "status"), [(0.1, "fail"), (1, "warn"), (50, "ok")])
def test_disk_is_judged_at_the_nearest_folder_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gib: float, status: str
) -> None:
    seen: list[Path] = []

    def usage(path: Path) -> SimpleNamespace:
        seen.append(path)
        return SimpleNamespace(free=int(gib * machine.GIB))

    monkeypatch.setattr(shutil, "disk_usage", usage)
    finding = machine.disk_finding("cache", tmp_path / "not" / "yet", "elsewhere")
    assert (finding.status, seen) == (status, [tmp_path])
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert machine.disk_finding("cache", tmp_path, "elsewhere").status == "fail"


def test_spinning_threads_and_missing_instructions_are_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert next(machine.check_wait_policy()).status == "warn"
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    assert next(machine.check_wait_policy()).status == "ok"
    assert next(machine.check_bfloat16(["avx2"])).status == "warn"
    assert next(machine.check_bfloat16(["avx512_bf16", "amx_bf16"])).text == "instructions: avx512_bf16, amx_bf16"


def test_a_terminal_is_judged_by_width_and_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    def terminal(columns: int, encoding: str = "utf-8", tty: bool = True) -> list[str]:
        monkeypatch.setattr(sys, "stdout", SimpleNamespace(encoding=encoding, isatty=lambda: tty))
        monkeypatch.setattr(shutil, "get_terminal_size", lambda: SimpleNamespace(columns=columns))
        return [finding.status for finding in machine.check_terminal()]

    assert terminal(200) == ["ok"] and terminal(80) == ["warn"]
    assert terminal(200, encoding="ascii") == ["warn", "ok"] and terminal(80, tty=False) == ["ok"]
