"""Settings of an engine behind HTTP: what ``unison serve`` is told, and what a training run says of its servers."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from unison.config.section import Section

Staging = Literal["shadow", "in_place"]


class LimitsConfig(Section, frozen=True, kw_only=True):
    """Bounds of what a client may send or cost, checked before anything is tokenised."""

    body_bytes: Annotated[int, Meta(ge=1024, description="Longest request body.")] = 32 << 20
    header_bytes: Annotated[int, Meta(ge=1024, description="Longest request head.")] = 64 << 10
    batch: Annotated[int, Meta(ge=1, description="Most prompts of one request, n copies counted.")] = 4096
    text_chars: Annotated[int, Meta(ge=1, description="Longest text of one prompt, in characters.")] = 4 << 20
    connections: Annotated[int, Meta(ge=1, description="Most open connections.")] = 4096
    read_s: Annotated[float, Meta(gt=0, description="Deadline in seconds of a request's body.")] = 60.0
    write_s: Annotated[
        float, Meta(gt=0, description="How long a client may leave its answer unread before it is given up.")
    ] = 120.0


class ServeConfig(Section, frozen=True, kw_only=True):
    """One server: a front end, and the engine process behind it."""

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 30000
    """0 takes a free one."""
    api_key: str | None = None
    """What clients must show to sample; None asks for nothing."""
    admin_key: str | None = None
    """What clients must show to control the server. Without one, control is open on loopback and closed beyond."""
    strict: bool = False
    """Refuse unknown request fields instead of listing them in the answer."""
    incremental_streaming: bool = False
    """Pieces of a streamed answer hold what is new, not all so far, where a request does not say."""
    staging: Staging = "shadow"
    threads: Annotated[int, Meta(ge=0, le=4096)] = 0
    """CPU threads of the engine; 0 takes the cores the process may use."""
    allow_pickled_tensors: bool = False
    """Accept SGLang's serialised tensors, read by an allow-list of exact classes and never executed."""
    profile_dir: str = "profiles"
    """Profiles are written under this folder and nowhere else."""
    health_s: Annotated[float, Meta(gt=0)] = 20.0
    """How long the probe through the scheduler may take."""
    hang_s: Annotated[float, Meta(gt=0)] = 120.0
    """An engine process that is silent for so long is killed and restarted."""
    update_s: Annotated[float, Meta(gt=0)] = 120.0
    """An open weight update nobody speaks of for so long is given up."""
    drain_s: Annotated[float, Meta(ge=0)] = 30.0
    """How long SIGTERM lets requests under way finish."""
    limits: LimitsConfig = LimitsConfig()


class ServersConfig(Section, frozen=True, kw_only=True):
    """The section ``[server]`` of a training run."""

    urls: Annotated[
        list[str], Meta(description="Servers that run already, like http://127.0.0.1:30000; empty starts own ones.")
    ] = []
    count: Annotated[int, Meta(ge=1, le=64, description="Servers that the run starts.")] = 1
    placement: Annotated[
        Literal["colocated", "own_cores"],
        Meta(
            description="colocated: servers and trainer take turns with cores and memory. own_cores: the cores are "
            "divided among them."
        ),
    ] = "colocated"
    staging: Annotated[
        Staging,
        Meta(
            description="shadow: an update is staged into a second copy and swapped in. in_place: into the live "
            "weights; less memory, and a failed update stops sampling until the next one."
        ),
    ] = "shadow"
    transport: Annotated[
        Literal["handles", "group", "disk"],
        Meta(
            description="How weights travel: handles of shared memory (same host), a process group, or files on disk."
        ),
    ] = "handles"
    bucket_mb: Annotated[
        int, Meta(ge=0, description="Size of one piece of an update in MB; 0 sends the model in one piece.")
    ] = 0
    disk_dir: Annotated[
        str | None, Meta(description="Folder of transport disk, seen by all servers; null takes one in the run folder.")
    ] = None
    disk_delta: Annotated[
        bool, Meta(description="Transport disk writes what changed since the last version, compressed.")
    ] = True
    admin_key_env: Annotated[
        str | None, Meta(description="Environment variable with the servers' admin key; own servers get a fresh one.")
    ] = None
    request_s: Annotated[
        float, Meta(gt=0, le=604800, description="Deadline in seconds of one request, restarts included.")
    ] = 3600.0
    update_s: Annotated[float, Meta(gt=0, le=86400, description="Deadline in seconds of one weight update.")] = 300.0
    start_s: Annotated[float, Meta(gt=0, le=86400, description="Deadline in seconds of a server's start.")] = 300.0
    silence_s: Annotated[
        float,
        Meta(
            gt=0, le=86400, description="A server that answers nothing for so long is given no requests until it does."
        ),
    ] = 20.0
