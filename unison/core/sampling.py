"""What a request may ask of the sampler, validated before any work starts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from unison.core.errors import RequestError
from unison.core.seeds import SEED_MASK

LogprobKind = Literal["raw", "scaled", "processed"]
LOGPROB_KINDS: tuple[LogprobKind, ...] = ("raw", "scaled", "processed")
MAX_COPIES = 4096
MAX_STOP_STRINGS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Neutral by default: temperature 1, the whole vocabulary, no filter.

    logprobs names the log-prob returned for each sampled token:
    raw        log-softmax of the logits at temperature 1
    scaled     log-softmax of logits / temperature and nothing else; at temperature 0 equal to raw
    processed  log-prob in the distribution actually drawn from (0 at temperature 0)
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """-1 keeps the whole vocabulary."""
    max_new_tokens: int = 128
    n: int = 1
    seed: int | None = None
    """None: a fresh seed is drawn by the engine and reported with the output."""
    stop: tuple[str, ...] = field(default=())
    """Text ends before the first of these; the ids keep what was sampled."""
    stop_token_ids: tuple[int, ...] = field(default=())
    """Ids that end generation, beside the model's own end ids."""
    ignore_eos: bool = False
    """Go on past the model's own end ids (stop_token_ids and stop still count)."""
    logprobs: LogprobKind = "scaled"

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, low=0.0, high=1e4)
        if 0 < self.temperature < 1e-3:
            raise RequestError(
                f"temperature={self.temperature} is too small to divide by; use 0 for greedy or at least 0.001"
            )
        _check_number("top_p", self.top_p, low=0.0, high=1.0, low_open=True)
        _check_int("top_k", self.top_k, low=-1, high=1 << 31)
        if self.top_k == 0:
            raise RequestError("top_k=0 keeps no token; use -1 to keep the whole vocabulary")
        _check_int("max_new_tokens", self.max_new_tokens, low=0, high=1 << 31)
        _check_int("n", self.n, low=1, high=MAX_COPIES)
        if self.seed is not None:
            _check_int("seed", self.seed, low=0, high=SEED_MASK)
        if self.logprobs not in LOGPROB_KINDS:
            raise RequestError(f"logprobs={self.logprobs!r} is unknown; use one of {', '.join(LOGPROB_KINDS)}")
        self._check_stops()

    def _check_stops(self) -> None:
        for name, values in (("stop", self.stop), ("stop_token_ids", self.stop_token_ids)):
            if not isinstance(values, (tuple, list)):
                raise RequestError(f"{name}={values!r} must be a tuple, not {type(values).__name__}")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(f"{len(self.stop)} stop strings given; at most {MAX_STOP_STRINGS} are allowed")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise RequestError(f"stop contains {text!r}; each stop string must be a non-empty string")
        for token in self.stop_token_ids:
            _check_int("stop_token_ids", token, low=0, high=1 << 31)

    @property
    def replayable(self) -> bool:
        """True when `scaled` log-probs describe the very distribution drawn from."""
        return self.temperature > 0 and self.top_p == 1.0 and self.top_k == -1


def _check_number(name: str, value: object, *, low: float, high: float, low_open: bool = False) -> None:
    # Compared, not math.isfinite: that one raises on an integer too large for a float.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -math.inf < value < math.inf:
        raise RequestError(f"{name}={value!r} must be a finite number")
    if not (low < value if low_open else low <= value) or value > high:
        bracket = "(" if low_open else "["
        raise RequestError(f"{name}={value!r} is outside {bracket}{low:g}, {high:g}]")


def _check_int(name: str, value: object, *, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name}={value!r} must be an integer")
    if not low <= value <= high:
        raise RequestError(f"{name}={value!r} is outside [{low}, {high}]")
