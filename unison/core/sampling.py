"""What a request may ask of the sampler, validated before any work starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from unison.core.bounds import MAX_ID, check_bias, check_ids, check_int, check_number, check_sequence
from unison.core.errors import RequestError
from unison.core.seeds import SEED_MASK

LogprobKind = Literal["raw", "scaled", "processed"]
LOGPROB_KINDS: tuple[LogprobKind, ...] = ("raw", "scaled", "processed")
MAX_COPIES = 4096
MAX_STOP_STRINGS = 64
MAX_BIASES = 1024
MAX_BIAS = 1e4
"""Of a single logit, either way. To rule a token out, forbid it."""
MAX_LISTED_IDS = 1 << 16
"""Ids in each of stop_token_ids, allowed_token_ids and forbidden_token_ids."""
MAX_TOP_LOGPROBS = 64
MAX_CHOSEN_LOGPROBS = 1024
MAX_TAPS = 1024
_MAX_TOKENS = 1 << 31


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Neutral by default: temperature 1, the whole vocabulary, no filter, nothing forced.

    A token is drawn from the model's logits in this order:
    1. repetition_penalty, then frequency_penalty and presence_penalty, then logit_bias;
    2. masks (probability 0): whatever allowed_token_ids leaves out, forbidden_token_ids, and every id that
       would end the answer while it has fewer than min_new_tokens tokens;
    3. division by temperature; temperature 0 takes the most likely token, the lowest id of equals;
    4. top_k, then top_p of the weight that is left, then min_p.
    A token of forced_ids is taken instead of a drawn one, whatever its probability.

    logprobs names the log-prob returned for each token:
    raw        log-softmax of the model's logits at temperature 1
    scaled     log-softmax of the model's logits / temperature and nothing else; at temperature 0 equal to raw
    processed  log-prob in the distribution actually drawn from (0 at temperature 0; -inf for a forced token
               that could not have been drawn)
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """-1 keeps the whole vocabulary."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one's probability; 1 keeps only its equals."""
    repetition_penalty: float = 1.0
    """For each distinct id of prompt and output: a positive logit is divided by it, a negative one multiplied."""
    frequency_penalty: float = 0.0
    """Taken off a logit for each time its token occurs in the output, resumed output included."""
    presence_penalty: float = 0.0
    """Taken off a logit once if its token occurs in the output, resumed output included."""
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    """Added to the logits of these ids."""
    allowed_token_ids: tuple[int, ...] | None = None
    """None: all. An end token is drawn only if it is among them."""
    forbidden_token_ids: tuple[int, ...] = field(default=())
    max_new_tokens: int = 128
    min_new_tokens: int = 0
    """Nothing but max_new_tokens ends a shorter answer: end ids have probability 0, and a stop string counts
    only if the token that completes it is this one or a later one. Resumed output counts."""
    n: int = 1
    seed: int | None = None
    """None: a fresh seed is drawn by the engine and reported with the output."""
    stop: tuple[str, ...] = field(default=())
    """Text ends before the first of these (after it with no_stop_trim); the ids keep what was sampled."""
    stop_token_ids: tuple[int, ...] = field(default=())
    """Ids that end generation, beside the model's own end ids."""
    ignore_eos: bool = False
    """Go on past the model's own end ids (stop_token_ids and stop still count)."""
    skip_special_tokens: bool = True
    """False: the text of special tokens is part of the answer's text, and stop strings match in it."""
    no_stop_trim: bool = False
    """Keep at the end of the text what ended the answer: the stop string, or the end token's text (that of a special
    one only without skip_special_tokens)."""
    forced_ids: tuple[int, ...] = field(default=())
    """The first output tokens, taken as they are; drawing begins after them. Nothing ends the answer before the
    last of them. They count as output; noise goes by position, so later tokens draw theirs as always."""
    logprobs: LogprobKind = "scaled"
    top_logprobs: int = 0
    """Also return this many most likely tokens of the distribution that ``logprobs`` names, for each token."""
    logprob_token_ids: tuple[int, ...] = field(default=())
    """Also return the log-probs of these ids, for each token."""
    prompt_logprobs_from: int | None = None
    """Also return log-probs of the prompt's tokens from this position on (not of the first one, which nothing
    predicts). With max_new_tokens=0 that is all that is computed."""
    taps: tuple[str, ...] = field(default=())
    """Also return the hidden states of these names, ``layer.N`` (after layer N, from 0) and ``final`` (after the last
    norm): the row of each position that drew an output token."""
    taps_from: int | None = None
    """Also return the rows of the prompt from this position on; with max_new_tokens=0 nothing else is computed."""

    def __post_init__(self) -> None:
        _check_temperature(self.temperature)
        check_number("top_p", self.top_p, low=0.0, high=1.0, low_open=True)
        check_int("top_k", self.top_k, low=-1, high=_MAX_TOKENS)
        if self.top_k == 0:
            raise RequestError("top_k=0 keeps no token; use -1 to keep the whole vocabulary")
        check_number("min_p", self.min_p, low=0.0, high=1.0)
        check_int("n", self.n, low=1, high=MAX_COPIES)
        if self.seed is not None:
            check_int("seed", self.seed, low=0, high=SEED_MASK)
        for name in ("ignore_eos", "skip_special_tokens", "no_stop_trim"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise RequestError(f"{name}={value!r} must be True or False")
        self._check_edits()
        self._check_stops()
        self._check_lengths()
        self._check_logprobs()
        self._check_taps()

    def _check_edits(self) -> None:
        check_number("repetition_penalty", self.repetition_penalty, low=0.01, high=2.0)
        check_number("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0)
        check_number("presence_penalty", self.presence_penalty, low=-2.0, high=2.0)
        check_bias("logit_bias", self.logit_bias, max_count=MAX_BIASES, limit=MAX_BIAS)
        # A copy: what the caller does to theirs later must not reach a request under way.
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        check_ids("forbidden_token_ids", self.forbidden_token_ids, max_count=MAX_LISTED_IDS)
        if self.allowed_token_ids is not None:
            check_ids("allowed_token_ids", self.allowed_token_ids, max_count=MAX_LISTED_IDS)
            if not set(self.allowed_token_ids) - set(self.forbidden_token_ids):
                raise RequestError(
                    f"allowed_token_ids of {len(self.allowed_token_ids)} ids leaves no token that "
                    "forbidden_token_ids does not take away; allow at least one"
                )

    def _check_stops(self) -> None:
        check_sequence("stop", self.stop)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(f"{len(self.stop)} stop strings given; at most {MAX_STOP_STRINGS} are allowed")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise RequestError(f"stop contains {text!r}; each stop string must be a non-empty string")
        check_ids("stop_token_ids", self.stop_token_ids, max_count=MAX_LISTED_IDS)

    def _check_lengths(self) -> None:
        check_int("max_new_tokens", self.max_new_tokens, low=0, high=_MAX_TOKENS)
        check_int("min_new_tokens", self.min_new_tokens, low=0, high=_MAX_TOKENS)
        if self.min_new_tokens > self.max_new_tokens:
            raise RequestError(
                f"min_new_tokens={self.min_new_tokens} is above max_new_tokens={self.max_new_tokens}; "
                "lower the one or raise the other"
            )
        check_ids("forced_ids", self.forced_ids, max_count=MAX_ID)
        if len(self.forced_ids) > self.max_new_tokens:
            raise RequestError(
                f"forced_ids holds {len(self.forced_ids)} ids, more than max_new_tokens={self.max_new_tokens}; raise it"
            )

    def _check_logprobs(self) -> None:
        if self.logprobs not in LOGPROB_KINDS:
            raise RequestError(f"logprobs={self.logprobs!r} is unknown; use one of {', '.join(LOGPROB_KINDS)}")
        check_int("top_logprobs", self.top_logprobs, low=0, high=MAX_TOP_LOGPROBS)
        check_ids("logprob_token_ids", self.logprob_token_ids, max_count=MAX_CHOSEN_LOGPROBS)
        if self.prompt_logprobs_from is not None:
            check_int("prompt_logprobs_from", self.prompt_logprobs_from, low=0, high=_MAX_TOKENS)
            if self.logprobs == "processed":
                raise RequestError(
                    f"prompt_logprobs_from={self.prompt_logprobs_from} with logprobs='processed': prompt tokens are "
                    "drawn from no distribution; use 'raw' or 'scaled'"
                )

    def _check_taps(self) -> None:
        check_sequence("taps", self.taps)
        if len(self.taps) > MAX_TAPS:
            raise RequestError(f"taps holds {len(self.taps)} names; at most {MAX_TAPS} are allowed")
        for name in self.taps:
            if not isinstance(name, str):
                raise RequestError(f"taps contains {name!r}; each tap must be a name like 'layer.0' or 'final'")
            if self.taps.count(name) > 1:
                raise RequestError(f"taps contains {name!r} more than once")
        if self.taps_from is not None:
            check_int("taps_from", self.taps_from, low=0, high=_MAX_TOKENS)
            if not self.taps:
                raise RequestError(f"taps_from={self.taps_from} without taps; name the hidden states in taps")

    @property
    def filters(self) -> bool:
        """Whether top_k, top_p or min_p may cut the distribution."""
        return self.top_k != -1 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def edits_logits(self) -> bool:
        """Whether penalties, a bias or masks change the logits before a token is drawn."""
        return (
            self.repetition_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
            or bool(self.logit_bias)
            or self.allowed_token_ids is not None
            or bool(self.forbidden_token_ids)
            or self.min_new_tokens > 0
        )

    @property
    def replayable(self) -> bool:
        """True when `scaled` log-probs describe the very distribution drawn from."""
        return self.temperature > 0 and not (self.filters or self.edits_logits or self.forced_ids)


def _check_temperature(temperature: float) -> None:
    check_number("temperature", temperature, low=0.0, high=1e4)
    if 0 < temperature < 1e-3:
        raise RequestError(f"temperature={temperature} is too small to divide by; use 0 for greedy or at least 0.001")
