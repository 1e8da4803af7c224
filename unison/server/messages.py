"""What front end and engine process say to each other: frames of typed MessagePack structs, never pickle.

A frame is a list of messages. The front end names each request by a slot, a small integer that it gives again only
when the request has ended; the engine knows weight versions as integers, labels are the front end's.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from unison.config.schema import EngineConfig
from unison.config.serving import Staging
from unison.core.records import GenerationOutput, GenerationRequest, OutputDelta
from unison.engine.lifecycle import MemoryTag, PauseMode
from unison.processes.shared_memory import Handle
from unison.weights.cuda_ipc import CudaIpcHandle
from unison.weights.manifest import BufferLayout

EngineState = Literal["running", "paused", "updating", "weights_invalid", "released"]
"""updating: an in_place update is open, nothing is sampled. weights_invalid: nothing is, until a complete commit."""


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of all messages; the tag is the class's name."""


# From the front end ----------------------------------------------------------------------------------------------


class Setup(Message, frozen=True):
    """The first message. ``segments``: descriptors the process inherits, of the two copies of the weights, and their
    size; none under in_place. ``live`` is the one that holds version ``version``, None where the folder's are loaded.
    """

    model: str
    dtype: str
    numerics: str
    engine: EngineConfig
    staging: Staging
    threads: int
    version: int = 0
    segments: tuple[int, ...] = ()
    segment_bytes: int = 0
    live: int | None = None
    weights_lost: bool = False
    """The weights of ``version`` went with the process before this one: refuse to sample until they are pushed."""
    profile_dir: str = "profiles"


class Submit(Message, frozen=True):
    """``streamed`` asks for StreamPieces; token ids and log-probs come as Progress in any case."""

    slot: int
    request: GenerationRequest
    streamed: bool = False


class Abort(Message, frozen=True):
    """The requests in these slots, or all."""

    slots: list[int] | None


class Command(Message, frozen=True):
    """Answered by a Reply of the same number."""

    call_id: int
    action: Action


class Stop(Message, frozen=True):
    """End the process."""


# Actions ---------------------------------------------------------------------------------------------------------


class Pause(Message, frozen=True):
    mode: PauseMode


class Continue(Message, frozen=True):
    pass


class FlushCache(Message, frozen=True):
    """Refused while requests hold keys and values."""


class ReleaseMemory(Message, frozen=True):
    tags: tuple[MemoryTag, ...]


class ResumeMemory(Message, frozen=True):
    tags: tuple[MemoryTag, ...]


class BumpVersion(Message, frozen=True):
    """Call the present weights ``version`` from the next token on."""

    version: int


class BeginUpdate(Message, frozen=True):
    version: int
    target: str = "base"


class RegisterLayout(Message, frozen=True):
    layout: BufferLayout


class StageHandle(Message, frozen=True):
    """Tensors in shared memory, laid out as a registered layout says (or the one given)."""

    version: int
    handle: Handle | CudaIpcHandle
    layout_id: str = ""
    layout: BufferLayout | None = None
    checksum: str | None = None
    """xxh3_128 (hex) of the buffer's bytes, compared before anything is copied."""


class StageBytes(Message, frozen=True):
    """Tensors in the message itself: for small ones, and for clients without shared memory."""

    version: int
    layout: BufferLayout
    data: bytes


class JoinGroup(Message, frozen=True):
    """Join a stand-alone process group as ``rank`` of ``world_size``; rank 0 sends."""

    name: str
    address: str
    port: int
    rank: int
    world_size: int
    backend: str
    timeout_s: float


class LeaveGroup(Message, frozen=True):
    name: str


class StageGroup(Message, frozen=True):
    """Receive from a group: one broadcast per entry in list order, or (``flattened``) one of the whole buffer."""

    version: int
    group: str
    layout: BufferLayout | None
    layout_id: str = ""
    flattened: bool = False
    timeout_s: float = 120.0


class StageDisk(Message, frozen=True):
    """All tensors of a folder of safetensors, or a delta on the version that is live."""

    version: int
    path: str


