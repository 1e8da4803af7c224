"""From what a command did to its reply."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Any

from unison.core.errors import EngineStateError, UnisonError, WeightUpdateError
from unison.server.messages import Reply


def answered(call_id: int, action: Callable[[], dict[str, Any]]) -> Reply:
    """What the action comes to: its result, or its error by kind."""
    try:
        return Reply(call_id, action())
    except WeightUpdateError as error:
        return Reply(call_id, error=str(error), kind="update")
    except EngineStateError as error:
        return Reply(call_id, error=str(error), kind="state")
    except UnisonError as error:
        return Reply(call_id, error=str(error), kind="request")
    except Exception as error:  # whoever sent the command is told; the engine goes on
        traceback.print_exc(file=sys.stderr)
        return Reply(call_id, error=f"{type(error).__name__}: {error}", kind="internal")
