"""``unison export``: from a run to a folder that transformers loads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from unison.cli.arguments import ArgumentParser
from unison.core.errors import ModelError

EXAMPLES: Final = """\
Writes safetensors, configuration, tokenizer, chat template and a README.md that says what the model is.
Without @STEP the run's exported model is taken, or where there is none its newest checkpoint.

examples:
  unison export runs/first@20 models/first-20
  unison export runs/first models/first --dtype float32
"""


def run(arguments: Sequence[str]) -> int:
    """Export and say where to. Raises UnisonError for what the user can mend."""
    options = _parser().parse(arguments)
    from unison.evaluation.export import export_run
    from unison.evaluation.run_model import find_run_model

    run_model = find_run_model(options.run)
    if run_model is None:
        raise ModelError(
            f"{options.run!r} is no run folder; give one that holds a config.toml, or RUN@STEP for a checkpoint of it"
        )
    exported = export_run(run_model, Path(options.out).expanduser(), options.dtype)
    step = "at a step it does not tell" if exported.step is None else f"at step {exported.step}"
    print(f"{run_model.run} {step}: {exported.num_parameters / 1e6:.1f} M parameters, {exported.dtype}")
    print(f"weights {exported.digest[:16]}")
    print(f"  {exported.folder}")
    return 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser("unison export", "Turn a run's checkpoint or model into a folder.", EXAMPLES)
    add = parser.add_argument
    add("run", metavar="RUN[@STEP]", help="run folder, with the step of a checkpoint if it is to be one")
    add("out", metavar="OUT", help="folder to write, new or empty")
    dtype_help = "dtype of the saved weights (that of the exported model; for a checkpoint, what the run computed in)"
    add("--dtype", choices=("bfloat16", "float32", "float16"), help=dtype_help)
    return parser
