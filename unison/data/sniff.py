"""What a file or folder given to the JSONL source is, where it is something else."""

from __future__ import annotations

from pathlib import Path
from typing import Final

SAVED_FILES: Final = ("dataset_dict.json", "state.json", "dataset_info.json")
"""What ``save_to_disk`` leaves in a folder."""
_PARQUET: Final = b"PAR1"
_GZIP: Final = b"\x1f\x8b"


def other_kind(path: Path, section: str) -> str | None:
    """What the path looks like and how it is read, None for what may be JSONL or is not there.

    ``section`` is the part of the configuration that names the path.
    """
    if path.is_dir():
        return _kind_of_folder(path, section)
    if not path.is_file():
        return None  # a pipe or a device: to look at what comes out of it might take for ever
    try:
        with path.open("rb") as file:
            start = file.read(len(_PARQUET))
    except OSError:
        return None
    if start == _PARQUET:
        return f'looks like Parquet: set {section}.source = "parquet"'
    if start.startswith(_GZIP) and path.suffix != ".gz":
        return "looks like gzip: give it a name that ends in .gz, and it is decompressed as it is read"
    return None


def _kind_of_folder(path: Path, section: str) -> str:
    if any((path / name).is_file() for name in SAVED_FILES):
        return f'looks like a data set that was saved: set {section}.source = "datasets"'
    if next(path.rglob("*.parquet"), None) is not None:
        return f'is a folder with Parquet files: set {section}.source = "parquet"'
    files = sorted(file.name for pattern in ("*.jsonl", "*.jsonl.gz") for file in path.glob(pattern))
    there = f"name one of its files, like {path / files[0]}" if files else "name a file"
    return f"is a folder, and {section}.source is jsonl: {there}"
