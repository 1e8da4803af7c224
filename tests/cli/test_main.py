from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType

import pytest

import unison
from unison.cli.env import prepare_environment
from unison.cli.main import COMMANDS, main
from unison.core.errors import ModelError

Capture = pytest.CaptureFixture[str]


def install_command(monkeypatch: pytest.MonkeyPatch, run: Callable[[list[str]], int]) -> None:
    """Put ``run`` in the place of the doctor."""
    module = ModuleType("unison.cli.doctor")
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "unison.cli.doctor", module)


def test_help_names_each_command_and_exits_well(capsys: Capture) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown and text in shown for name, text in COMMANDS.items())
    assert max(map(len, shown.splitlines())) <= 80


def test_no_command_shows_help_and_fails(capsys: Capture) -> None:
    assert main([]) == 2
    assert "commands:" in capsys.readouterr().out


def test_the_version_is_the_packages(capsys: Capture) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"unison {unison.__version__}\n"


@pytest.mark.parametrize(
    ("word", "complaint"),
    [
        ("trian", "error: unknown command 'trian'; did you mean train?; see unison --help\n"),
        ("--verson", "error: unknown flag '--verson'; did you mean --version?; see unison --help\n"),
        ("zzz", "error: unknown command 'zzz'; see unison --help\n"),
    ],
)
def test_an_unknown_word_is_named_with_the_nearest_right_one(capsys: Capture, word: str, complaint: str) -> None:
    assert main([word]) == 2
    assert capsys.readouterr().err == complaint


@pytest.mark.parametrize("command", list(COMMANDS))
def test_each_command_explains_itself(capsys: Capture, command: str) -> None:
    assert main([command, "--help"]) == 0
    assert f"unison {command}" in capsys.readouterr().out


@pytest.mark.parametrize("command", list(COMMANDS))
def test_each_command_refuses_unknown_flags(capsys: Capture, command: str) -> None:
    assert main([command, *(["exactness"] if command == "check" else []), "--no-such-flag", "1"]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_a_users_error_is_one_sentence_without_traceback(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def run(arguments: list[str]) -> int:
        raise ModelError(f"no such model {arguments}")

    install_command(monkeypatch, run)
    assert main(["doctor", "x"]) == 2
    assert capsys.readouterr().err == "error: no such model ['x']\n"
    with pytest.raises(ModelError):
        main(["doctor", "--traceback", "x"])


def test_a_mistake_of_the_program_is_not_dressed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    install_command(monkeypatch, lambda arguments: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        main(["doctor"])


def test_an_interruption_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def run(arguments: list[str]) -> int:
        raise KeyboardInterrupt

    install_command(monkeypatch, run)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err.strip() == "interrupted"


def test_the_exit_code_is_the_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    install_command(monkeypatch, lambda arguments: 1)
    assert main(["doctor"]) == 1


def test_idle_threads_soon_sleep_unless_the_user_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    prepare_environment()
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE" and os.environ["GOMP_SPINCOUNT"] == "10000"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    prepare_environment()
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE" and "GOMP_SPINCOUNT" not in os.environ


def command(*words: str, **kwargs: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "unison.cli.main", *words], capture_output=True, text=True, **kwargs)  # type: ignore[call-overload,no-any-return]


def test_as_a_process_it_answers_and_exits_with_the_code() -> None:
    done = command("train", "--trainer.stpes", "3")
    assert done.returncode == 2
    assert done.stderr == "error: flag --trainer.stpes is unknown; did you mean --trainer.steps?\n"
    assert done.stdout == ""


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from unison.cli.main import main; main(['train', '--help'])\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'numpy', 'rich')))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_a_reader_that_leaves_is_no_error() -> None:
    code = f"{sys.executable} -m unison.cli.main train --help | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True)
    assert done.returncode in (0, 141)
    assert done.stdout.startswith("usage: unison train") and done.stderr == ""


def test_letters_the_terminal_has_not_are_escaped() -> None:
    done = command("--\u00e9", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 2 and "\\xe9" in done.stderr
