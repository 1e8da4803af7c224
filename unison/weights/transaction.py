"""An update of a model's weights: begin, stage tensors, prepare if two sides must agree, then commit or abort.

shadow    tensors are staged into a second copy; commit swaps the two; a failure leaves the old
          version serving. Needs the memory of the model once more.
in_place  tensors are written straight into the live weights; from the first one on the weights
          are incomplete until a commit succeeds.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from unison.core.errors import ModelError, WeightUpdateError
from unison.models.decoder import Decoder
from unison.models.loading import WeightLoader
from unison.models.names import published_tensors
from unison.weights.arena import Arena, ArenaLayout
from unison.weights.buffers import check_memory, check_twins, copy_buffer
from unison.weights.checksum import tensors_digest, weights_checksum
from unison.weights.finite import first_non_finite
from unison.weights.manifest import BufferLayout
from unison.weights.plan import CopyPlan, LayoutBook

Staging = Literal["shadow", "in_place"]


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a prepared update holds: ``checksum`` is the ``weights_checksum`` of what a commit will publish."""

    checksum: str
    num_tensors: int
    seconds: Mapping[str, float] = field(default_factory=dict, compare=False)
    """finite, checksum."""


@dataclass(frozen=True, slots=True)
class Commit:
    """What a committed update came to. ``checksum`` is the one of its preparation, else the ``tensors_digest``."""

    version: int
    checksum: str
    num_tensors: int
    seconds: Mapping[str, float] = field(default_factory=dict, compare=False)
    """swap: until the new version is live. repack: what is derived from it, made anew."""


