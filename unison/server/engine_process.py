"""The engine process: builds an engine as it is told to, and hosts it until the front end is gone."""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Final

import torch

from unison.core.errors import UnisonError
from unison.engine.end_tokens import end_token_ids
from unison.engine.engine import Engine
from unison.engine.sampler import SAMPLER_NAME
from unison.models.decoder import Decoder
from unison.models.loading import load_weights, read_config
from unison.models.names import published_tensors
from unison.models.numerics import NumericsChoice, choose_numerics
from unison.models.registry import read_spec
from unison.models.sources import resolve_model
from unison.observability.environment import available_cores
from unison.processes.channel import Channel
from unison.processes.parent import end_with
from unison.server.host import Host
from unison.server.messages import EngineInfo, NotStarted, Ready, Setup, ToEngine
from unison.text.tokenizer import Tokenizer
from unison.weights.arena import Arena, ArenaLayout, model_over
from unison.weights.checksum import weights_checksum

_EXIT_FAILED: Final = 1


def main() -> None:
    """``sys.argv``: the descriptor of the channel, and the front end's pid."""
    fd, parent = int(sys.argv[1]), int(sys.argv[2])
    if not end_with(parent):
        os._exit(_EXIT_FAILED)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    channel: Channel[ToEngine] = Channel(socket.socket(fileno=fd), ToEngine)
    setup = _first(channel)
    if setup is None:
        os._exit(_EXIT_FAILED)
    try:
        host, info = build_host(setup, channel)
    except UnisonError as error:
        channel.send([NotStarted(str(error))])
        os._exit(_EXIT_FAILED)
    except (RuntimeError, MemoryError) as error:
        # torch's own, for memory it does not get.
        reason = str(error).split("\n", 1)[0]
        text = f"the engine cannot be built ({type(error).__name__}: {reason}); perhaps a lower engine.kv_tokens fits"
        channel.send([NotStarted(text)])
        os._exit(_EXIT_FAILED)
    channel.send([Ready(info, host.engine.weights.version)])
    try:
        host.run()
    except BaseException:
        traceback.print_exc()
        os._exit(_EXIT_FAILED)
    # Not by falling off the end: a receive that waits for a sender would keep the process.
    os._exit(0)


def build_host(setup: Setup, channel: Channel[ToEngine]) -> tuple[Host, EngineInfo]:
    """The engine that ``setup`` describes, and what it says of itself. Raises UnisonError where it cannot be."""
    torch.set_num_threads(setup.threads or available_cores())
    folder = resolve_model(setup.model)
    spec = read_spec(read_config(folder))
    choice = choose_numerics(spec, setup.dtype, setup.numerics)
    tokenizer = Tokenizer.from_folder(folder) if (folder / "tokenizer.json").is_file() else None
    arenas = _arenas(setup, ArenaLayout.of(spec, choice.dtype))
    engine = Engine(
        _model(setup, folder, arenas[setup.live or 0]),
        path=choice.path,
        config=setup.engine,
        tokenizer=tokenizer,
        end_ids=end_token_ids(folder, tokenizer.eos_token_id if tokenizer is not None else None),
        version=setup.version,
        staging=setup.staging,
        arenas=arenas,
        live_index=setup.live or 0,
    )
    if setup.weights_lost:
        engine.invalidate_weights(f"version {setup.version} went with the engine process that held it")
    return Host(engine, channel, setup.profile_dir), _info(engine, folder, choice)


def _arenas(setup: Setup, layout: ArenaLayout) -> tuple[Arena, ...]:
    """Both copies of the weights, in the front end's memory; under in_place the one there is, in this process's."""
    if not setup.segments:
        return (Arena(layout, mmap.mmap(-1, layout.num_bytes)),)
    return tuple(Arena(layout, mmap.mmap(fd, setup.segment_bytes)) for fd in setup.segments)


def _model(setup: Setup, folder: Path, arena: Arena) -> Decoder:
    """The weights of the version that is to be served; the folder's where none was committed yet."""
    model = model_over(arena)
    if setup.live is None and not setup.weights_lost:
        load_weights(model, folder)
    return model


def _info(engine: Engine, folder: Path, choice: NumericsChoice) -> EngineInfo:
    spec = engine.model.spec
    tensors = published_tensors(engine.model)
    return EngineInfo(
        path=str(folder),
        family=spec.family,
        dtype=choice.dtype_name,
        numerics=choice.path.name,
        vocab_size=spec.vocab_size,
        context_length=engine.context_length,
        num_parameters=spec.num_parameters(),
        weight_bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()),
        end_ids=tuple(sorted(engine.end_ids)),
        kv_tokens=engine.pool.num_tokens,
        page_size=engine.pool.page_size,
        policy=engine.config.policy,
        threads=torch.get_num_threads(),
        sampler=SAMPLER_NAME,
        torch=str(torch.__version__),
        pid=os.getpid(),
        checksum=weights_checksum(tensors),
        architecture=spec.digest,
        notes=(*choice.notes, *engine.notes),
    )


def _first(channel: Channel[ToEngine]) -> Setup | None:
    """The first message; None where the other side is gone before it."""
    while not channel.is_closed:
        for messages in channel.receive(1.0):
            if messages and isinstance(messages[0], Setup):
                return messages[0]
            return None
    return None
