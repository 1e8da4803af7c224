"""Parts found by name or path; see ``unison.config.plugins``."""

from unison.config.plugins import Registry, load_object

__all__ = ["Registry", "load_object"]
