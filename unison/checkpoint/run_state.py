"""What a run is, between two steps, apart from its tensors: plain data that a checkpoint carries."""

from __future__ import annotations

import base64
import random
from typing import Any, Final

import msgspec
import numpy as np
import torch

from unison.core.errors import CheckpointError

STATE_FORMAT: Final = 1
STATE_FILE: Final = "state"
RANDOM_FILE: Final = "random"
PENDING_FILE: Final = "pending"
"""Names of the documents and the blob within a checkpoint."""


class RunState(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Everything the steps to come depend on, beside tensors, random states and pending samples."""

    format: int = STATE_FORMAT
    step: int
    """Steps done."""
    begun_at: int = 0
    """Steps done before the run's own first one: those of the run that it is a fork of."""
    optimizer_steps: int
    """Optimizer steps done: the schedule goes by these."""
    weights_version: int
    weights_digest: str
    """Of the policy as published to the engine."""
    base_digest: str
    """Of the model the run began from, which is also the reference."""
    cursor: dict[str, Any]
    """Place in the data, after all that was drawn: pending prompts included."""
    step_cursor: dict[str, Any] = {}
    """Where prompts are pending, the place in the data before they were drawn."""
    pending_draws: list[int] = []
    """How the prompts of the step under way were drawn; its samples are the pending blob."""
    unlogged: dict[str, float] | None = None
    """Metrics of the last step where its evaluation is still to be made."""
    evaluations: dict[str, dict[str, float]] = {}
    alarms: dict[str, Any] = {}
    trackers: dict[str, Any] = {}
    seconds: float = 0.0
    """Time the run has taken, over all its sessions."""
    numerics: dict[str, Any] = {}
    config: dict[str, Any] = {}
    """The configuration the run has come here with, whatever config.toml says by now."""


def decode_state(document: object) -> RunState:
    """The state of a checkpoint's document. Raises CheckpointError for one of another form or version."""
    try:
        state = msgspec.convert(document, RunState, strict=True)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"its state cannot be read: {error}") from error
    if state.format != STATE_FORMAT:
        raise CheckpointError(f"its state has format {state.format}; this version reads {STATE_FORMAT}")
    return state


def random_states() -> dict[str, Any]:
    """States of the process's own generators, which a user's code may draw from; Unison's noise needs none."""
    version, words, gauss = random.getstate()
    # Seeding and drawing go by the state returned here; the newer Generator API has no global one.
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(words), gauss],
        "numpy": [str(kind), np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        "torch": base64.b64encode(bytes(torch.get_rng_state().tolist())).decode("ascii"),
    }


def restore_random_states(states: dict[str, Any]) -> None:
    """Set the process's generators to saved states. Raises CheckpointError where they are none."""
    try:
        version, words, gauss = states["python"]
        random.setstate((version, tuple(words), gauss))
        kind, keys, position, has_gauss, cached = states["numpy"]
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
        torch.set_rng_state(torch.tensor(list(base64.b64decode(states["torch"], validate=True)), dtype=torch.uint8))
    except (LookupError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise CheckpointError(f"its random states cannot be restored: {error}") from error
