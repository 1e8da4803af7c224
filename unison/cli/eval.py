"""``unison eval``: scores a model or what a run has trained on held-out prompts."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from unison.cli.train import split_arguments
from unison.config.dump import dump_toml
from unison.config.load import Loaded, load_config
from unison.config.reference import render_help
from unison.config.schema import TrainConfig
from unison.core.errors import ConfigError

if TYPE_CHECKING:
    from unison.evaluation.run_model import RunModel
    from unison.evaluation.standalone import ModelEvaluation

OWN_FLAGS: Final = ("--model", "--json", "--out")

USAGE: Final = """\
usage: unison eval [--model MODEL | RUN | RUN@STEP] [CONFIG.toml ...] [--section.key VALUE ...]

Answers held-out prompts and prints a table: accuracy, pass@k, intervals, counts, settings. Nothing is trained.
A run folder brings its own configuration, which files and flags change; without @STEP its exported model is
taken, or where there is none its newest checkpoint.

  --model M     a model folder, a short name like smollm2-135m, a run folder, or RUN@STEP for a checkpoint of it
  --json FILE   write everything as JSON, per-problem scores included; - is standard output
  --out FOLDER  write evaluation.json, table.txt and config.toml into a new folder
  --traceback   show where in the code an error comes from

examples:
  unison eval --model smollm2-135m examples/sums.toml --eval.problems 50
  unison eval --model runs/first --eval.samples 16 --eval.pass_k [1,4,16]
  unison eval --model runs/first@20 --json result.json
  unison eval --model my-model config.toml --eval.sets.hard.path hard.jsonl

configuration (in a file, --section.key VALUE is key = VALUE under [section]):

"""


def run(arguments: Sequence[str]) -> int:
    """Evaluate and print. Raises UnisonError for what the user can mend."""
    if any(word in ("-h", "--help") for word in arguments):
        print(USAGE + render_help(min(100, shutil.get_terminal_size().columns)))
        return 0
    own, rest = take_flags(arguments, OWN_FLAGS)
    _check_targets(own.get("--json"), own.get("--out"))
    loaded, run_model, name = _configured(own.get("--model"), rest)
    evaluation = _evaluate(loaded.config, run_model, name)
    for note in evaluation.notes:
        print(f"note: {note}", file=sys.stderr)
    print(evaluation.text(), file=sys.stderr if own.get("--json") == "-" else sys.stdout)
    if "--json" in own:
        _write_json(evaluation, own["--json"])
    if "--out" in own:
        _write_folder(evaluation, Path(own["--out"]), loaded)
    return 0


def take_flags(arguments: Sequence[str], names: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The values of the flags in ``names``, and all other words. Raises ConfigError for a flag without its value."""
    found: dict[str, str] = {}
    rest: list[str] = []
    words = iter(arguments)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag not in names:
            rest.append(word)
            continue
        if not equals:
            value = next(words, "")
        if not value or (value.startswith("--") and not equals):
            raise ConfigError(f"{flag} needs a value; see unison eval --help")
        if flag in found:
            raise ConfigError(f"{flag} is given twice; give it once")
        found[flag] = value
    return found, rest


def _configured(model: str | None, words: Sequence[str]) -> tuple[Loaded[TrainConfig], RunModel | None, str]:
    """The configuration, the run whose model is meant if any, and the model's name for people."""
    files, flags, dry_run = split_arguments(words)
    if dry_run:
        raise ConfigError("unison eval has no --dry-run; see unison eval --help")
    if model is None and not files and not flags:
        raise ConfigError("unison eval needs --model, or a configuration that names one; see unison eval --help")
    run_model = None
    if model is not None:
        from unison.evaluation.run_model import find_run_model

        run_model = find_run_model(model)
    if run_model is not None:
        files = [str(run_model.run / "config.toml"), *files]
    elif model is not None:
        flags = [*flags, f"--model.path={model}"]
    # Nothing is trained, so that nothing to train on is needed.
    loaded = load_config(files, ["--trainer.steps=0", *flags], other_flags=(*OWN_FLAGS, "--help", "--traceback"))
    step = "" if run_model is None or run_model.step is None else f"@{run_model.step}"
    name = loaded.config.model.path if run_model is None else f"{run_model.run}{step}"
    return loaded, run_model, name


def _evaluate(config: TrainConfig, run_model: RunModel | None, name: str) -> ModelEvaluation:
    from unison.evaluation.standalone import evaluate_model
    from unison.observability.progress import Progress

    with Progress(config.log.progress, stream=sys.stderr) as progress:
        return evaluate_model(
            config, run_model, name=name, on_progress=lambda done, total: progress.update("evaluation", done, total)
        )


def _check_targets(json_file: str | None, folder: str | None) -> None:
    """What cannot be written is refused before minutes of sampling."""
    if json_file not in (None, "-") and not Path(str(json_file)).parent.is_dir():
        raise ConfigError(f"--json {json_file}: the folder {Path(str(json_file)).parent} does not exist; make it first")
    if json_file not in (None, "-") and Path(str(json_file)).is_dir():
        raise ConfigError(f"--json {json_file} is a folder; give a file, or - for standard output")
    if folder is not None:
        _check_new_folder(Path(folder))


def _check_new_folder(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise ConfigError(f"--out {path} is a file; give a new folder")
    if path.is_dir() and any(path.iterdir()):
        raise ConfigError(f"--out {path} is not empty; give a new folder")


def _write_json(evaluation: ModelEvaluation, target: str) -> None:
    from unison.evaluation.files import json_text, write_json

    if target == "-":
        print(json_text(evaluation.as_json()), end="")
        return
    try:
        write_json(Path(target), evaluation.as_json())
    except OSError as error:
        raise ConfigError(f"--json {target} cannot be written: {error.strerror or error}") from error


def _write_folder(evaluation: ModelEvaluation, folder: Path, loaded: Loaded[TrainConfig]) -> None:
    from unison.evaluation.files import write_json

    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "evaluation.json", evaluation.as_json())
        (folder / "table.txt").write_text(evaluation.text() + "\n", encoding="utf-8")
        (folder / "config.toml").write_text(dump_toml(loaded.config, loaded.sources), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {folder} cannot be written: {error.strerror or error}") from error
