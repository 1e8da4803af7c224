"""Commands that the engine process does between two steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from unison.core.errors import EngineStateError, RequestError
from unison.models.names import canonical_name, published_tensors
from unison.server.host_profile import start_profile, stop_profile
from unison.server.messages import (
    BumpVersion,
    CheckIntegrity,
    CheckWeights,
    Continue,
    FlushCache,
    Message,
    Pause,
    ReleaseMemory,
    ResumeMemory,
    StartProfile,
    StopProfile,
    WeightsByName,
)
from unison.weights.checksum import weights_checksum

if TYPE_CHECKING:
    from unison.server.host import Host

Result = dict[str, Any]


def _pause(host: Host, action: Pause) -> Result:
    host.engine.pause(action.mode)
    return {"num_paused": len(host.engine.scheduler.running) + len(host.engine.scheduler.waiting)}


def _continue(host: Host, action: Continue) -> Result:
    host.engine.resume()
    return {}


def _flush(host: Host, action: FlushCache) -> Result:
    engine = host.engine
    waits = engine.scheduler.waiting and engine.pause_mode is None
    if engine.holds_keys or waits:
        raise EngineStateError(
            f"{len(engine.scheduler.running)} requests run and {len(engine.scheduler.waiting)} wait; the cache is "
            "flushed when none runs, or when generation is paused and none holds keys and values"
        )
    engine.flush_cache()
    return {}


def _release(host: Host, action: ReleaseMemory) -> Result:
    if host.desk.open_version is not None:
        raise EngineStateError(f"an update to version {host.desk.open_version} is open; commit or abort it first")
    return {"freed_bytes": host.engine.release_memory(action.tags)}


def _resume(host: Host, action: ResumeMemory) -> Result:
    host.engine.resume_memory(action.tags)
    return {}


def _bump(host: Host, action: BumpVersion) -> Result:
    if host.desk.open_version is not None:
        raise EngineStateError(f"an update to version {host.desk.open_version} is open; commit or abort it first")
    host.engine.weights.rename(action.version)
    return {"version": action.version}


def _by_name(host: Host, action: WeightsByName) -> Result:
    model = host.engine.model
    tensors = published_tensors(model)
    name = canonical_name(model.spec, action.name)
    if name not in tensors:
        raise RequestError(f"there is no tensor {action.name!r}; names are those of the model's checkpoint")
    return {"values": tensors[name][: action.truncate].float().tolist()}


def _check(host: Host, action: CheckWeights) -> Result:
    store = host.engine.weights
    checker = host.checker
    if action.action == "checksum":
        return {"checksum": weights_checksum(published_tensors(store.model)), "complete": store.complete}
    if action.action == "snapshot":
        return {"num_tensors": checker.snapshot()}
    if action.action == "reset_tensors":
        if host.desk.open_version is not None:
            raise EngineStateError(f"an update to version {host.desk.open_version} is open; commit or abort it first")
        checker.reset()
        host.engine.invalidate_weights("weights_checker has reset them")
        return {}
    return {"differing": checker.compare()}


def _integrity(host: Host, action: CheckIntegrity) -> Result:
    host.engine.check()
    return {}


COMMANDS: Final[dict[type[Message], Callable[[Host, Any], Result]]] = {
    Pause: _pause,
    Continue: _continue,
    FlushCache: _flush,
    ReleaseMemory: _release,
    ResumeMemory: _resume,
    BumpVersion: _bump,
    WeightsByName: _by_name,
    CheckWeights: _check,
    CheckIntegrity: _integrity,
    StartProfile: start_profile,
    StopProfile: stop_profile,
}
