"""Hooks for the tests: one that writes down what it is told, and some that cannot be used."""

from __future__ import annotations

from typing import Any

events: list[tuple[str, tuple[Any, ...]]] = []


class Recorder:
    def on_start(self, run: Any) -> None:
        events.append(("on_start", (run.step, run.folder)))

    def on_samples(self, step: int, samples: Any) -> None:
        events.append(("on_samples", (step, len(samples))))

    def on_step(self, step: int, metrics: Any) -> None:
        events.append(("on_step", (step, metrics["train/loss"])))

    def on_evaluation(self, step: int, metrics: Any) -> None:
        events.append(("on_evaluation", (step, metrics["eval/accuracy"])))

    def on_checkpoint(self, step: int, path: Any) -> None:
        events.append(("on_checkpoint", (step, path)))

    def on_finish(self, summary: Any) -> None:
        events.append(("on_finish", (summary["step"],)))


class _FailsAtStepTwo:
    def on_step(self, step: int, metrics: Any) -> None:
        if step == 2:
            raise RuntimeError("enough")


fails_at_step_two = _FailsAtStepTwo()


class Misspelt:
    def on_stpe(self, step: int, metrics: Any) -> None: ...


class Nothing:
    pass


class CannotBeMade:
    def __init__(self, needed: int) -> None: ...

    def on_step(self, step: int, metrics: Any) -> None: ...


class AsyncHook:
    async def on_step(self, step: int, metrics: Any) -> None: ...
