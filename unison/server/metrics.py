"""What the server tells Prometheus: the names that dashboards of SGLang know, and ours."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from unison.server.link import EngineLink

_RATE_WINDOW_S: Final = 30.0
_LATENCIES: Final = (0.1, 0.2, 0.4, 0.8, 1, 2, 5, 10, 20, 40, 60, 80, 100, 200, 400, 800, 1600)
_SHORT: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
_STATES: Final = (
    "starting", "restarting", "stopping", "dead", "running", "paused", "updating", "weights_invalid", "released",
)  # fmt: skip
ENGINE_GAUGES: Final = {
    "sglang:num_running_reqs": "Requests that the engine runs",
    "sglang:num_queue_reqs": "Requests that wait in the engine",
    "sglang:num_paused_reqs": "Requests held by a pause",
    "sglang:num_used_tokens": "Tokens whose keys and values are held",
    "sglang:token_usage": "Share of the memory for keys and values that is held",
    "sglang:cache_hit_rate": "Share of prompt tokens that came from the prefix cache, since the start",
    "sglang:gen_throughput": "Tokens sampled per second over the last scrapes",
    "unison_weight_version": "Version of the weights that are served",
    "unison_silence_seconds": "Since the engine process last said anything",
}
ENGINE_COUNTERS: Final = {
    "num_steps": ("unison_steps", "Steps of the engine process; starts anew with it"),
    "num_sampled_tokens": ("unison_sampled_tokens", "Tokens sampled by the engine process; starts anew with it"),
    "num_retractions": ("unison_retractions", "Requests pushed back for memory; starts anew with the process"),
}
"""Counters of a beat -> name and help."""
MEDIA_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """Counters of the front end, and what the engine's latest beat says; each value labelled with the model's name."""

    def __init__(self, link: EngineLink) -> None:
        self._link = link
        self._model_name = ""
        self.registry = CollectorRegistry()
        self._prompt_tokens = self._counter("sglang:prompt_tokens", "Prompt tokens of requests that ended")
        self._generation_tokens = self._counter("sglang:generation_tokens", "Sampled tokens of requests that ended")
        self._cached_tokens = self._counter("sglang:cached_tokens", "Prompt tokens that came from the prefix cache")
        self._num_requests = self._counter("sglang:num_requests", "Requests that ended")
        self._by_reason = self._counter("unison_requests", "Requests that ended, by how", "finish_reason")
        self._updates = self._counter("unison_weight_updates", "Weight updates, by how they ended", "outcome")
        self._e2e = self._histogram("sglang:e2e_request_latency_seconds", "From arrival to the answer", _LATENCIES)
        self._queue = self._histogram("sglang:queue_time_seconds", "From arrival to the first computed token", _SHORT)
        self._first = self._histogram("sglang:time_to_first_token_seconds", "To the first token", _SHORT)
        self._between = self._histogram(
            "sglang:inter_token_latency_seconds", "Mean between tokens of one answer", _SHORT
        )
        self._update_s = self._histogram("unison_weight_update_seconds", "From begin to commit", _LATENCIES)
        self._rate = Rate()
        self.registry.register(_EngineCollector(self))

    @property
    def model_name(self) -> str:
        if not self._model_name and self._link.state not in ("starting", "dead"):
            self._model_name = self._link.info.path
        return self._model_name

    @property
    def link(self) -> EngineLink:
        return self._link

    @property
    def cache_hit_rate(self) -> float:
        prompt = _total(self._prompt_tokens)
        return _total(self._cached_tokens) / prompt if prompt else 0.0

    def observe_request(
        self,
        *,
        finish_reason: str,
        num_prompt_tokens: int,
        num_sampled_tokens: int,
        num_cached_tokens: int = 0,
        e2e_s: float,
        queue_s: float | None = None,
        first_token_s: float | None = None,
    ) -> None:
        """One sample that ended, each of n. ``finish_reason``: stop, length, abort, or a kind of failure."""
        name = self.model_name
        self._num_requests.labels(name).inc()
        self._by_reason.labels(name, finish_reason).inc()
        self._prompt_tokens.labels(name).inc(num_prompt_tokens)
        self._generation_tokens.labels(name).inc(num_sampled_tokens)
        self._cached_tokens.labels(name).inc(num_cached_tokens)
        self._e2e.labels(name).observe(e2e_s)
        if queue_s is not None:
            self._queue.labels(name).observe(queue_s)
        if first_token_s is not None:
            self._first.labels(name).observe(first_token_s)
        began = first_token_s if first_token_s is not None else queue_s
        if began is not None and num_sampled_tokens > 1:
            self._between.labels(name).observe(max(0.0, e2e_s - began) / (num_sampled_tokens - 1))

    def observe_update(self, outcome: str, seconds: float) -> None:
        """``outcome``: committed or failed."""
        self._updates.labels(self.model_name, outcome).inc()
        if outcome == "committed":
            self._update_s.labels(self.model_name).observe(seconds)

    def text(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self.registry)

    def throughput(self) -> float:
        """Tokens per second between this call and earlier ones, of the last half minute."""
        return self._rate.update(self._link.beat.counters.get("num_sampled_tokens", 0))

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, ("model_name", *labels), registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, ("model_name",), registry=self.registry, buckets=buckets)


class Rate:
    """Growth per second of a counter that is looked at now and then, and starts anew with its process."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def update(self, count: int, now: float | None = None) -> float:
        now = time.monotonic() if now is None else now
        if self._seen and count < self._seen[-1][1]:
            self._seen.clear()
        self._seen.append((now, count))
        while len(self._seen) > 2 and now - self._seen[1][0] > _RATE_WINDOW_S:
            self._seen.popleft()
        before, first = self._seen[0]
        return (count - first) / (now - before) if now > before else 0.0


