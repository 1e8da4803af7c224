"""Prompts through the library ``datasets``: a folder it saved, a folder of data files, or a hub's data set."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from unison.config.names import did_you_mean, join_or
from unison.config.schema import DataConfig
from unison.core.errors import ConfigError, DataError
from unison.data.arrow import batch_records, needed_columns
from unison.data.jsonl import named_path
from unison.data.rows import BadRow, Keys, Place, collect_rows, key_map
from unison.data.source import PromptSource, Split

_OPTIONS: Final = ("split", "eval_split", "name", "revision")
_HELD_OUT: Final = ("validation", "test", "eval", "dev")
_BATCH_ROWS: Final = 256
_SAVED_FILES: Final = ("dataset_dict.json", "state.json")


def open_datasets(config: DataConfig, split: Split, seed: int) -> PromptSource:
    """The split of one data set, as configured.

    ``options.split`` belongs to ``data.train``, ``options.eval_split`` to ``data.eval``; where there is
    no ``data.train`` (a held-out set of its own), ``split`` is meant. Raises ConfigError where the
    library or the split is missing, DataError where the data cannot be reached or used.
    """
    options = _read_options(config)
    path, cut = named_path(config, split)
    wanted = options.get("split") if split == "train" else options.get("eval_split")
    if split == "eval" and wanted is None and config.train is None:
        wanted = options.get("split")
    library = _import_datasets()
    found = _load(library, path, wanted, options)
    if isinstance(found, dict):
        wanted = wanted or _choose(list(found), split, path)
        if wanted not in found:
            raise ConfigError(
                f"{path} has no split {wanted!r}{did_you_mean(wanted, found)} (it has {join_or(sorted(found))})"
            )
        found = found[wanted]
    elif wanted is not None and _is_saved(Path(path).expanduser()):
        raise ConfigError(
            f"data.options.split={wanted!r} has no effect: {path} holds one split; remove it, or name the folder above"
        )
    if not hasattr(found, "with_format") or not hasattr(found, "features"):
        raise DataError(f"{path} is a {type(found).__name__}, not a data set with rows")
    where = f"{path}:{wanted}" if wanted else path
    keys = key_map(config)
    return collect_rows(_records(found, keys, where), keys, cut=cut, on_bad_row=config.on_bad_row, where=where)


def _read_options(config: DataConfig) -> dict[str, str]:
    options: dict[str, str] = {}
    for name, value in config.options.items():
        if name not in _OPTIONS:
            raise ConfigError(
                f"data.options.{name} is unknown to the datasets source{did_you_mean(name, _OPTIONS)}"
                f" (it takes {', '.join(_OPTIONS)})"
            )
        if not isinstance(value, str) or not value:
            raise ConfigError(f"data.options.{name}={value!r} must be a text")
        options[name] = value
    return options


def _import_datasets() -> Any:
    try:
        return import_module("datasets")
    except ImportError as error:
        raise ConfigError(
            f"data.source='datasets' needs the library datasets ({error}); pip install 'unison[data]'"
        ) from error


def _is_saved(path: Path) -> bool:
    return any((path / name).is_file() for name in _SAVED_FILES)


def _load(library: Any, name: str, split: str | None, options: dict[str, str]) -> Any:
    """A data set, or a mapping of splits. No code of the data set is run."""
    path = Path(name).expanduser()
    try:
        if _is_saved(path):
            _refuse(options, ("name", "revision"), f"{path} is a saved folder")
            return library.load_from_disk(str(path))
        if path.is_dir():
            _refuse(options, ("revision",), f"{path} is a local folder")
            return library.load_dataset(str(path), options.get("name"), split=split)
        if path.exists() or name.startswith(("/", ".", "~")):
            raise DataError(f"{name} is no folder; name a folder, or a hub's data set like owner/name")
        return library.load_dataset(name, options.get("name"), split=split, revision=options.get("revision"))
    except (ConfigError, DataError):
        raise
    except Exception as error:
        # The library raises whatever its many formats and its network come to.
        raise DataError(_explain(name, path, error)) from error


def _refuse(options: dict[str, str], names: tuple[str, ...], reason: str) -> None:
    for name in names:
        if name in options:
            raise ConfigError(f"data.options.{name}={options[name]!r} has no effect: {reason}; remove it")


def _explain(name: str, path: Path, error: Exception) -> str:
    told = f"{type(error).__name__}: {str(error).strip()[:500]}"
    if path.is_dir():
        return f"the folder {path} cannot be loaded as a data set: {told}"
    return (
        f"there is no folder {name!r} here, and the data set {name!r} cannot be had from a hub ({told}). Where there "
        "is a network, check the name and options.name, and that HF_HUB_OFFLINE is not set; where there is none, save "
        "the data set elsewhere with save_to_disk and name that folder"
    )


def _choose(splits: list[str], split: Split, path: str) -> str:
    """The split that is meant where none is named: the training one, or the only one held out."""
    fitting = [name for name in (("train",) if split == "train" else _HELD_OUT) if name in splits]
    if len(fitting) == 1:
        return fitting[0]
    option = "split" if split == "train" else "eval_split"
    raise ConfigError(f"{path} has the splits {', '.join(splits)}; say which by data.options.{option}")


def _records(data: Any, keys: Keys, where: str) -> Iterator[tuple[Place, dict[str, Any] | BadRow]]:
    schema = data.features.arrow_schema
    columns = needed_columns(schema, keys, where)
    number = 0
    for table in data.select_columns(columns).with_format("arrow").iter(batch_size=_BATCH_ROWS):
        for batch in table.to_batches():
            for record in batch_records(batch):
                yield (f"{where}:{number}", f"{where}: row {number}"), record
                number += 1
