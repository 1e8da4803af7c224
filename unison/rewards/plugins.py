"""Finding a part by its registered name, or a user's own by ``module:object``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from unison.config.names import did_you_mean
from unison.config.plugins import load_object
from unison.core.errors import UnisonError

T = TypeVar("T")

__all__ = ["Registry", "load_object"]


class Registry(Generic[T]):
    """Named parts of one kind. ``builtin`` maps names to ``module:object``, imported at first use."""

    def __init__(self, kind: str, error: type[UnisonError], builtin: Mapping[str, str] | None = None) -> None:
        self._kind = kind
        self._error = error
        self._paths = dict(builtin or {})
        self.parts: dict[str, T] = {}
        """Those registered in this process, beside the built-in ones."""

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that makes a part known under ``name``. Raises the registry's error if it is taken."""

        def decorate(part: T) -> T:
            if name in self.parts or name in self._paths:
                raise self._error(f"the {self._kind} {name!r} is registered already; choose another name")
            self.parts[name] = part
            return part

        return decorate

    @property
    def names(self) -> list[str]:
        return sorted({*self.parts, *self._paths})

    def find(self, name: str) -> T:
        """The part called ``name``, or the object at ``module:object``. Raises the registry's error."""
        if name in self.parts:
            return self.parts[name]
        if name in self._paths or ":" in name:
            part: T = load_object(self._paths.get(name, name), kind=self._kind, error=self._error)
            return part
        raise self._error(
            f"the {self._kind} {name!r} is unknown{did_you_mean(name, self.names)}"
            f" (known: {', '.join(self.names)}; your own is named module:object)"
        )
