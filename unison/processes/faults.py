"""What a service may raise to be understood."""

from __future__ import annotations


class OutOfMemoryError(MemoryError):
    """A service that knows more of a MemoryError than the place it was raised from; its text is the whole reason."""
