"""What a checkpoint costs: how long the run stands still, the whole save, and loading it, beside a plain copy.

usage: saving.py [--model M] [--folder DIR] [--rounds N]

The state of a run on the model: float32 masters and two moments for each. The yardstick of standing still is one copy
of all of them in memory, since nothing that may go on while tensors are written can be done with less, unless the
tensors are left alone until they are written: that case is measured too.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from unison.checkpoint.load import load_newest
from unison.checkpoint.save import Saver
from unison.models.loading import load_model
from unison.models.sources import resolve_model

State = dict[str, dict[str, Tensor]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--folder", help="where to write; by default the system's folder for temporary files")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    state = state_of(options.model)
    size_bytes = sum(tensor.nbytes for members in state.values() for tensor in members.values())
    root = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        rows = [measure(state, root) for _ in range(options.rounds)]
    finally:
        shutil.rmtree(root)
    print(f"{size_bytes / 1e9:.2f} GB, {options.rounds} rounds, medians")
    copy_s = statistics.median(row["copy"] for row in rows)
    for name, what in LINES.items():
        seconds = statistics.median(row[name] for row in rows)
        print(
            f"{what:<58} {seconds:>7.3f} s  {seconds / copy_s:>6.2f} x a copy  {size_bytes / seconds / 1e9:>6.2f} GB/s"
        )


LINES = {
    "copy": "a copy in memory",
    "begin": "begin: the run stands still",
    "release_at_once": "release at once: the run stands still",
    "release_later": "release after the save is written: the run stands still",
    "whole": "the whole save, digests and sync included",
    "load": "load, every digest checked",
}


def state_of(name: str) -> State:
    model = load_model(resolve_model(name), torch.float32)
    weights = {key: parameter.data for key, parameter in model.named_parameters()}
    moments = {f"{kind}.{key}": torch.randn_like(value) for key, value in weights.items() for kind in ("m", "v")}
    return {"weights": weights, "optimizer": moments}


def measure(state: State, root: Path) -> dict[str, float]:
    saver = Saver(root)
    row = {"copy": timed(lambda: [tensor.clone() for members in state.values() for tensor in members.values()])}
    row["begin"] = timed(lambda: saver.begin(1, state, {}, {}))
    row["release_at_once"] = timed(saver.release)
    saver.wait()
    started = time.perf_counter()
    saver.begin(2, state, {}, {})
    saved = saver.wait()
    row["whole"] = time.perf_counter() - started
    row["release_later"] = timed(saver.release)
    row["load"] = timed(lambda: load_newest(root))
    if saved is None or saved.step != 2:
        raise RuntimeError("the save of step 2 did not end as one")
    return row


def timed(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
