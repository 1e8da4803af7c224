"""``unison replay``: training steps once more, from the samples that a run kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from unison.cli.arguments import ArgumentParser
from unison.core.errors import ConfigError

EXAMPLES: Final = """\
Replays from the newest checkpoint before the step, or from the model the run began with; no engine is started, no
reward is called. The exit code is 0 where loss, gradient norm and weights of each step are those of the run to the bit,
1 where any is not.

examples:
  unison replay runs/first --step 12
  unison replay runs/first --step 1 --to 20
"""


def run(arguments: Sequence[str]) -> int:
    """Replay steps; returns 1 where one came out otherwise than in the run."""
    parser = ArgumentParser("unison replay", "Takes training steps of a run once more, from its samples.", EXAMPLES)
    parser.add_argument("run", metavar="RUN", help="run folder")
    parser.add_argument(
        "--step", required=True, type=int, metavar="N", help="the step to replay (the first of several)"
    )
    parser.add_argument("--to", type=int, metavar="M", help="the last of several steps; by default only step N")
    options = parser.parse(arguments)
    last = options.step if options.to is None else options.to
    if last < options.step:
        raise ConfigError(f"unison replay: --to {last} lies before --step {options.step}")
    from unison.run.replay import Replay

    replay = Replay(Path(options.run), options.step)
    origin = f"the checkpoint of step {replay.begun_at}" if replay.begun_at else "the model the run began with"
    print(f"replaying {options.run} from {origin}", flush=True)
    num_different = 0
    for step in replay.until(last):
        different = step.differences
        num_different += bool(different)
        verdict = "; ".join(different) if different else "equal to the bit"
        print(
            f"step {step.entry.step:>4}  loss {step.totals.loss:+.6f}  gradient norm {step.totals.grad_norm:.4f}  "
            f"weights {step.weights_digest[:16]}  {verdict}",
            flush=True,
        )
    return 1 if num_different else 0