class Derived(Protocol):
    """Tensors computed from the weights: dropped before the weights change, made anew after a commit."""

    def forget(self) -> None: ...

    def remake(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Copy:
    """One set of the weights: the parameters by name, and the arena in which they lie, if in one."""

    parameters: dict[str, Tensor]
    arena: Arena | None = None


class WeightStore:
    """The live weights of one model with their version; at most one update is open at a time."""

    def __init__(
        self,
        model: Decoder,
        version: int = 0,
        staging: Staging = "shadow",
        derived: Derived | None = None,
        *,
        arenas: Sequence[Arena] = (),
        live_index: int = 0,
    ) -> None:
        """``arenas``: where the weights lie and, under shadow, where the next ones are staged: two of them, and the
        model's weights in the one of ``live_index``; one under in_place. Without them the memory is the model's own.
        """
        if staging not in get_args(Staging):
            raise WeightUpdateError(f"staging={staging!r} is unknown; use one of {', '.join(get_args(Staging))}")
        self.model = model
        self.version = version
        self.complete = True
        """False while the live weights are a mixture; nothing may be sampled from them."""
        self.staging = staging
        self.live_index = live_index
        """Which of the arenas holds the live weights; 0 without arenas."""
        self.lock = threading.RLock()
        """Held by whoever computes with the live weights, and while they change: never between two layers."""
        self._derived = derived
        self._arenas = tuple(arenas)
        self._check_arenas()
        self._spare: dict[str, Tensor] | None = None
        self._open: WeightTransaction | None = None

    @cached_property
    def layout(self) -> ArenaLayout:
        """How the weights lie in one flat buffer, whether or not they do."""
        return ArenaLayout.of(self.model.spec, self.model.dtype)

    @cached_property
    def layouts(self) -> LayoutBook:
        """The layouts of buffers that senders have registered."""
        return LayoutBook(self.layout)

    @property
    def open_version(self) -> int | None:
        """The version of the open update."""
        return None if self._open is None else self._open.version

    def begin(self, version: int) -> WeightTransaction:
        """Open an update to ``version``. Raises WeightUpdateError while another one is open."""
        if self._open is not None:
            raise WeightUpdateError(f"update to version {self._open.version} is still open; commit or abort it first")
        if version <= self.version:
            raise WeightUpdateError(f"version {version} is not above the present version {self.version}")
        self._open = WeightTransaction(self, version, self._target())
        return self._open

    def rename(self, version: int) -> None:
        """Call the live weights ``version`` from now on. Raises WeightUpdateError where it is not above the present."""
        with self.lock:
            if version <= self.version:
                raise WeightUpdateError(f"version {version} is not above the present version {self.version}")
            self.version = version

    def checksum(self) -> str:
        """Digest of the live weights under their published names."""
        return tensors_digest(published_tensors(self.model))

    def weights_checksum(self) -> str:
        """The fast checksum of the live weights, which both sides of an update compare."""
        return weights_checksum(published_tensors(self.model))

    def _check_arenas(self) -> None:
        wanted = 2 if self.staging == "shadow" else 1
        if not self._arenas:
            if self.live_index:
                raise WeightUpdateError(f"live_index={self.live_index} names an arena, but there are none")
            return
        if len(self._arenas) != wanted:
            raise WeightUpdateError(f"{self.staging} staging needs {wanted} arenas, not {len(self._arenas)}")
        if not 0 <= self.live_index < wanted or not self._arenas[self.live_index].holds(self.model):
            raise WeightUpdateError(f"the model's weights do not lie in arena {self.live_index}; move them there first")

    def _live(self) -> dict[str, Tensor]:
        return {name: parameter.data for name, parameter in self.model.named_parameters()}

    def _target(self) -> Copy:
        if self._arenas:
            index = self.live_index if self.staging == "in_place" else 1 - self.live_index
            return Copy(self._arenas[index].parameters, self._arenas[index])
        if self.staging == "in_place":
            return Copy(self._live())
        if self._spare is None:
            self._spare = {name: torch.empty_like(tensor) for name, tensor in self._live().items()}
        return Copy(self._spare)

    def _adopt(self, transaction: WeightTransaction) -> dict[str, float]:
        """Make the staged weights the live ones; seconds of it. Called with the lock held."""
        started = time.perf_counter()
        self._forget_derived()
        if self.staging == "shadow":
            spare = self._live()
            for name, parameter in self.model.named_parameters():
                parameter.data = transaction.targets[name]
            if self._arenas:
                self.live_index = 1 - self.live_index
            else:
                self._spare = spare
        self.version = transaction.version
        self.complete = True
        self._open = None
        swapped = time.perf_counter()
        # Last: should it fail, the new version serves all the same, without what is derived from it.
        if self._derived is not None:
            self._derived.remake()
        return {"swap": swapped - started, "repack": time.perf_counter() - swapped}

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

        Parameters keep their shapes, over a single element or, in arenas, over pages that come back empty when they are
        touched. Raises WeightUpdateError while an update is open.
        """
        with self.lock:
            if self._open is not None:
                raise WeightUpdateError(
                    f"update to version {self._open.version} is open; commit or abort it before its weights go"
                )
            self.invalidate()
            if self._arenas:
                return sum(arena.release() for arena in self._arenas)
            freed = self.num_bytes * (1 if self._spare is None else 2)
            self._spare = None
            for parameter in self.model.parameters():
                parameter.data = parameter.data.new_zeros(()).expand(parameter.shape)
            return freed

    def restore(self) -> None:
        """Memory for weights that were discarded, with nothing in it yet."""
        with self.lock:
            if self._arenas:
                return
            for parameter in self.model.parameters():
                parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)


class WeightTransaction:
    """One open update. Any error in it leaves the store as its staging promises.

    For one thread at a time, abort included: what is still being received when another thread gives the update up
    would be written into the next one.
    """

    def __init__(self, store: WeightStore, version: int, copy: Copy) -> None:
        self.version = version
        self.targets = copy.parameters
        self._arena = copy.arena
        self._store = store
        self._loader = WeightLoader(store.model.spec, copy.parameters)
        self._num_tensors = 0
        self._prepared: Prepared | None = None
        self._closed = False

    @cached_property
    def _published(self) -> Mapping[str, Tensor]:
        """Published name -> where the tensor is staged."""
        return published_tensors(self._store.model, self.targets) if self._arena is None else self._arena.published

    def stage(self, name: str, tensor: Tensor, *, target: str = "base") -> None:
        """Stage one whole published tensor; it is cast to the model's dtype by one rounding."""
        self._check_open()
        if target != "base":
            raise WeightUpdateError(f"target={target!r} is not supported by this engine; only base is")
        with self._refusals(), self._writing():
            self._loader.write(name, tensor)
        self._num_tensors += 1

    def stage_buffer(self, layout: BufferLayout, memory: Tensor) -> int:
        """Stage all tensors of a flat uint8 buffer, cast where they have another dtype; how many they were.

        A refused buffer writes nothing. Buffers laid out as the weights themselves are copied in one piece.
        """
        self._check_open()
        with self._refusals():
            check_memory(memory, layout)
            plan = self._plan(layout)
            with self._writing():
                check_twins(plan, memory, self._published, self._store.model.dtype)
                copy_buffer(plan, memory, self._published, self._arena)
        return self._record(plan)

    def room_for(self, layout: BufferLayout) -> Tensor | None:
        """The staging memory itself, if a whole buffer of this layout may be received there; ``received`` ends it.

        None where it may not: receive it elsewhere and call ``stage_buffer``. Raises WeightUpdateError where that
        would refuse the layout.
        """
        self._check_open()
        with self._refusals():
            plan = self._plan(layout)
        if self._arena is None or self._store.staging == "in_place" or plan.span is None:
            return None
        self._prepared = None
        return self._arena.flat[plan.span : plan.span + layout.num_bytes]

    def received(self, layout: BufferLayout) -> int:
        """A buffer now lies complete in the memory that ``room_for`` gave out; how many tensors it holds."""
        self._check_open()
        with self._refusals():
            return self._record(self._plan(layout))

    @property
    def is_prepared(self) -> bool:
        """Whether it was prepared, and nothing was staged since."""
        return self._prepared is not None

    def prepare(self, expected_checksum: str | None = None, *, check_finite: bool = True) -> Prepared:
        """Whether the update could be committed as it is: complete, finite, and with the checksum expected.

        Changes nothing. Raises WeightUpdateError with the reason; more may be staged then. The commit that follows
        takes the checksum of this call.
        """
        self._check_open()
        with self._refusals():
            self._loader.finish()
            started = time.perf_counter()
            name = first_non_finite(self._published, self._arena) if check_finite else None
            if name is not None:
                raise WeightUpdateError(f"tensor {name!r} holds NaN or an infinity; weights must be finite")
        looked = time.perf_counter()
        checksum = weights_checksum(self._published)
        seconds = {"finite": looked - started, "checksum": time.perf_counter() - looked}
        self._compare(checksum, expected_checksum)
        self._prepared = Prepared(checksum, self._num_tensors, seconds)
        return self._prepared

    def commit(self, expected_checksum: str | None = None) -> Commit:
        """Publish the version if the set is complete (and its checksum as expected); else raise and stay open.

        Without a ``prepare`` before it, ``expected_checksum`` is a ``tensors_digest``.
        """
        self._check_open()
        prepared = self._prepared
        if prepared is not None:
            checksum = prepared.checksum
        else:
            with self._refusals():
                self._loader.finish()
            checksum = tensors_digest(self._published)
        self._compare(checksum, expected_checksum)
        with self._store.lock:
            self._closed = True
            return Commit(self.version, checksum, self._num_tensors, self._store._adopt(self))

    def abort(self) -> None:
        """Give the update up. Under in_place the weights stay incomplete if anything was staged."""
        if not self._closed:
            self._closed = True
            self._store._drop()

    def _plan(self, layout: BufferLayout) -> CopyPlan:
        plan = self._store.layouts.plan(layout, self._loader.written)
        self._loader.refuse_given(plan.names)
        return plan

    def _record(self, plan: CopyPlan) -> int:
        self._loader.record(plan.names)
        self._num_tensors += len(plan.names)
        self._prepared = None
        return len(plan.names)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Around the checks and the write of what is staged: under in_place the live weights change in it."""
        self._prepared = None
        store = self._store
        if store.staging == "shadow":
            yield
            return
        with store.lock:
            was_complete, store.complete = store.complete, False
            try:
                yield
            except (ModelError, WeightUpdateError):
                # What is refused was not written: the weights are what they were.
                store.complete = was_complete
                raise
            finally:
                if not store.complete:
                    store._forget_derived()

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except (ModelError, WeightUpdateError) as error:
            raise WeightUpdateError(f"update to version {self.version}: {error}") from error

    def _compare(self, checksum: str, expected: str | None) -> None:
        if expected is not None and checksum != expected:
            raise WeightUpdateError(
                f"update to version {self.version}: checksum {checksum[:16]} differs from the sender's "
                f"{expected[:16]}; the tensors changed on the way"
            )

    def _check_open(self) -> None:
        if self._closed:
            raise WeightUpdateError(f"update to version {self.version} is closed")
