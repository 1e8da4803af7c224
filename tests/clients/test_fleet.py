"""A fleet of servers gives what one engine gives, whichever of them dies, hangs or lags."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor

from tests.clients.test_server_client import essence, make_engine, request
from unison.clients.fleet import Fleet, Plan
from unison.clients.launch import Launch, ServerProcess
from unison.clients.member import Member
from unison.clients.open import check_info, expectations
from unison.clients.transports import HandleTransport
from unison.config.load import load_config
from unison.config.schema import EngineConfig
from unison.config.serving import ServersConfig
from unison.core.errors import ConfigError, ServerError, WeightUpdateError
from unison.core.records import GenerationOutput, GenerationRequest
from unison.core.sampling import SamplingParams
from unison.engine.engine import Engine
from unison.models.names import published_tensors
from unison.weights.push import push_weights

TinyModelDir = Callable[..., Path]
LONG = SamplingParams(max_new_tokens=160, seed=7, ignore_eos=True)
SHORT = replace(LONG, max_new_tokens=6)


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallLaunch(Launch):
    """Starts the tests' own server."""

    def command(self, cores: Sequence[int], ready_fd: int) -> list[str]:
        words = Launch.command(self, cores, ready_fd)
        return [sys.executable, "-m", "tests.clients.small_server", *words[4:]]


@pytest.fixture(scope="module")
def folder(tiny_model_dir: TinyModelDir) -> Path:
    return tiny_model_dir()


@pytest.fixture(scope="module")
def reference(folder: Path) -> Engine:
    """An engine that is given the weights that the fleets of this file are given."""
    return make_engine(folder)


def open_small(folder: Path, reference: Engine, count: int = 1, **settings: Any) -> Fleet:
    launch = SmallLaunch(
        model=folder,
        dtype="float32",
        numerics="exact",
        engine=EngineConfig(kv_tokens=4096),
        staging=settings.get("staging", "shadow"),
        threads=1,
        start_s=60.0,
        update_s=60.0,
    )
    config = ServersConfig(**{"count": count, "silence_s": 1.0, "update_s": 20.0, "request_s": 60.0, **settings})
    expected = {"dtype": "float32", "numerics": "exact", "staging": config.staging}

    async def check(member: Member) -> None:
        check_info(member.name, await member.link.info(), expected)

    plan = Plan(
        config=config,
        dtype=torch.float32,
        check=check,
        transport=HandleTransport(config.bucket_mb << 20),
        processes=tuple(ServerProcess(launch) for _ in range(count)),
    )
    return Fleet(plan, published_tensors(reference.model))


@pytest.fixture(scope="module")
def both(folder: Path, reference: Engine) -> Iterator[Fleet]:
    with closing(open_small(folder, reference, 2)) as opened:
        yield opened


@pytest.fixture
def pair(both: Fleet) -> Fleet:
    """Two servers, whole again after what the test before did to them."""
    wait_for(lambda: all(member.is_ready for member in both.members), 60.0)
    both.events()
    return both


@pytest.fixture
def fresh(folder: Path) -> Engine:
    """A reference for a fleet of the test's own."""
    return make_engine(folder)


def publish_next(fleet: Fleet, engine: Engine) -> int:
    """A new version to both; its number."""
    version = fleet.version + 1
    tensors = changed(engine, version)
    fleet.publish(tensors, version)
    push_weights(engine.weights, tensors, version)
    return version


def changed(engine: Engine, step: int) -> dict[str, Tensor]:
    """Weights that a training step might have come to."""
    generator = torch.Generator().manual_seed(step)
    return {
        name: tensor + 0.02 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in published_tensors(engine.model).items()
    }


def requests(count: int, sampling: SamplingParams = LONG) -> list[GenerationRequest]:
    return [request(f"g{i // 4}/{i % 4}", replace(sampling, seed=i)) for i in range(count)]


