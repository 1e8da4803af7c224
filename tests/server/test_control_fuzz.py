"""Many clients at once, any call at any time: nothing hangs, and nothing is half done."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Any

import pytest

from tests.server.fake_link import NAMES, Client, FakeLink, run
from unison.server.link import CommandFailed
from unison.server.messages import Action, CommitUpdate, StageGroup


@dataclass
class SlowLink(FakeLink):
    """Answers late, fails now and then, and sees that an update's commands never overlap."""

    def __post_init__(self) -> None:
        self.random = random.Random(0)
        self.num_busy = 0
        self.committed: list[int] = []

    async def command(self, action: Action, timeout_s: float = 60.0) -> dict[str, Any]:
        is_update = "Update" in type(action).__name__ or "Stage" in type(action).__name__
        self.num_busy += is_update
        assert self.num_busy <= 1
        try:
            await asyncio.sleep(self.random.random() * 0.004)
            if self.random.random() < 0.05:
                raise CommandFailed(self.random.choice(["update", "internal", "unavailable"]), "bad luck")
            if self.random.random() < 0.01:
                self.die()
            result = await super().command(action, timeout_s)
        finally:
            self.num_busy -= is_update
        if isinstance(action, CommitUpdate):
            self.committed.append(action.version)
        return result


def calls(rng: random.Random) -> list[tuple[str, dict[str, Any]]]:
    names = rng.sample(NAMES, rng.randint(1, 3))
    bucket = {"names": names, "dtypes": ["float32"] * len(names), "shapes": [[2]] * len(names), "group_name": "g"}
    version = rng.randint(0, 40)
    return [
        ("/update_weights_from_distributed", {**bucket, "flush_cache": rng.random() < 0.5}),
        ("/update_weights_from_distributed", {**bucket, "flush_cache": False, "weight_version": str(rng.random())}),
        ("/update_weights_from_disk", {"model_path": "/m", "weight_version": str(rng.random())}),
        ("/begin_weight_update", {}),
        ("/end_weight_update", {}),
        ("/update_weight_version", {"new_version": str(rng.random())}),
        ("/pause_generation", {"mode": rng.choice(["abort", "retract", "in_place"])}),
        ("/continue_generation", {}),
        ("/flush_cache", {}),
        ("/abort_request", {"abort_all": True}),
        ("/weights/begin", {"version": version, "label": str(version)}),
        ("/weights/stage", {"version": version, "transport": "disk", "path": "/m"}),
        ("/weights/prepare", {"version": version}),
        ("/weights/commit", {"version": version}),
        ("/weights/abort", {}),
    ]


@pytest.mark.parametrize("seed", range(4))
def test_calls_in_any_order_leave_one_consistent_update_or_none(seed: int) -> None:
    async def scenario(client: Client) -> None:
        async def one(number: int) -> None:
            rng = random.Random(seed * 1000 + number)
            for _ in range(25):
                path, body = rng.choice(calls(rng))
                answer = await client.post(path, **body)
                assert answer.status_code in (200, 400, 409, 500, 503), (path, answer.text)
                if answer.status_code == 500:
                    assert "bad luck" in answer.text

        await asyncio.gather(*(one(number) for number in range(8)))
        link = client.link
        assert isinstance(link, SlowLink)
        assert link.committed == sorted(set(link.committed)), "a version was committed twice, or after a later one"
        assert any(isinstance(action, StageGroup) for action in link.actions)
        await client.post("/weights/abort")
        await client.post("/end_weight_update")  # one that failed is kept in mind until it is ended
        assert client.front.updates.open is None
        # Whatever came before: the next whole update goes through, once luck has turned.
        link.random = random.Random(1)
        link.random.random = lambda: 0.5  # type: ignore[method-assign]
        link.open_version = None
        await client.ok("/update_weights_from_disk", model_path="/m", weight_version="last")
        assert (await client.get("/get_weight_version")).json() == {"weight_version": "last"}

    run(scenario, SlowLink())
