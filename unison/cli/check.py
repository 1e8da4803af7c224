"""``unison check``: proofs that run on the user's own machine and model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from unison.cli.arguments import ArgumentParser
from unison.config.fields import known_field
from unison.config.names import did_you_mean
from unison.config.values import parse_option
from unison.core.errors import ConfigError

CHECKS: Final = {
    "exactness": "every log-prob of rollout equals training's bit for bit, whatever the circumstances",
    "run": "a run folder's ledger, samples and checkpoints are whole and agree",
    "plugin": "a reward, source, rollout, algorithm, filter, hook or tracker of your own keeps its contract",
}

EXAMPLES: Final = """\
The exit code is 0 where all cells are exactly equal, 1 where any is not.

examples:
  unison check exactness --model smollm2-135m
  unison check exactness --model my-model --dtype float32 --quick
"""

RUN_EXAMPLES: Final = """\
Every prompt drawn must be trained, discarded with its reason, or pending, exactly once and in the order of the data;
the kept samples must be those trained on; every byte of every checkpoint must be as saved. The exit code is 0 where all
of it is so, 1 where any is not.

examples:
  unison check run runs/first
"""

PLUGIN_EXAMPLES: Final = """\
Without --kind it is told from the signature, and said. The object is run, with all rights of this process. The exit
code is 0 where there is no problem, 1 where there is any. What each kind looks like: docs/plugins.md.

examples:
  unison check plugin my_module:my_reward
  unison check plugin my_module:keep --kind filter
  unison check plugin my_module:MY_RECIPE
"""

USAGE: Final = """\
usage: unison check CHECK ...

checks:
{checks}

`unison check CHECK --help` explains a check.
"""


def run(arguments: Sequence[str]) -> int:
    """Run a check; returns 1 where it did not pass."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE.format(checks="\n".join(f"  {name:<9}  {text}" for name, text in CHECKS.items())), end="")
        return 0 if arguments else 2
    name, *rest = arguments
    if name not in CHECKS:
        raise ConfigError(f"unison check: unknown check {name!r}{did_you_mean(name, CHECKS)}; see unison check --help")
    return {"exactness": _exactness, "run": _run, "plugin": _plugin}[name](rest)


def _run(arguments: Sequence[str]) -> int:
    parser = ArgumentParser("unison check run", f"Proves that {CHECKS['run']}.", RUN_EXAMPLES)
    parser.add_argument("run", metavar="RUN", help="run folder, of a run that is not under way")
    parser.add_argument(
        "--without-data", action="store_true", help="do not draw the prompts once more to compare their order"
    )
    options = parser.parse(arguments)
    from unison.checks.run import check_run

    findings = check_run(Path(options.run), with_data=not options.without_data)
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        print(f"{'problem' if finding.problems else 'ok':<8}{finding.name:<{width}}  {finding.text}")
        for problem in finding.problems:
            print(f"        {'':<{width}}  {problem}")
    return 1 if any(finding.problems for finding in findings) else 0


def _exactness(arguments: Sequence[str]) -> int:
    parser = ArgumentParser("unison check exactness", f"Proves that {CHECKS['exactness']}.", EXAMPLES)
    parser.add_argument("--model", required=True, metavar="M", help="model folder, or a short name like smollm2-135m")
    parser.add_argument(
        "--dtype", choices=("auto", "bfloat16", "float32"), default="auto", help="compute dtype (%(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="fewer and shorter requests in each cell")
    options = parser.parse(arguments)
    from unison.checks.exactness import run_exactness

    report = run_exactness(options.model, dtype=options.dtype, quick=options.quick)
    return 0 if report.passed else 1


def _plugin(arguments: Sequence[str]) -> int:
    parser = ArgumentParser("unison check plugin", f"Proves that {CHECKS['plugin']}.", PLUGIN_EXAMPLES)
    parser.add_argument("object", metavar="MODULE:OBJECT", help="the object, in the current folder or installed")
    parser.add_argument(
        "--kind", metavar="K", help="reward, source, rollout, filter, hook, tracker, advantage, loss or recipe"
    )
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option it is configured with; repeatable",
    )
    options = parser.parse(arguments)
    from unison.checks.plugin import run_plugin_check

    given = dict(_option(text) for text in options.option)
    return 0 if run_plugin_check(options.object, options.kind, given).passed else 1


def _option(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigError(f"--option {text!r} must be NAME=VALUE")
    return name, parse_option(known_field("reward.options"), name, value, "--option")