def draw(
    fleet: Fleet, asked: Sequence[GenerationRequest], meanwhile: Callable[[], None] | None = None
) -> list[GenerationOutput]:
    async def all_of_them() -> list[GenerationOutput]:
        tasks = [asyncio.create_task(fleet.client.generate(one)) for one in asked]
        if meanwhile is not None:
            await asyncio.sleep(0.3)
            assert not all(task.done() for task in tasks)
            await asyncio.to_thread(meanwhile)
        return await asyncio.gather(*tasks)

    return asyncio.run(all_of_them())


def expected_of(engine: Engine, asked: Sequence[GenerationRequest]) -> list[GenerationOutput]:
    for one in asked:
        engine.add_request(one)
    found: dict[str, GenerationOutput] = {}
    while len(found) < len(asked):
        found |= {output.request_id: output for output in engine.step()}
    return [found[one.request_id] for one in asked]


def assert_same(found: Sequence[GenerationOutput], expected: Sequence[GenerationOutput]) -> None:
    assert [essence(output) for output in found] == [essence(output) for output in expected]


def spoil(member: Member, *faults: str) -> dict[str, Any]:
    """Arm faults; what the server has seen."""
    answer = httpx.post(f"{member.link.endpoint.url}/faults", json=list(faults), trust_env=False)
    return dict(answer.json())


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_fleet_samples_and_takes_weights_as_one_engine_does(pair: Fleet, reference: Engine) -> None:
    for _ in range(2):
        asked = requests(6, SHORT)
        assert_same(draw(pair, asked), expected_of(reference, asked))
        version = publish_next(pair, reference)
        assert pair.version == version
    asked = requests(6, SHORT)
    found = draw(pair, asked)
    assert_same(found, expected_of(reference, asked))
    assert {run.version for output in found for run in output.weight_versions} == {version}


def test_copies_of_a_prompt_go_to_one_server_and_prompts_are_spread(pair: Fleet, reference: Engine) -> None:
    asked = [replace(one, request_id=f"spread-{one.request_id}") for one in requests(16, SHORT)]
    assert_same(draw(pair, asked), expected_of(reference, asked))
    seen = [[body["rid"].partition("/")[0] for body in spoil(member)["seen"]] for member in pair.members]
    groups = [{name for name in names if name.startswith("spread")} for names in seen]
    assert not groups[0] & groups[1]
    assert len(groups[0]) == len(groups[1]) == 2


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_what_a_lost_server_was_at_is_drawn_elsewhere_to_the_bit(pair: Fleet, reference: Engine, how: str) -> None:
    asked = requests(8)
    lost = pair.members[0]
    assert lost.process is not None and lost.process.pid is not None
    pid = lost.process.pid
    number = signal.SIGKILL if how == "killed" else signal.SIGSTOP
    assert_same(draw(pair, asked, lambda: os.kill(pid, number)), expected_of(reference, asked))
    if how == "stopped":
        wait_for(lambda: lost.state == "fenced")
        os.kill(pid, signal.SIGCONT)
    wait_for(lambda: lost.is_ready, 60.0)
    assert (lost.process.pid == pid) == (how == "stopped")
    assert any("is given no requests" in event for event in pair.events())


def test_what_was_sampled_under_somebody_elses_label_is_drawn_again(pair: Fleet, reference: Engine) -> None:
    for member in pair.members:
        spoil(member, "foreign label")
    asked = requests(6, SHORT)
    assert_same(draw(pair, asked), expected_of(reference, asked))
    assert any('labelled "another trainer\'s"' in event for event in pair.events())


def test_a_refused_update_is_tried_once_more_and_then_the_old_version_goes_on(pair: Fleet, reference: Engine) -> None:
    spoil(pair.members[1], "spoil prepare")
    version = publish_next(pair, reference)
    spoil(pair.members[1], "spoil prepare", "spoil prepare")
    with pytest.raises(WeightUpdateError, match=f"version {version + 1} was not taken"):
        pair.publish(changed(reference, 99), version + 1)
    assert pair.version == version
    asked = requests(8, SHORT)
    assert_same(draw(pair, asked), expected_of(reference, asked))
    assert publish_next(pair, reference) == version + 1


