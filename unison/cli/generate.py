"""``unison generate``: samples from a model, for a look by people or as JSON lines."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from unison.cli.arguments import ArgumentParser, id_list, id_value
from unison.core.errors import ConfigError, ModelError
from unison.core.records import GenerationOutput, OutputDelta, expand_runs
from unison.core.sampling import LOGPROB_KINDS, SamplingParams

if TYPE_CHECKING:
    from unison.engine.engine import Engine

EXAMPLES: Final = """\
examples:
  unison generate --model smollm2-135m --chat "What is 2+3?" --temperature 0
  unison generate --model smollm2-135m --prompt "1+2=3, 5+4=" --n 4 --max-new-tokens 8 --logprobs scaled
  unison generate --model my-model --prompt-file prompt.txt --stop $'\\n' --json
  unison generate --model smollm2-135m --chat "Tell me a story." --stream | tee story.txt
"""


def run(arguments: Sequence[str]) -> int:
    """Sample and print. Raises UnisonError for what the user can mend."""
    options = _parser().parse(arguments)
    sampling = _sampling(options)
    texts = _prompt_texts(options)
    if options.stream and options.json:
        raise ConfigError("unison generate: --stream shows text as it is made, --json whole answers: give one of them")
    from unison import Engine

    engine = Engine.from_pretrained(options.model, dtype=options.dtype, numerics=options.numerics)
    prompts = [_chat_ids(engine, text) for text in texts] if options.chat else texts
    if options.json:
        _print_json(texts, engine.generate(prompts, sampling))
        return 0
    printer = _Printer(texts, sampling.n, engine, with_tables=_wants_tables(options))
    start = time.perf_counter()
    if sys.stdout.isatty() if options.stream is None else options.stream:
        for prompt, copy, delta in engine.stream(prompts, sampling):
            printer.take(prompt, copy, delta)
        seconds = time.perf_counter() - start
    else:
        outputs = engine.generate(prompts, sampling)
        seconds = time.perf_counter() - start
        printer.print_all(outputs)
    num_tokens = printer.num_tokens
    print(f"{num_tokens} tokens in {seconds:.2f} s ({num_tokens / seconds:.0f} tokens/s)", file=sys.stderr)
    return 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser("unison generate", "Sample from a model.", EXAMPLES)
    add = parser.add_argument
    add("--model", required=True, metavar="M", help="model folder, or a short name like smollm2-135m")
    add("--prompt", action="append", metavar="TEXT", help="raw text to continue; may be repeated")
    add("--prompt-file", action="append", metavar="F", help="file to continue, - is standard input; may be repeated")
    add("--chat", action="append", metavar="TEXT", help="a user's turn in the model's chat template; may be repeated")
    _add_sampling(parser)
    add("--dtype", choices=("auto", "bfloat16", "float32"), default="auto", help="compute dtype (%(default)s)")
    add("--numerics", choices=("auto", "exact", "fast"), default="auto", help="numerics path (%(default)s)")
    add("--logprobs", choices=LOGPROB_KINDS, help="print each token with its log-prob of this kind")
    add("--top-logprobs", type=int, metavar="N", default=0, help="also those of the N most likely tokens")
    add("--logprob-token-ids", type=id_list, metavar="IDS", default=(), help="also those of these ids, like 5,6,7")
    add("--prompt-logprobs-from", type=int, metavar="N", help="also those of the prompt from position N on")
    stream_help = "print text as it is made; of several answers one after the other (where output is a terminal)"
    add("--stream", action=argparse.BooleanOptionalAction, help=stream_help)
    add("--json", action="store_true", help="one JSON object an answer on standard output")
    return parser


def _add_sampling(parser: ArgumentParser) -> None:
    add = parser.add_argument
    default = SamplingParams()
    add("--max-new-tokens", type=int, metavar="N", default=default.max_new_tokens, help="longest answer (%(default)s)")
    add("--min-new-tokens", type=int, metavar="N", default=0, help="nothing ends a shorter answer (%(default)s)")
    add("--temperature", type=float, metavar="X", default=default.temperature, help="0 is greedy (%(default)s)")
    add("--top-p", type=float, metavar="X", default=default.top_p, help="nucleus (%(default)s keeps all)")
    add("--top-k", type=int, metavar="N", default=default.top_k, help="most likely tokens kept (%(default)s keeps all)")
    add("--min-p", type=float, metavar="X", default=default.min_p, help="least share of the likeliest (%(default)s)")
    add("--repetition-penalty", type=float, metavar="X", default=1.0, help="on ids of prompt and answer (%(default)s)")
    add("--frequency-penalty", type=float, metavar="X", default=0.0, help="for each time in the answer (%(default)s)")
    add("--presence-penalty", type=float, metavar="X", default=0.0, help="once if in the answer (%(default)s)")
    add("--logit-bias", type=id_value, action="append", default=[], metavar="ID=X", help="added; may be repeated")
    add("--allowed-token-ids", type=id_list, metavar="IDS", help="nothing else is drawn, like 5,6,7")
    add("--forbidden-token-ids", type=id_list, metavar="IDS", default=(), help="never drawn")
    add("--forced-ids", type=id_list, metavar="IDS", default=(), help="the answer begins with these")
    add("--seed", type=int, metavar="N", help="the same seed gives the same answer; drawn and shown where not given")
    add("--n", type=int, metavar="N", default=default.n, help="answers to each prompt (%(default)s)")
    add("--stop", action="append", default=[], metavar="S", help="text that ends an answer; may be repeated")
    add("--stop-token-ids", type=id_list, metavar="IDS", default=(), help="ids that end one, beside the model's own")
    add("--ignore-eos", action="store_true", help="go on past the model's own end ids")
    special = "show special tokens in the text; stop strings match in them"
    add("--no-skip-special-tokens", dest="skip_special_tokens", action="store_false", help=special)
    add("--no-stop-trim", action="store_true", help="keep what ended the answer in its text")


def _sampling(options: argparse.Namespace) -> SamplingParams:
    given = vars(options)
    taken = {field.name: given[field.name] for field in fields(SamplingParams) if field.name in given}
    taken["stop"] = tuple(options.stop)
    taken["logit_bias"] = dict(options.logit_bias)
    taken["logprobs"] = options.logprobs or SamplingParams().logprobs
    return SamplingParams(**taken)


def _wants_tables(options: argparse.Namespace) -> bool:
    more = options.top_logprobs or options.logprob_token_ids or options.prompt_logprobs_from is not None
    return bool(more) or options.logprobs is not None


def _prompt_texts(options: argparse.Namespace) -> list[str]:
    given = [kind for kind in (options.prompt, options.prompt_file, options.chat) if kind]
    if len(given) != 1:
        many = "only one of them at a time" if given else "one of them is needed"
        raise ConfigError(f"unison generate: --prompt TEXT, --prompt-file F, --chat TEXT: {many}")
    if options.prompt_file:
        return [_read(name) for name in options.prompt_file]
    texts: list[str] = given[0]
    return texts


def _read(name: str) -> str:
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        return data.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the prompt file {name}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"the prompt file {name} is not valid UTF-8") from None


def _chat_ids(engine: Engine, text: str) -> list[int]:
    if engine.tokenizer is None:
        raise ModelError("the model folder has no tokenizer.json, so --chat cannot be encoded")
    return engine.tokenizer.render_chat([{"role": "user", "content": text}])


def _print_json(texts: Sequence[str], outputs: Sequence[Sequence[GenerationOutput]]) -> None:
    for text, copies in zip(texts, outputs, strict=True):
        for copy, one in enumerate(copies):
            print(json.dumps(_record(text, copy, one), ensure_ascii=False, allow_nan=False))


def _record(prompt: str, copy: int, one: GenerationOutput) -> dict[str, Any]:
    return _plain_record(prompt, copy, one) | _further_logprobs(one)


def _further_logprobs(one: GenerationOutput) -> dict[str, Any]:
    """What was asked for, and only that."""
    found: dict[str, Any] = {}
    if one.sampling.top_logprobs:
        found["top_logprobs"] = [[[top.token_id, top.logprob] for top in tops] for tops in one.top_logprobs]
    if one.sampling.logprob_token_ids:
        found["logprob_token_ids"] = list(one.sampling.logprob_token_ids)
        found["token_id_logprobs"] = [_finite(values) for values in one.token_id_logprobs]
    if one.sampling.prompt_logprobs_from is not None:
        found["prompt_logprobs_from"] = max(1, one.sampling.prompt_logprobs_from)
        found["prompt_logprobs"] = _finite(one.prompt_logprobs)
    return found


def _finite(logprobs: Sequence[float]) -> list[float | None]:
    """JSON has no infinity: null stands for a token of probability 0."""
    return [None if math.isinf(value) else value for value in logprobs]


def _plain_record(prompt: str, copy: int, one: GenerationOutput) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "copy": copy,
        "text": one.text,
        "finish_reason": one.finish_reason,
        "matched_stop": one.matched_stop,
        "seed": one.seed,
        "prompt_ids": list(one.prompt_ids),
        "token_ids": one.token_ids,
        "logprobs": _finite(one.logprobs),
        "logprobs_kind": one.sampling.logprobs,
        "weight_versions": expand_runs(one.weight_versions),
    }


class _Printer:
    """The bare answer where there is one, else each under a heading; tables of tokens where asked for.

    Answers made side by side are shown one after the other: the first that is not complete live, others when
    their turn comes.
    """

    def __init__(self, texts: Sequence[str], num_copies: int, engine: Engine, *, with_tables: bool) -> None:
        self._texts = texts
        self._num_copies = num_copies
        self._engine = engine
        self._with_tables = with_tables
        self._alone = len(texts) * num_copies == 1
        self._waiting: dict[tuple[int, int], list[OutputDelta]] = {}
        self._order = [(prompt, copy) for prompt in range(len(texts)) for copy in range(num_copies)]
        self._num_complete = 0
        self._has_begun = False
        self.num_tokens = 0

    def print_all(self, outputs: Sequence[Sequence[GenerationOutput]]) -> None:
        for prompt, copy in self._order:
            one = outputs[prompt][copy]
            self._print_heading(prompt, copy)
            self._print_end(one, one.text)

    def take(self, prompt: int, copy: int, delta: OutputDelta) -> None:
        """Show a part of one answer as soon as all answers before it are complete."""
        self._waiting.setdefault((prompt, copy), []).append(delta)
        while self._num_complete < len(self._order):
            place = self._order[self._num_complete]
            if not self._print_part(place, self._waiting.pop(place, [])):
                break

    def _print_part(self, place: tuple[int, int], deltas: Sequence[OutputDelta]) -> bool:
        """Whether this was the end of the answer."""
        if deltas and not self._has_begun:
            self._has_begun = True
            self._print_heading(*place)
        for delta in deltas:
            if delta.output is not None:
                self._print_end(delta.output, delta.text)
                self._num_complete, self._has_begun = self._num_complete + 1, False
                return True
            print(delta.text, end="", flush=True)
        return False

    def _print_heading(self, prompt: int, copy: int) -> None:
        if not self._alone:
            heading = f"--- prompt {prompt + 1}, answer {copy + 1} of {self._num_copies}"
            print(f"{heading}: {_shortened(self._texts[prompt])}")

    def _print_end(self, one: GenerationOutput, rest: str) -> None:
        """What is still to be shown of an answer: the rest of its text, its table, its facts."""
        self.num_tokens += len(one.token_ids)
        print(rest, flush=True)
        if self._with_tables:
            print(_table(one, self._engine))
        print(_ending(one, self._engine), file=sys.stderr if self._alone else sys.stdout)


def _ending(one: GenerationOutput, engine: Engine) -> str:
    at = _token_text(engine, one.matched_stop) if isinstance(one.matched_stop, int) else repr(one.matched_stop)
    why = one.finish_reason if one.matched_stop is None else f"{one.finish_reason} at {at}"
    return f"[{why}; {len(one.prompt_ids)} tokens in, {len(one.token_ids)} out; seed {one.seed}]"


def _table(one: GenerationOutput, engine: Engine) -> str:
    """A line for each token with its log-prob and the further ones asked for; prompt tokens first, then their end."""
    head = f"\n{'position':>8}  {'id':>7}  {one.sampling.logprobs + ' log-prob':>18}  token"
    first = max(1, one.sampling.prompt_logprobs_from or 0)
    known = zip(one.prompt_ids[first:], one.prompt_logprobs, strict=False)
    rows = [_line(engine, first + i, token, logprob) for i, (token, logprob) in enumerate(known)]
    if rows:
        rows.append(f"{'answer':>8}")
    for i, (token, logprob) in enumerate(zip(one.token_ids, one.logprobs, strict=True)):
        line = _line(engine, len(one.prompt_ids) + i, token, logprob)
        rows.append(line + _others(one, i, engine))
    return "\n".join([head, *rows, f"{'sum':>8}  {'':>7}  {sum(one.logprobs):>18.6f}\n"])


def _line(engine: Engine, position: int, token: int, logprob: float) -> str:
    return f"{position:>8}  {token:>7}  {logprob:>18.6f}  {_token_text(engine, token)}"


def _others(one: GenerationOutput, i: int, engine: Engine) -> str:
    """The likeliest tokens at output token i, then the ones chosen by id."""
    pairs = [(top.token_id, top.logprob) for top in one.top_logprobs[i]] if one.top_logprobs else []
    text = "  | " + ", ".join(f"{_token_text(engine, token)} {value:.4f}" for token, value in pairs) if pairs else ""
    if one.token_id_logprobs:
        chosen = zip(one.sampling.logprob_token_ids, one.token_id_logprobs[i], strict=True)
        text += "  | " + ", ".join(f"{token}: {value:.4f}" for token, value in chosen)
    return text


def _token_text(engine: Engine, token: int) -> str:
    return f"token {token}" if engine.tokenizer is None else repr(engine.tokenizer.decode([token], skip_special=False))


def _shortened(text: str, limit: int = 60) -> str:
    return repr(text if len(text) <= limit else f"...{text[-limit:]}")
