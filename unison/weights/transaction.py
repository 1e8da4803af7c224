"""An update of a model's weights: begin, stage tensor by tensor, then commit or abort.

shadow    tensors are staged into a second copy; commit swaps the two; a failure leaves the old
          version serving. Needs the memory of the model once more.
in_place  tensors are written straight into the live weights; from the first one on the weights
          are incomplete until a commit succeeds.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from unison.core.errors import ModelError, WeightUpdateError
from unison.models.decoder import Decoder
from unison.models.loading import WeightLoader
from unison.models.names import published_tensors
from unison.weights.checksum import tensors_digest

Staging = Literal["shadow", "in_place"]


@dataclass(frozen=True, slots=True)
class Commit:
    """What a committed update came to."""

    version: int
    checksum: str
    num_tensors: int


class Derived(Protocol):
    """Tensors computed from the weights: dropped before the weights change, made anew after a commit."""

    def forget(self) -> None: ...

    def remake(self) -> None: ...


class WeightStore:
    """The live weights of one model with their version; at most one update is open at a time."""

    def __init__(
        self, model: Decoder, version: int = 0, staging: Staging = "shadow", derived: Derived | None = None
    ) -> None:
        if staging not in get_args(Staging):
            raise WeightUpdateError(f"staging={staging!r} is unknown; use one of {', '.join(get_args(Staging))}")
        self.model = model
        self.version = version
        self.complete = True
        """False while the live weights are a mixture; nothing may be sampled from them."""
        self.staging = staging
        self.lock = threading.RLock()
        """Held by whoever computes with the live weights, and while they change: never between two layers."""
        self._derived = derived
        self._spare: dict[str, Tensor] | None = None
        self._open: WeightTransaction | None = None

    def begin(self, version: int) -> WeightTransaction:
        """Open an update to ``version``. Raises WeightUpdateError while another one is open."""
        if self._open is not None:
            raise WeightUpdateError(f"update to version {self._open.version} is still open; commit or abort it first")
        if version <= self.version:
            raise WeightUpdateError(f"version {version} is not above the present version {self.version}")
        self._open = WeightTransaction(self, version, self._targets())
        return self._open

    def checksum(self) -> str:
        """Digest of the live weights under their published names."""
        return tensors_digest(published_tensors(self.model))

    def _live(self) -> dict[str, Tensor]:
        return {name: parameter.data for name, parameter in self.model.named_parameters()}

    def _targets(self) -> dict[str, Tensor]:
        if self.staging == "in_place":
            return self._live()
        if self._spare is None:
            self._spare = {name: torch.empty_like(tensor) for name, tensor in self._live().items()}
        return self._spare

    def _adopt(self, transaction: WeightTransaction) -> None:
        with self.lock:
            self._forget_derived()
            if self.staging == "shadow":
                spare = self._live()
                for name, parameter in self.model.named_parameters():
                    parameter.data = transaction.targets[name]
                self._spare = spare
            self.version = transaction.version
            self.complete = True
            self._open = None
            # Last: should it fail, the new version serves all the same, without what is derived from it.
            if self._derived is not None:
                self._derived.remake()

    def _drop(self) -> None:
        self._open = None

    def _forget_derived(self) -> None:
        if self._derived is not None:
            self._derived.forget()

    @property
    def num_bytes(self) -> int:
        """Memory of one copy of the weights."""
        return sum(parameter.numel() * parameter.element_size() for parameter in self.model.parameters())

    def invalidate(self) -> None:
        """Nothing may be computed with the live weights until a complete update is committed."""
        with self.lock:
            self.complete = False
            self._forget_derived()

    def discard(self) -> int:
        """Free the weights, their second copy and what is derived; the bytes of both copies. See ``invalidate``.

        Parameters keep their shapes over a single element. Raises WeightUpdateError while an update is open.
        """
        with self.lock:
            if self._open is not None:
                raise WeightUpdateError(
                    f"update to version {self._open.version} is open; commit or abort it before its weights go"
                )
            self.invalidate()
            freed = self.num_bytes * (1 if self._spare is None else 2)
            self._spare = None
            for parameter in self.model.parameters():
                parameter.data = parameter.data.new_zeros(()).expand(parameter.shape)
            return freed

    def restore(self) -> None:
        """Memory for weights that were discarded, with nothing in it yet."""
        with self.lock:
            for parameter in self.model.parameters():
                parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)


class WeightTransaction:
    """One open update. Any error in it leaves the store as its staging promises."""

    def __init__(self, store: WeightStore, version: int, targets: dict[str, Tensor]) -> None:
        self.version = version
        self.targets = targets
        self._store = store
        self._loader = WeightLoader(store.model.spec, targets)
        self._num_tensors = 0
        self._closed = False

    def stage(self, name: str, tensor: Tensor, *, target: str = "base") -> None:
        """Stage one whole published tensor; it is cast to the model's dtype by one rounding."""
        self._check_open()
        if target != "base":
            raise WeightUpdateError(f"target={target!r} is not supported by this engine; only base is")
        try:
            if self._store.staging == "in_place":
                self._write_live(name, tensor)
            else:
                self._loader.write(name, tensor)
        except ModelError as error:
            raise WeightUpdateError(f"update to version {self.version}: {error}") from error
        self._num_tensors += 1

    def _write_live(self, name: str, tensor: Tensor) -> None:
        store = self._store
        with store.lock:
            was_complete, store.complete = store.complete, False
            try:
                self._loader.write(name, tensor)
            except ModelError:
                # A refused tensor was not written: the weights are what they were.
                store.complete = was_complete
                raise
            finally:
                if not store.complete:
                    store._forget_derived()

    def commit(self, expected_checksum: str | None = None) -> Commit:
        """Publish the version if the set is complete (and its checksum as expected); else raise and stay open."""
        self._check_open()
        try:
            self._loader.finish()
        except ModelError as error:
            raise WeightUpdateError(f"update to version {self.version}: {error}") from error
        checksum = tensors_digest(published_tensors(self._store.model, self.targets))
        if expected_checksum is not None and checksum != expected_checksum:
            raise WeightUpdateError(
                f"update to version {self.version}: checksum {checksum[:16]} differs from the sender's "
                f"{expected_checksum[:16]}; the tensors changed on the way"
            )
        self._closed = True
        self._store._adopt(self)
        return Commit(self.version, checksum, self._num_tensors)

    def abort(self) -> None:
        """Give the update up. Under in_place the weights stay incomplete if anything was staged."""
        if not self._closed:
            self._closed = True
            self._store._drop()

    def _check_open(self) -> None:
        if self._closed:
            raise WeightUpdateError(f"update to version {self.version} is closed")
