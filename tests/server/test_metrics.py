"""What a scrape shows, read back by Prometheus' own parser."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from tests.server.fake_link import FakeLink, make_front
from unison.server.front import Front
from unison.server.metrics import Rate

SGLANG_NAMES = {
    "sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:num_used_tokens", "sglang:token_usage",
    "sglang:cache_hit_rate", "sglang:gen_throughput", "sglang:num_retracted_reqs", "sglang:num_paused_reqs",
    "sglang:prompt_tokens_total", "sglang:generation_tokens_total", "sglang:cached_tokens_total",
    "sglang:queue_time_seconds_count", "sglang:e2e_request_latency_seconds_bucket",
    "sglang:time_to_first_token_seconds_sum", "sglang:inter_token_latency_seconds_count",
}  # fmt: skip


def samples(front: Front) -> dict[tuple[str, str], float]:
    """(name, the label beside the model's name) -> value."""
    found = {}
    for family in text_string_to_metric_families(front.metrics.text().decode()):
        for sample in family.samples:
            others = [value for label, value in sample.labels.items() if label not in ("model_name", "le")]
            assert sample.labels["model_name"] == "/models/tiny"
            found[sample.name, "".join(others)] = sample.value
    return found


def test_dashboards_find_the_names_they_know() -> None:
    front = make_front()
    front.metrics.observe_request(
        finish_reason="stop", num_prompt_tokens=10, num_sampled_tokens=5, e2e_s=1.0, queue_s=0.1, first_token_s=0.2
    )
    names = {name for name, _ in samples(front)}
    assert names >= SGLANG_NAMES, SGLANG_NAMES - names


def test_requests_are_counted_by_their_end() -> None:
    front = make_front()
    for reason, cached in (("stop", 4), ("length", 0), ("abort", 0), ("stop", 8)):
        front.metrics.observe_request(
            finish_reason=reason,
            num_prompt_tokens=10,
            num_sampled_tokens=5,
            num_cached_tokens=cached,
            e2e_s=1.0,
            queue_s=0.1,
            first_token_s=0.2,
        )
    found = samples(front)
    assert found["unison_requests_total", "stop"] == 2
    assert found["unison_requests_total", "abort"] == 1
    assert found["sglang:num_requests_total", ""] == 4
    assert found["sglang:prompt_tokens_total", ""] == 40
    assert found["sglang:generation_tokens_total", ""] == 20
    assert found["sglang:cached_tokens_total", ""] == 12
    assert found["sglang:cache_hit_rate", ""] == 0.3
    assert abs(found["sglang:inter_token_latency_seconds_sum", ""] - 4 * 0.8 / 4) < 1e-12


def test_a_scrape_reads_the_latest_beat() -> None:
    link = FakeLink(
        version=7, num_restarts=2, counters={"num_steps": 11, "num_retractions": 3, "num_sampled_tokens": 9}
    )
    front = make_front(link)
    link.num_running, link.pause_mode = 4, "in_place"
    found = samples(front)
    assert found["sglang:num_running_reqs", ""] == 4
    assert found["sglang:num_paused_reqs", ""] == 4
    assert found["sglang:num_used_tokens", ""] == 256
    assert found["sglang:token_usage", ""] == 0.25
    assert found["sglang:num_retracted_reqs", ""] == 3
    assert found["unison_weight_version", ""] == 7
    assert found["unison_engine_restarts_total", ""] == 2
    assert found["unison_steps_total", ""] == 11
    assert found["unison_state", "paused"] == 1 and found["unison_state", "running"] == 0


def test_a_scrape_of_a_server_without_an_engine_says_so() -> None:
    link = FakeLink()
    front = make_front(link)
    assert samples(front)["unison_state", "running"] == 1
    link.dead = True
    found = samples(front)
    assert found["unison_state", "restarting"] == 1


def test_two_front_ends_do_not_share_their_counters() -> None:
    one, other = make_front(), make_front()
    one.metrics.observe_update("committed", 1.0)
    assert ("unison_weight_updates_total", "committed") in samples(one)
    assert ("unison_weight_updates_total", "committed") not in samples(other)


def test_the_rate_is_that_of_the_last_half_minute_and_survives_a_new_process() -> None:
    rate = Rate()
    assert rate.update(100, now=0.0) == 0.0
    assert rate.update(300, now=10.0) == 20.0
    assert rate.update(300, now=20.0) == 10.0
    assert rate.update(300, now=200.0) == 0.0
    assert rate.update(50, now=201.0) == 0.0
    assert rate.update(60, now=203.0) == 5.0
