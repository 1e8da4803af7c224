"""The table of control routes: every path, its methods, and who may call it."""

from __future__ import annotations

from typing import Final

from unison.server import control_info as info
from unison.server import control_state as state
from unison.server import control_tensors as tensors
from unison.server import control_updates as updates
from unison.server import control_weights as weights
from unison.server.control_body import Handler
from unison.server.control_operations import UNSUPPORTED, freeze_gc, unsupported
from unison.server.front import Level, Route
from unison.server.profile import start_profile, stop_profile

_GET: Final = ("GET",)
_POST: Final = ("POST",)
_BOTH: Final = ("GET", "POST")
_TABLE: Final[tuple[tuple[str, tuple[str, ...], Level, Handler], ...]] = (
    # Unison's own transaction.
    ("/weights/begin", _POST, "admin", weights.weights_begin),
    ("/weights/layout", _POST, "admin", weights.weights_layout),
    ("/weights/stage", _POST, "admin", weights.weights_stage),
    ("/weights/prepare", _POST, "admin", weights.weights_prepare),
    ("/weights/commit", _POST, "admin", weights.weights_commit),
    ("/weights/abort", _POST, "admin", weights.weights_abort),
    ("/weights/status", _GET, "admin", weights.weights_status),
    # SGLang's, over the same transaction.
    ("/init_weights_update_group", _POST, "admin", updates.init_weights_update_group),
    ("/destroy_weights_update_group", _POST, "admin", updates.destroy_weights_update_group),
    ("/update_weights_from_distributed", _POST, "admin", updates.update_weights_from_distributed),
    ("/update_weights_from_tensor", _POST, "admin", tensors.update_weights_from_tensor),
    ("/update_weights_from_disk", _POST, "admin", updates.update_weights_from_disk),
    ("/pull_weights", _POST, "admin", tensors.pull_weights),
    ("/begin_weight_update", _POST, "admin", updates.begin_weight_update),
    ("/end_weight_update", _POST, "admin", updates.end_weight_update),
    ("/post_process_weights", _POST, "admin", updates.post_process_weights),
    ("/update_weight_version", _POST, "admin", updates.update_weight_version),
    ("/get_weights_by_name", _BOTH, "admin", info.get_weights_by_name),
    ("/weights_checker", _POST, "admin", info.weights_checker),
    # Pause, abort, cache, memory.
    ("/pause_generation", _POST, "admin", state.pause_generation),
    ("/continue_generation", _POST, "admin", state.continue_generation),
    ("/flush_cache", _BOTH, "admin", state.flush_cache),
    ("/abort_request", _POST, "admin", state.abort_request),
    ("/release_memory_occupation", _POST, "admin", state.release_memory_occupation),
    ("/resume_memory_occupation", _POST, "admin", state.resume_memory_occupation),
    # What the server says of itself.
    ("/model_info", _GET, "user", info.model_info),
    ("/get_model_info", _GET, "user", info.model_info),
    ("/get_weight_version", _GET, "user", info.get_weight_version),
    ("/weight_version", _GET, "user", info.get_weight_version),
    ("/server_info", _GET, "user", info.server_info),
    ("/get_server_info", _GET, "user", info.server_info),
    ("/get_internal_state", _GET, "admin", info.get_internal_state),
    ("/get_load", _GET, "user", info.get_load),
    ("/v1/loads", _GET, "user", info.loads),
    ("/metrics", _GET, "user", info.metrics),
    # Operations.
    ("/start_profile", _BOTH, "admin", start_profile),
    ("/stop_profile", _BOTH, "admin", stop_profile),
    ("/freeze_gc", _BOTH, "admin", freeze_gc),
    *((path, _POST, "admin", unsupported(path)) for path in UNSUPPORTED),
)
CONTROL_ROUTES: Final[tuple[Route, ...]] = tuple(Route(*row) for row in _TABLE)
