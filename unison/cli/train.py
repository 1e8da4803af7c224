"""``unison train``: from files and flags to a run, or to a look at what it would be."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from unison.config.dump import dump_toml
from unison.config.load import Loaded, load_config
from unison.config.reference import render_help
from unison.config.schema import TrainConfig
from unison.core.errors import ConfigError

ALIASES: Final = {"--model": "--model.path", "--fork": "--run.fork"}
OWN_FLAGS: Final = (*ALIASES, "--dry-run", "--help", "--traceback")

USAGE: Final = """\
usage: unison train CONFIG.toml [MORE.toml ...] [--dry-run] [--section.key VALUE ...]
       unison train RUN_FOLDER [--section.key VALUE ...]

Trains a model as the configuration says. Files are merged from left to right, then the flags. A run whose folder exists
goes on from its newest checkpoint; Ctrl-C saves one first.

  --model NAME  short for --model.path NAME: a model folder, or a short name like smollm2-135m
  --fork RUN    short for --run.fork RUN: begin from the state of another run, RUN_FOLDER or RUN_FOLDER@STEP
  --dry-run     print the resolved configuration and the batch arithmetic, look at rewards and data, start nothing
  --traceback   show where in the code an error comes from

examples:
  unison train config.toml --run.name first --trainer.steps 50
  unison train base.toml mine.toml --rollout.temperature 0.9 --dry-run
  unison train runs/first --trainer.steps 100
  unison train config.toml --run.name second --fork runs/first@20

configuration (in a file, --section.key VALUE is key = VALUE under [section]):

"""


def run(arguments: Sequence[str]) -> int:
    """Train. Returns the exit code; raises UnisonError for what the user can mend."""
    if any(word in ("-h", "--help") for word in arguments):
        width = min(100, shutil.get_terminal_size().columns)
        print(USAGE + render_help(width))
        return 0
    files, flags, dry_run = split_arguments(arguments)
    if not files and not flags:
        raise ConfigError("unison train needs a configuration file, or flags; see unison train --help")
    files, flags = _of_run_folder(files, flags)
    loaded = load_config(files, flags, other_flags=OWN_FLAGS)
    if dry_run:
        _print_plan(loaded)
        return 0
    from unison.loop import run_training

    run_training(loaded.config, command=["unison", "train", *arguments], sources=loaded.sources)
    return 0


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str], bool]:
    """Files, configuration flags with their values, and whether it is a dry run.

    Files stand anywhere: a word is a file where it does not begin with a dash and no flag before
    it still waits for its value. Aliases become the keys they stand for.
    """
    files: list[str] = []
    flags: list[str] = []
    dry_run = False
    waiting = False
    for word in arguments:
        if word == "--dry-run":
            dry_run, waiting = True, False
        elif word.startswith("--dry-run="):
            raise ConfigError("--dry-run takes no value")
        elif word.startswith("--"):
            flag, equals, text = word.partition("=")
            flags.append(f"{ALIASES.get(flag, flag)}{equals}{text}")
            waiting = not equals
        elif waiting or word.startswith("-"):
            flags.append(word)
            waiting = False
        else:
            files.append(word)
    return files, flags, dry_run


def _of_run_folder(files: list[str], flags: list[str]) -> tuple[list[str], list[str]]:
    """A run's folder among the files stands for its configuration, and for going on in it."""
    folders = [name for name in files if Path(name).is_dir()]
    if not folders:
        return files, flags
    if len(folders) > 1:
        raise ConfigError(f"{folders[0]} and {folders[1]} are both folders; a run goes on in one")
    config = Path(folders[0]) / "config.toml"
    if not config.is_file():
        raise ConfigError(
            f"{folders[0]} is a folder without a config.toml; name a configuration file or a run's folder"
        )
    return [str(config) if name == folders[0] else name for name in files], ["--run.dir", folders[0], *flags]


def _print_plan(loaded: Loaded[TrainConfig]) -> None:
    from unison.algorithms.assemble import assemble
    from unison.assembly import check_plan
    from unison.training.arithmetic import BatchArithmetic

    print(dump_toml(loaded.config, loaded.sources))
    check_plan(loaded.config)
    for line in [*BatchArithmetic.from_config(loaded.config).describe(), *assemble(loaded.config).describe()]:
        print(f"# {line}")
