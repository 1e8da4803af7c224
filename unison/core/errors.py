"""Every error a user can meet. Each message names the offending value and the fix.

A user error also derives from the built-in it resembles, so plain ``except ValueError`` works.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unison.core.records import GenerationOutput


class UnisonError(Exception):
    """Root of all errors raised on purpose by Unison."""


class ConfigError(UnisonError, ValueError):
    """A configuration file, key or combination of settings that cannot be meant."""


class RequestError(UnisonError, ValueError):
    """A generation request that cannot be served; raised before any work starts."""


class DataError(UnisonError, ValueError):
    """A data set or row that cannot be used; names file and line."""


class RewardError(UnisonError, ValueError):
    """A reward function that cannot be loaded or returned something unusable."""


class SandboxError(UnisonError, RuntimeError):
    """Untrusted code cannot be isolated here, or the sandbox itself failed; never the fault of the code run in it."""


class WorkerError(UnisonError, RuntimeError):
    """A worker process that cannot be started, or a pool of them that cannot go on."""


class ModelError(UnisonError, ValueError):
    """A model folder or architecture that cannot be loaded."""


class NumericsError(UnisonError, RuntimeError):
    """Exact numerics were asked for and this machine or model cannot give them."""


class AlgorithmError(UnisonError, RuntimeError):
    """An advantage estimator or a policy loss that returned what nothing can be learnt from."""


class EvaluationError(UnisonError, RuntimeError):
    """An evaluation that says nothing: the weights changed during it, or its file is damaged."""


class WeightUpdateError(UnisonError, RuntimeError):
    """A weight transaction that was refused; the engine keeps what its staging promises."""


class NonFiniteError(UnisonError, ArithmeticError):
    """A loss or gradient that is not finite; raised before the optimizer moves."""


class NonFiniteLogitsError(NonFiniteError):
    """Logits no token can be drawn from (NaN or infinite). Only the requests they belong to have ended."""

    def __init__(self, message: str, outputs: Sequence[GenerationOutput]) -> None:
        super().__init__(message)
        self.outputs = tuple(outputs)
        """The ended requests with what they had sampled before, as if aborted."""


class ServerError(UnisonError, RuntimeError):
    """An HTTP server that cannot be reached, refused a request, or answered something unusable."""


class NoTokenAllowedError(NonFiniteLogitsError):
    """The model gives probability 0 to every token that the requests' masks allow."""


class CapacityError(RequestError):
    """A request that can never fit into the engine's memory; carries the arithmetic."""


class QueueFullError(RequestError):
    """As many requests wait already as may; try again later."""


class EngineStateError(UnisonError, RuntimeError):
    """A call the engine cannot take in its present state (closed, no complete weights)."""


class CheckpointError(UnisonError, RuntimeError):
    """A checkpoint that cannot be written, or none that can be read; names the file and what is wrong with it."""


class RunInterrupted(UnisonError):
    """A signal asked the run to stop; it does so at a place from which it can go on."""

    def __init__(self, signal_name: str) -> None:
        super().__init__(f"interrupted by {signal_name}")
        self.signal_name = signal_name


class RolloutInterrupted(UnisonError):
    """A request that ended because the run stops; ``output`` is what it had come to, if it had begun."""

    def __init__(self, output: GenerationOutput | None = None) -> None:
        super().__init__("the rollout was interrupted")
        self.output = output


class FaultError(UnisonError, RuntimeError):
    """Raised at a fault point that a test has armed; never in a run of its own accord."""


class HookError(UnisonError, RuntimeError):
    """A user's hook that raised; the run has saved what it had done."""
