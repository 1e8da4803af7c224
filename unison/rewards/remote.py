"""A reward that an HTTP server gives.

One POST of JSON for each sample, ``{"text", "label", "prompt", "metadata"}``, answered by ``{"score": x}`` or
``{"score": null}`` for no opinion; with ``batch`` one POST of a list of these, answered by a list. Other keys of an
answer are not read.
"""

from __future__ import annotations

import email.utils
import os
import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from unison.core.errors import RewardError, ServerError
from unison.core.records import Sample
from unison.rewards.options import check_truth

MAX_WAIT_S: Final = 30.0
"""Longest wait before a try, whatever a server's Retry-After says."""
_FIRST_WAIT_S: Final = 0.5
_MAX_BYTES_PER_SCORE: Final = 64 << 10
_TOO_MANY_REQUESTS: Final = 429
_jitter: Final = random.SystemRandom()  # not the generator that is seeded for graders


class _Score(msgspec.Struct, frozen=True):
    score: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    url: str
    timeout_s: float = 10.0
    retries: int = 3
    batch: bool = False
    concurrency: int = 8
    header: str = "Authorization"
    header_env: str = ""


class HttpReward:
    """The reward function ``http``. Its connections are kept between calls."""

    def __init__(self) -> None:
        self._clients: dict[_Settings, Any] = {}

    def check_options(self, **options: Any) -> None:
        """Raise RewardError, before a run starts, for what no call could work with."""
        _httpx()
        settings = _Settings(**options)
        check_truth(batch=settings.batch)
        for name in ("url", "header", "header_env"):
            if not isinstance(getattr(settings, name), str):
                raise RewardError(f"the reward http has {name}={getattr(settings, name)!r}; it must be a text")
        parts = urlsplit(settings.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise RewardError(f"the reward http has url={settings.url!r}; give an http:// or https:// address")
        if parts.username or parts.password:
            raise RewardError("the reward http has a password in its url, which is written down; use header_env")
        for name, low, high in (("timeout_s", 0.001, 86400), ("retries", 0, 20), ("concurrency", 1, 256)):
            value = getattr(settings, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
                raise RewardError(f"the reward http has {name}={value!r}; it must lie in [{low}, {high}]")
        if settings.header_env and not os.environ.get(settings.header_env):
            raise RewardError(
                f"the reward http takes its header {settings.header} from the environment variable "
                f"{settings.header_env}, which is not set"
            )

    def __call__(
        self,
        samples: Sequence[Sample],
        *,
        url: str,
        timeout_s: float = 10.0,
        retries: int = 3,
        batch: bool = False,
        concurrency: int = 8,
        header: str = "Authorization",
        header_env: str = "",
    ) -> list[float | ServerError | None]:
        """Scores; a ServerError in the place of a sample that got none.

        ``timeout_s`` bounds one try; ``header`` is sent with the value of the environment variable ``header_env``.
        Raises ServerError where a whole batch got none.
        """
        settings = _Settings(
            url=url,
            timeout_s=timeout_s,
            retries=int(retries),
            batch=batch,
            concurrency=int(concurrency),
            header=header,
            header_env=header_env,
        )
        client = self._client(settings)
        bodies = [_body(sample) for sample in samples]
        if batch:
            return [*_post(client, settings, bodies, len(bodies))]
        with ThreadPoolExecutor(max(1, min(settings.concurrency, len(bodies)))) as threads:
            return list(threads.map(lambda body: _post_one(client, settings, body), bodies))

    def _client(self, settings: _Settings) -> Any:
        if settings not in self._clients:
            headers = {settings.header: os.environ[settings.header_env]} if settings.header_env else {}
            # Nothing from the environment: no proxy, no password file. No redirect: the address is the configured one.
            self._clients[settings] = _httpx().Client(
                timeout=settings.timeout_s, headers=headers, follow_redirects=False, trust_env=False
            )
        return self._clients[settings]


http: Final = HttpReward()


def _httpx() -> ModuleType:
    try:
        import httpx
    except ImportError as error:
        raise RewardError("the reward http needs the package httpx; pip install 'unison[rewards]'") from error
    return httpx


def _body(sample: Sample) -> dict[str, Any]:
    metadata = {key: value for key, value in sample.metadata.items() if key not in ("label", "prompt")}
    return {
        "text": sample.text,
        "label": sample.metadata.get("label"),
        "prompt": sample.metadata.get("prompt"),
        "metadata": metadata,
    }


def _post_one(client: Any, settings: _Settings, body: dict[str, Any]) -> float | ServerError | None:
    try:
        return _post(client, settings, body, 1)[0]
    except ServerError as error:
        return error


def _post(client: Any, settings: _Settings, body: object, num_scores: int) -> list[float | None]:
    """The scores of one request, tried again where the server is busy, failing or not there. Raises ServerError."""
    content = msgspec.json.encode(body)
    for attempt in range(settings.retries + 1):
        status, headers, text = _try(client, settings, content, num_scores * _MAX_BYTES_PER_SCORE)
        if status and status != _TOO_MANY_REQUESTS and status < 500:
            break
        if attempt < settings.retries:
            time.sleep(wait_s(attempt, headers.get("retry-after")))
    else:
        raise ServerError(f"{settings.url} {text}, {settings.retries + 1} times in a row")
    if status != 200:
        raise ServerError(f"{settings.url} answered with status {status}; a score comes with 200")
    return _scores(settings.url, text, isinstance(body, list), num_scores)


def _try(client: Any, settings: _Settings, content: bytes, max_bytes: int) -> tuple[int, Mapping[str, str], str]:
    """Status, headers and text; status 0 where there was no connection. The text of a failure says what it was."""
    httpx = _httpx()
    headers = {"content-type": "application/json", "accept-encoding": "identity"}
    end_s = time.monotonic() + settings.timeout_s
    try:
        with client.stream("POST", settings.url, content=content, headers=headers) as response:
            if response.status_code != 200:
                return response.status_code, response.headers, f"answered with status {response.status_code}"
            found = bytearray()
            # Raw: a few kilobytes of a compressed answer could be gigabytes.
            for piece in response.iter_raw():
                found += piece
                if time.monotonic() > end_s:
                    raise ServerError(f"{settings.url} had not answered in full after {settings.timeout_s:g} s")
                if len(found) > max_bytes:
                    raise ServerError(f"{settings.url} answered more than {max_bytes} bytes")
            return 200, response.headers, found.decode("utf-8", "replace")
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        return 0, {}, f"cannot be reached ({type(error).__name__})"
    except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
        raise ServerError(f"{settings.url} gave no answer: {type(error).__name__}") from error


def _scores(url: str, text: str, is_list: bool, num_scores: int) -> list[float | None]:
    try:
        found = msgspec.json.decode(text, type=list[_Score]) if is_list else [msgspec.json.decode(text, type=_Score)]
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ServerError(f"{url} answered what is no score: {error}") from error
    if len(found) != num_scores:
        raise ServerError(f"{url} answered {len(found)} scores for {num_scores} samples")
    return [one.score for one in found]


def wait_s(attempt: int, retry_after: str | None) -> float:
    """Seconds before the next try: doubling, spread by up to a half, and what Retry-After asks for; bounded."""
    backoff_s = min(_FIRST_WAIT_S * 2**attempt, MAX_WAIT_S) * _jitter.uniform(0.5, 1.0)
    wanted_s: float = max(backoff_s, _asked_s(retry_after))
    return min(wanted_s, MAX_WAIT_S)


def _asked_s(retry_after: str | None) -> float:
    """Retry-After as seconds: a number or a date (RFC 9110, 10.2.3); 0 for anything else."""
    if retry_after is None:
        return 0.0
    if retry_after.strip().isdecimal():
        return min(float(retry_after), MAX_WAIT_S)
    try:
        return email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time()
    except (ValueError, OverflowError):
        return 0.0
