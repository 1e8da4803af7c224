"""Push the weights of a model folder to a running server, as a trainer would after a step.

    python examples/push_weights.py --url http://127.0.0.1:30000 --model FOLDER --version 1 --transport handles

handles  shared memory of this process, on the server's machine
group    a process group of its own, in which this process is rank 0
disk     files in a folder that the server can read too

The server goes on sampling under its old version until the commit (staging ``shadow``). What it was sent must be what
this process meant to send: both sides compute the same checksum.
"""

from __future__ import annotations

import argparse
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import torch
from torch import Tensor

from unison.models.loading import read_config, stream_tensors
from unison.models.registry import read_spec
from unison.models.sources import resolve_model
from unison.weights.arena import ArenaLayout
from unison.weights.disk import write_full
from unison.weights.group import join_group, listen
from unison.weights.manifest import DTYPES
from unison.weights.outbox import Outbox


class Server:
    """The server's control routes; an update that is refused raises with the server's own words."""

    def __init__(self, url: str, key: str | None) -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=120)

    def get(self, route: str, /) -> Any:
        return self._read(self._http.get(route))

    def post(self, route: str, /, **body: Any) -> Any:
        return self._read(self._http.post(route, json=body))

    def _read(self, response: httpx.Response) -> Any:
        if response.status_code != 200:
            raise SystemExit(f"{response.url} answered {response.status_code}: {response.text}")
        return response.json()


def push(server: Server, tensors: dict[str, Tensor], layout: ArenaLayout, version: int, transport: str) -> str:
    """One update, whole or not at all; the checksum both sides agree on. Tensors are cast to the layout's dtype."""
    outbox = Outbox(layout)  # shared memory, laid out as the engine holds its weights
    try:
        filled = outbox.fill(tensors)
        server.post("/weights/begin", version=version, label=str(version))
        stage(server, filled, tensors, version, transport)
        server.post("/weights/prepare", version=version, checksum=filled.checksum)
        return str(server.post("/weights/commit", version=version)["checksum"])
    finally:
        outbox.close()


def stage(server: Server, filled: Any, tensors: dict[str, Tensor], version: int, transport: str) -> None:
    layout = msgspec.to_builtins(filled.layout)  # {"entries": [{"name", "dtype", "shape", "offset"}], "num_bytes"}
    if transport == "handles":
        handle = msgspec.to_builtins(filled.handle)  # {"type": "memfd", "pid", "fd", "num_bytes"}
        server.post("/weights/stage", version=version, transport="handles", handle=handle, layout=layout)
    elif transport == "group":
        stage_by_group(server, filled, layout, version)
    else:
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / f"version_{version:08d}"
            write_full(target, tensors, version=version, dtype=DTYPES[filled.layout.entries[0].dtype])
            server.post("/weights/stage", version=version, transport="disk", path=str(target))


def stage_by_group(server: Server, filled: Any, layout: dict[str, Any], version: int) -> None:
    """The server joins and receives while this process joins and sends, so its calls run beside ours."""
    listener = listen("127.0.0.1")
    port = listener.getsockname()[1]
    name = f"push-{port}"
    join = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2, "backend": "gloo"}
    with ThreadPoolExecutor(1) as beside:
        joined = beside.submit(server.post, "/init_weights_update_group", group_name=name, **join)
        group = join_group(name, "127.0.0.1", port, 0, 2, listener=listener)
        joined.result()
        body = {"transport": "group", "group": name, "layout": layout, "flattened": True, "timeout_s": 60}
        staged = beside.submit(server.post, "/weights/stage", version=version, **body)
        group.send_bucket(memory_of(filled))
        staged.result()
    group.leave()
    server.post("/destroy_weights_update_group", group_name=name)


def memory_of(filled: Any) -> Tensor:
    """The filled shared memory as one flat tensor."""
    from unison.weights.handles import Mappings

    return Mappings().memory(filled.handle)[: filled.layout.num_bytes].clone()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--key", help="the server's admin key, where it has one")
    parser.add_argument("--model", required=True, help="folder or short name of the weights to push")
    parser.add_argument("--version", type=int, help="above the present one; by default one more")
    parser.add_argument("--transport", choices=("handles", "group", "disk"), default="handles")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    server = Server(options.url, options.key)
    folder = resolve_model(options.model)
    dtype = DTYPES[server.get("/server_info")["dtype"]]
    version = options.version or server.get("/weights/status")["version"] + 1
    layout = ArenaLayout.of(read_spec(read_config(folder)), dtype)
    checksum = push(server, dict(stream_tensors(folder)), layout, version, options.transport)
    print(f"version {version} is live, checksum {checksum}")


if __name__ == "__main__":
    main()
