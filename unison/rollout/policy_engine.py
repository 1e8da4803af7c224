"""What samples for a run: an engine in the run's own process, or servers, behind one protocol."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from unison.clients.fleet import Fleet
from unison.core.protocols import EngineClient
from unison.engine.client import InProcessClient
from unison.engine.engine import Engine
from unison.weights.checksum import tensors_digest
from unison.weights.push import push_weights


class PolicyEngine(Protocol):
    """The policy as a run samples from it; its calls come from the run's main thread."""

    @property
    def client(self) -> EngineClient: ...

    @property
    def version(self) -> int:
        """Of the weights that are served."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """Automatic choices, for people."""
        ...

    def checksum(self) -> str:
        """SHA-256 (``tensors_digest``) of the weights that are served."""
        ...

    def publish(self, tensors: Mapping[str, Tensor], version: int) -> str:
        """Serve these tensors, by their published names, from the next token on; their ``checksum``.

        Raises WeightUpdateError where that failed; what serves then is what the engine's staging promises.
        """
        ...

    def before_training(self) -> None:
        """No request is open, and none comes until ``after_training``: memory may be given to the trainer."""
        ...

    def after_training(self) -> None:
        """Training has ended: be ready for requests, whether anything was published or not."""
        ...

    def events(self) -> list[str]:
        """What went wrong with the engine and was mended since the last call, for people."""
        ...

    def placement(self) -> dict[str, Any]:
        """Where sampling takes place, as plain data for the run's manifest."""
        ...

    def close(self) -> None:
        """End what was started for it."""
        ...


class InProcessPolicy:
    """An engine in this process: weights are copied from tensor to tensor."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._client = InProcessClient(engine)

    @property
    def client(self) -> EngineClient:
        return self._client

    @property
    def version(self) -> int:
        return self.engine.weights.version

    @property
    def notes(self) -> Sequence[str]:
        return self.engine.notes

    def checksum(self) -> str:
        return self.engine.weights.checksum()

    def publish(self, tensors: Mapping[str, Tensor], version: int) -> str:
        return push_weights(self.engine.weights, tensors, version).checksum

    def before_training(self) -> None:
        pass

    def after_training(self) -> None:
        pass

    def events(self) -> list[str]:
        return []

    def placement(self) -> dict[str, Any]:
        return {"engine": "in_process"}

    def close(self) -> None:
        pass


class ServedPolicy:
    """Servers, which a fleet looks after. ``published`` are the weights they begin with, as version 0."""

    def __init__(self, make_fleet: Callable[[Mapping[str, Tensor]], Fleet], published: Mapping[str, Tensor]) -> None:
        self._digest = tensors_digest(published)
        self.fleet = make_fleet(published)

    @property
    def client(self) -> EngineClient:
        return self.fleet.client

    @property
    def version(self) -> int:
        return self.fleet.version

    @property
    def notes(self) -> Sequence[str]:
        return self.fleet.notes

    def checksum(self) -> str:
        return self._digest

    def publish(self, tensors: Mapping[str, Tensor], version: int) -> str:
        digest = tensors_digest(tensors)
        self.fleet.publish(tensors, version)
        self._digest = digest
        return digest

    def before_training(self) -> None:
        self.fleet.release_memory()

    def after_training(self) -> None:
        self.fleet.resume_memory()

    def events(self) -> list[str]:
        return self.fleet.events()

    def placement(self) -> dict[str, Any]:
        return {"engine": "server", **self.fleet.placement()}

    def close(self) -> None:
        self.fleet.close()