class PrepareUpdate(Message, frozen=True):
    """First phase: the set is complete and its checksum (``weights_checksum``) is the one given, if any."""

    version: int
    checksum: str | None = None


class CommitUpdate(Message, frozen=True):
    version: int


class AbortUpdate(Message, frozen=True):
    """None: whichever is open."""

    version: int | None = None
    reason: str = ""


class WeightsByName(Message, frozen=True):
    name: str
    truncate: int


class CheckWeights(Message, frozen=True):
    action: Literal["checksum", "snapshot", "reset_tensors", "compare"]


class StartProfile(Message, frozen=True):
    folder: str
    num_steps: int | None
    with_stack: bool = False
    record_shapes: bool = False


class StopProfile(Message, frozen=True):
    pass


class CheckIntegrity(Message, frozen=True):
    """Whether every page of the KV pool is accounted for."""


Action = (
    Pause
    | Continue
    | FlushCache
    | ReleaseMemory
    | ResumeMemory
    | BumpVersion
    | BeginUpdate
    | RegisterLayout
    | StageHandle
    | StageBytes
    | JoinGroup
    | LeaveGroup
    | StageGroup
    | StageDisk
    | PrepareUpdate
    | CommitUpdate
    | AbortUpdate
    | WeightsByName
    | CheckWeights
    | StartProfile
    | StopProfile
    | CheckIntegrity
)


# From the engine -------------------------------------------------------------------------------------------------


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine process says of itself once it can serve. ``path`` is the model's folder."""

    path: str
    family: str
    dtype: str
    numerics: str
    vocab_size: int
    context_length: int
    num_parameters: int
    weight_bytes: int
    end_ids: tuple[int, ...]
    kv_tokens: int
    page_size: int
    threads: int
    sampler: str
    torch: str
    pid: int
    checksum: str
    """``weights_checksum`` of the live weights."""
    architecture: str = ""
    """``DecoderSpec.digest``."""
    policy: str = "fcfs"
    """``EngineConfig.policy``: whether priorities count."""
    notes: tuple[str, ...] = ()


class Ready(Message, frozen=True):
    info: EngineInfo
    version: int


class NotStarted(Message, frozen=True):
    reason: str


class Progress(Message, frozen=True):
    """What one step sampled: one token for each slot, all under one version."""

    version: int
    slots: list[int]
    token_ids: list[int]
    logprobs: list[float]


class StreamPiece(Message, frozen=True):
    """What is new in a streamed request, text included; never the last piece."""

    slot: int
    delta: OutputDelta


class Ended(Message, frozen=True):
    slot: int
    output: GenerationOutput
    num_retractions: int = 0
    queue_s: float = 0.0
    """From its arrival until its first token was computed."""


class Failed(Message, frozen=True):
    """A request that could not be served; ``output`` is what it had come to, if it had begun."""

    slot: int
    kind: Literal["request", "capacity", "queue_full", "non_finite", "state", "internal"]
    message: str
    output: GenerationOutput | None = None


class Reply(Message, frozen=True):
    """``kind`` names the error where there was one: request (400), state (409), update (400), internal (500)."""

    call_id: int
    result: dict[str, Any] = {}
    error: str | None = None
    kind: Literal["", "request", "state", "update", "internal"] = ""


class Beat(Message, frozen=True):
    """At least once a second while nothing else is said, and after every change of state."""

    state: EngineState
    version: int
    pause_mode: PauseMode | None = None
    released: tuple[MemoryTag, ...] = ()
    open_update: int | None = None
    reason: str = ""
    """Why nothing is sampled, under weights_invalid."""
    num_running: int = 0
    num_waiting: int = 0
    num_used_tokens: int = 0
    num_cached_tokens: int = 0
    kv_tokens: int = 0
    counters: dict[str, int] = {}
    """Those of EngineStats that only grow."""


ToEngine = list[Setup | Submit | Abort | Command | Stop]
ToFrontEnd = list[Ready | NotStarted | Progress | StreamPiece | Ended | Failed | Reply | Beat]
