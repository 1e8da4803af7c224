"""Probes tell the truth: of the event loop, of being ready, and of the scheduler itself."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.conftest import MakeFront
from tests.server.http_support import call, call_all, link_of
from unison.server.front import Front

ALL = ("/health", "/health_generate", "/live", "/ready")


def test_a_healthy_server_answers_with_nothing(front: Front) -> None:
    for path in ALL:
        response = call(front, path, method="GET")
        assert (response.status_code, response.content) == (200, b"")


def test_a_scheduler_that_does_not_answer_is_no_health(make_front: MakeFront) -> None:
    front = make_front(health_s=0.1)
    link_of(front).hangs = True
    for path in ("/health", "/health_generate"):
        response = call(front, path, method="GET")
        assert (response.status_code, response.json()["error"]["type"]) == (503, "unhealthy")
    assert call(front, "/live", method="GET").status_code == 200
    link_of(front).hangs = False
    assert call(front, "/health", method="GET").status_code == 200


def test_probes_at_one_time_share_one_proof(front: Front) -> None:
    before = link_of(front).num_probes
    responses = call_all(front, [{"method": "GET", "url": "/health"}] * 20)
    assert [response.status_code for response in responses] == [200] * 20
    assert link_of(front).num_probes == before + 1


@pytest.mark.parametrize("state", ["starting", "restarting", "stopping", "dead"])
def test_a_server_without_its_engine_is_neither_healthy_nor_ready(front: Front, state: Any) -> None:
    link_of(front).state = state
    for path in ("/health", "/health_generate", "/ready"):
        assert call(front, path, method="GET").status_code == 503
    assert call(front, "/live", method="GET").status_code == (503 if state == "dead" else 200)


def test_a_server_that_drains_is_not_ready_but_lives(front: Front) -> None:
    front.is_draining = True
    assert call(front, "/health", method="GET").json()["error"]["type"] == "draining"
    assert call(front, "/ready", method="GET").status_code == 503
    assert call(front, "/live", method="GET").status_code == 200


def test_lost_weights_are_no_reason_to_be_killed(front: Front) -> None:
    link_of(front).state = "weights_invalid"
    assert call(front, "/health", method="GET").status_code == 200
    assert call(front, "/ready", method="GET").json()["error"]["type"] == "weights_invalid"


def test_a_silent_engine_process_shows_in_live(front: Front) -> None:
    link_of(front).silence_s = front.config.hang_s + 1
    response = call(front, "/live", method="GET")
    assert (response.status_code, response.json()["error"]["type"]) == (503, "silent")