def test_a_server_that_hangs_at_the_commit_is_fenced_until_it_has_caught_up(pair: Fleet, reference: Engine) -> None:
    straggler = pair.members[1]
    assert straggler.process is not None and straggler.process.pid is not None
    pid = straggler.process.pid
    stopping = asyncio.run_coroutine_threadsafe(_stop_at_commit(pair, pid), pair._background.loop)
    spoil(straggler, "hang commit")
    started = time.monotonic()
    version = publish_next(pair, reference)
    assert time.monotonic() - started < 15
    stopping.result()
    assert pair.version == version and straggler.state == "fenced" and pair.members[0].is_ready
    asked = requests(8, SHORT)
    assert_same(draw(pair, asked), expected_of(reference, asked))
    assert straggler.state == "fenced"
    os.kill(pid, signal.SIGCONT)
    wait_for(lambda: straggler.is_ready)
    # Now it alone answers, and under the present version.
    first = pair.members[0].process
    assert first is not None and first.pid is not None
    os.kill(first.pid, signal.SIGSTOP)
    try:
        assert_same(draw(pair, asked), expected_of(reference, asked))
    finally:
        os.kill(first.pid, signal.SIGCONT)


async def _stop_at_commit(fleet: Fleet, pid: int) -> None:
    before = fleet._keeper.present.version
    while fleet._keeper.present.version == before:
        await asyncio.sleep(0.005)
    os.kill(pid, signal.SIGSTOP)


def test_a_server_that_dies_while_it_prepares_leaves_the_others_to_go_on(pair: Fleet, reference: Engine) -> None:
    member = pair.members[0]
    spoil(member, "exit prepare")
    version = publish_next(pair, reference)
    wait_for(lambda: member.is_ready, 60.0)
    assert member.process is not None
    key = {"Authorization": f"Bearer {member.process.key}"}
    status = httpx.get(f"{member.link.endpoint.url}/weights/status", headers=key, trust_env=False).json()
    assert status["label"] == str(version) and status["checksum"] == pair._keeper.present.checksum


def test_an_abort_ends_all_requests_with_what_they_have(pair: Fleet, reference: Engine) -> None:
    asked = requests(8, replace(LONG, max_new_tokens=400))
    found = draw(pair, asked, pair.client.abort)
    whole = expected_of(reference, asked)
    assert all(output.finish_reason == "abort" for output in found)
    for output, full in zip(found, whole, strict=True):
        assert full.token_ids[: len(output.token_ids)] == output.token_ids


def test_a_server_that_runs_already_is_given_the_weights_it_lacks(pair: Fleet, fresh: Engine) -> None:
    member = pair.members[0]
    assert member.process is not None
    second = attached(member.link.endpoint.url, member.process.key, fresh, {"dtype": "float32"})
    try:
        asked = requests(4, SHORT)
        found = draw(second, asked)
        assert_same(found, expected_of(fresh, asked))
        assert {run.version for output in found for run in output.weight_versions} == {0}
        publish_next(second, fresh)
        assert_same(draw(second, asked), expected_of(fresh, asked))
    finally:
        second.close()
    assert is_alive(member.process.pid or 0)


def test_a_server_that_is_otherwise_is_refused_with_both_values(pair: Fleet, fresh: Engine) -> None:
    process = pair.members[0].process
    assert process is not None
    with pytest.raises(ConfigError, match="dtype 'float32', and this run needs 'bfloat16'"):
        attached(pair.members[0].link.endpoint.url, process.key, fresh, {"dtype": "bfloat16"})


@pytest.mark.slow
def test_the_only_server_is_started_anew_and_given_the_present_weights(folder: Path, fresh: Engine) -> None:
    with closing(open_small(folder, fresh)) as fleet:
        publish_next(fleet, fresh)
        member = fleet.members[0]
        assert member.process is not None and member.process.pid is not None
        pid = member.process.pid
        asked = requests(4)
        assert_same(draw(fleet, asked, lambda: os.kill(pid, signal.SIGKILL)), expected_of(fresh, asked))
        assert member.process.pid != pid
        assert any("given requests again, with version 1" in event for event in fleet.events())