class _EngineCollector(Collector):
    """Reads the latest beat at each scrape."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def describe(self) -> Iterator[Metric]:
        """Nothing: a scrape would need an engine."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        name = self._metrics.model_name
        link = self._metrics.link
        yield _states(link.state, name)
        restarts = CounterMetricFamily(
            "unison_engine_restarts", "Engine processes that were replaced", labels=["model_name"]
        )
        restarts.add_metric([name], link.num_restarts)
        yield restarts
        if link.state in ("starting", "dead"):
            return
        for key, value in self._gauges().items():
            gauge = GaugeMetricFamily(key, ENGINE_GAUGES[key], labels=["model_name"])
            gauge.add_metric([name], value)
            yield gauge
        counters = link.beat.counters
        for key, (metric, text) in ENGINE_COUNTERS.items():
            counter = CounterMetricFamily(metric, text, labels=["model_name"])
            counter.add_metric([name], counters.get(key, 0))
            yield counter
        # A gauge by SGLang's name and meaning: what the process has pushed back so far.
        retracted = GaugeMetricFamily(
            "sglang:num_retracted_reqs", "Requests pushed back for memory", labels=["model_name"]
        )
        retracted.add_metric([name], counters.get("num_retractions", 0))
        yield retracted

    def _gauges(self) -> dict[str, float]:
        link = self._metrics.link
        beat = link.beat
        return {
            "sglang:num_running_reqs": beat.num_running,
            "sglang:num_queue_reqs": beat.num_waiting,
            "sglang:num_paused_reqs": beat.num_running + beat.num_waiting if beat.pause_mode else 0,
            "sglang:num_used_tokens": beat.num_used_tokens,
            "sglang:token_usage": beat.num_used_tokens / beat.kv_tokens if beat.kv_tokens else 0.0,
            "sglang:cache_hit_rate": self._metrics.cache_hit_rate,
            "sglang:gen_throughput": self._metrics.throughput(),
            "unison_weight_version": link.version,
            "unison_silence_seconds": link.silence_s,
        }


def _states(state: str, name: str) -> Metric:
    family = GaugeMetricFamily("unison_state", "1 for the state that holds", labels=["model_name", "state"])
    for known in _STATES:
        family.add_metric([name, known], float(known == state))
    return family


def _total(counter: Counter) -> float:
    return sum(s.value for metric in counter.collect() for s in metric.samples if s.name.endswith("_total"))
