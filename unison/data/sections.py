"""Which part of the configuration a data section is, so that errors name its keys as they are written."""

from __future__ import annotations

from unison.config.schema import DataConfig


class SectionConfig(DataConfig, frozen=True, kw_only=True):
    """A data section that is not ``[data]``: a part of a mixture, or a held-out set."""

    section: str


def in_section(config: DataConfig, section: str) -> SectionConfig:
    """The same settings, known to come from ``section``."""
    return SectionConfig(section=section, **{name: getattr(config, name) for name in DataConfig.__struct_fields__})


def section_of(config: DataConfig) -> str:
    """``data``, ``data.mix.NAME`` or ``eval.sets.NAME``."""
    return config.section if isinstance(config, SectionConfig) else "data"