@pytest.mark.slow
def test_a_commit_that_comes_too_late_everywhere_is_made_up_for(
    folder: Path, fresh: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(open_small(folder, fresh, update_s=6.0)) as fleet:
        commit = fleet._publisher.commit

        async def late(*args: Any) -> list[Member]:
            await asyncio.sleep(6.5)
            return await commit(*args)

        monkeypatch.setattr(fleet._publisher, "commit", late)
        spoil(fleet.members[0], "refuse commit")
        assert publish_next(fleet, fresh) == fleet.version == 1
        asked = requests(4, SHORT)
        assert_same(draw(fleet, asked), expected_of(fresh, asked))


@pytest.mark.slow
def test_in_place_a_failed_update_is_mended_with_the_version_before(folder: Path, fresh: Engine) -> None:
    with closing(open_small(folder, fresh, staging="in_place")) as fleet:
        publish_next(fleet, fresh)
        spoil(fleet.members[0], "spoil prepare", "spoil prepare")
        with pytest.raises(WeightUpdateError, match="version 2"):
            fleet.publish(changed(fresh, 2), 2)
        asked = requests(4, SHORT)
        assert_same(draw(fleet, asked), expected_of(fresh, asked))


@pytest.mark.slow
@pytest.mark.parametrize("staging", ["shadow", "in_place"])
def test_memory_is_given_up_for_training_and_taken_back(folder: Path, fresh: Engine, staging: str) -> None:
    with closing(open_small(folder, fresh, staging=staging)) as fleet:
        fleet.release_memory()
        publish_next(fleet, fresh)
        fleet.resume_memory()
        fleet.release_memory()
        fleet.resume_memory()  # nothing was published
        asked = requests(4, SHORT)
        assert_same(draw(fleet, asked), expected_of(fresh, asked))
        commands = spoil(fleet.members[0])["commands"]
        assert commands.count("release_memory_occupation") == commands.count("resume_memory_occupation") == 2
        assert commands.count("commit") == (2 if staging == "in_place" else 1)


def attached(url: str, key: str, reference: Engine, expected: dict[str, Any]) -> Fleet:
    async def check(member: Member) -> None:
        check_info(member.name, await member.link.info(), expected)

    config = ServersConfig(urls=[url], silence_s=1.0)
    plan = Plan(config=config, dtype=torch.float32, check=check, transport=HandleTransport(), key=key)
    return Fleet(plan, published_tensors(reference.model))


@pytest.mark.slow
def test_nothing_is_left_of_a_closed_fleet(folder: Path, reference: Engine) -> None:
    fleet = open_small(folder, reference, 2)
    pids = [member.process.pid for member in fleet.members if member.process is not None]
    assert all(pid is not None and is_alive(pid) for pid in pids)
    fleet.close()
    assert not any(is_alive(pid) for pid in pids if pid is not None)


@pytest.mark.slow
def test_servers_that_cannot_start_are_told_of_with_their_last_words(folder: Path, reference: Engine) -> None:
    with pytest.raises(ServerError, match=r"ended before it could serve.*no_such_model"):
        open_small(folder / "no_such_model", reference)


def test_expectations_cover_what_decides_over_bits(folder: Path) -> None:
    from unison.models.loading import read_config
    from unison.models.numerics import choose_numerics
    from unison.models.registry import read_spec

    spec = read_spec(read_config(folder))
    config = load_config([], ["--model.path", str(folder), "--rollout.engine", "server", "--trainer.steps", "0"]).config
    expected = expectations(config, choose_numerics(spec, "float32", "exact"), spec, {7, 2})
    assert set(expected) == {
        "dtype",
        "numerics",
        "sampler",
        "torch",
        "vocab_size",
        "num_parameters",
        "architecture",
        "end_ids",
        "staging",
    }
    assert expected["end_ids"] == [2, 7]
    other = replace(spec, norm_epsilon=2 * spec.norm_epsilon)
    assert other.num_parameters() == spec.num_parameters()
    assert other.digest != spec.digest
