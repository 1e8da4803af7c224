"""``unison bench``: how fast a workload is answered, by an engine in this process or by an HTTP server."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from unison.cli.arguments import ArgumentParser
from unison.config.schema import EngineConfig
from unison.core.errors import ConfigError

if TYPE_CHECKING:
    from unison.bench.measure import Repeat, Target

ENGINE: Final = "engine."
HERE_ONLY: Final = ("threads", "dtype", "numerics")
THERE_ONLY: Final = ("api", "timeout")

EXAMPLES: Final = """\
The workload is a JSON file of token ids; benchmarks/README.md describes it. All its requests are sent at once, those of
a conversation one after the other. Latency is that of a request, from handing it over to its last token, waiting
included. In this process the prefix cache is emptied before each repeat, CPU seconds and memory are those of the
process, and the engine's counters follow. Over HTTP the server's cache is emptied where the API can do that.

The exit code is 1 where an answer has another number of tokens than was asked for.

examples:
  unison bench --workload benchmarks/workloads/g1.json --model smollm2-135m --threads 2 --repeat 5
  unison bench --workload benchmarks/workloads/g3.json --model smollm2-135m --engine.kv_tokens 8192 --json
  unison bench --workload benchmarks/workloads/g1.json --url http://127.0.0.1:30000 --api sglang --model m
"""


def run(arguments: Sequence[str]) -> int:
    """Measure and print; returns 1 where answers had the wrong number of tokens."""
    options = _parser().parse(arguments)
    _check(options)
    from unison.bench.report import measure
    from unison.bench.workload import read_workload

    workload = read_workload(Path(options.workload))
    target = _engine(options) if options.url is None else _server(options)
    report = measure(target, workload, options.repeat, _tell)
    print(json.dumps(report.as_data(), allow_nan=False) if options.json else report.table())
    if options.json:
        for fault in report.faults:
            print(f"wrong number of tokens: {fault}", file=sys.stderr)
    return 1 if report.faults else 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser("unison bench", "Measure how fast a workload is answered.", EXAMPLES)
    add = parser.add_argument
    add("--workload", required=True, metavar="FILE", help="what is asked, as token ids")
    add("--model", required=True, metavar="M", help="model folder or short name; with --url the server's name for it")
    add("--repeat", type=int, metavar="N", default=3, help="runs of the whole workload (%(default)s)")
    add("--concurrency", type=int, metavar="N", help="requests or conversations under way at a time (all)")
    add("--json", action="store_true", help="one JSON object on standard output, each repeat in it")
    here = parser.add_argument_group("in this process")
    here.add_argument("--threads", type=int, metavar="N", help="threads of torch (its own choice)")
    here.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), help="compute dtype (auto)")
    here.add_argument("--numerics", choices=("auto", "exact", "fast"), help="numerics path (auto)")
    for field in msgspec.structs.fields(EngineConfig):
        here.add_argument(f"--{ENGINE}{field.name}", metavar="X", help=f"as in a configuration ({field.default})")
    there = parser.add_argument_group("against a server")
    there.add_argument("--url", metavar="URL", help="ask this server, like http://127.0.0.1:8000")
    there.add_argument(
        "--api",
        choices=("sglang", "openai"),
        help="what it speaks: /generate (if not said) or /v1/completions",
    )
    there.add_argument("--timeout", type=float, metavar="S", help="how long it may be silent, in seconds (600)")
    return parser


def _check(options: argparse.Namespace) -> None:
    """Raises ConfigError for numbers out of range and for flags that would have no effect."""
    for name, least in (("repeat", 1), ("threads", 1), ("concurrency", 1)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise ConfigError(f"unison bench: --{name} {value} must be at least {least}")
    if options.timeout is not None and not 0 < options.timeout < 1e7:
        raise ConfigError(f"unison bench: --timeout {options.timeout:g} must be above 0 and below 1e7 seconds")
    given = {name for name, value in vars(options).items() if value is not None}
    if options.url is None:
        useless, why = given & set(THERE_ONLY), "has an effect with --url only"
    else:
        engine = {name for name in given if name.startswith(ENGINE)}
        useless, why = given & set(HERE_ONLY) | engine, "has no effect on a server; leave it out with --url"
    if useless:
        raise ConfigError(f"unison bench: --{min(useless)} {why}")


def _engine(options: argparse.Namespace) -> Target:
    import torch

    from unison import Engine
    from unison.bench.in_process import EngineTarget

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    engine = Engine.from_pretrained(
        options.model, dtype=options.dtype or "auto", numerics=options.numerics or "auto", **_engine_options(options)
    )
    return EngineTarget(engine, options.model, options.concurrency)


def _engine_options(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of EngineConfig given as flags, as values of their types."""
    texts = {
        name.removeprefix(ENGINE): value
        for name, value in vars(options).items()
        if name.startswith(ENGINE) and value is not None
    }
    try:
        config = msgspec.convert(texts, EngineConfig, strict=False)
    except msgspec.ValidationError as error:
        what, _, at = str(error).partition(" - at `$.")
        raise ConfigError(f"unison bench: --{ENGINE}{at.rstrip('`')}: {what}") from error
    return {name: value for name, value in msgspec.structs.asdict(config).items() if name in texts}


def _server(options: argparse.Namespace) -> Target:
    from unison.bench.http_api import APIS
    from unison.bench.over_http import HttpTarget

    timeout_s = 600.0 if options.timeout is None else options.timeout
    return HttpTarget(
        options.url, APIS[options.api or "sglang"], options.model, timeout_s=timeout_s, concurrency=options.concurrency
    )


def _tell(number: int, repeat: Repeat) -> None:
    rate = repeat.output_tokens / repeat.wall_s
    print(f"repeat {number}: {repeat.output_tokens} tokens in {repeat.wall_s:.2f} s, {rate:.1f}/s", file=sys.stderr)
