"""Prompts from Parquet files, read row group by row group."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from unison.config.schema import DataConfig
from unison.core.errors import DataError
from unison.data.arrow import batch_records, import_pyarrow, needed_columns
from unison.data.jsonl import check_regular, named_path, row_name, unreadable
from unison.data.rows import BadRow, Keys, Place, RowList, collect_rows, key_map
from unison.data.slices import ALL, Cut
from unison.data.source import PromptSource, Split, refuse_settings

_BATCH_ROWS: Final = 256


def open_parquet(config: DataConfig, split: Split, seed: int) -> PromptSource:
    """The file, folder or glob of one split, as configured."""
    refuse_settings(config, "options")
    name, cut = named_path(config, split)
    return read_parquet(name, key_map(config), cut=cut, on_bad_row=config.on_bad_row)


def read_parquet(name: str, keys: Keys, *, cut: Cut = ALL, on_bad_row: str = "fail") -> RowList:
    """The usable rows of a file, of all ``*.parquet`` of a folder, or of a glob's files, in the order of their names.

    No more is held than the rows kept and a batch of the file. Rows are counted from 0 in each file.
    Raises DataError where a file cannot be read, a needed column has no JSON form, no usable row is
    there, or (unless bad rows are to be skipped) a bad one is.
    """
    base, files = find_files(name)
    return collect_rows(_records(base, files, keys), keys, cut=cut, on_bad_row=on_bad_row, where=name)


def find_files(name: str) -> tuple[Path, list[Path]]:
    """The folder that row ids start at, and the files. Raises DataError where there is none."""
    path = Path(name).expanduser()
    if path.is_dir():
        files = sorted(path.rglob("*.parquet"))
        if not files:
            raise DataError(f"the folder {path} holds no *.parquet file")
        return path, files
    if path.exists() or not glob.has_magic(str(path)):
        return path.parent, [path]
    files = sorted(Path(found) for found in glob.glob(str(path), recursive=True) if Path(found).is_file())
    if not files:
        raise DataError(f"no file matches {path} (relative paths start at {Path.cwd()})")
    return Path(os.path.commonpath([file.parent for file in files])), files


def _records(base: Path, files: list[Path], keys: Keys) -> Iterator[tuple[Place, dict[str, Any] | BadRow]]:
    pyarrow = import_pyarrow()
    for path in files:
        name = row_name(path.relative_to(base))
        number = 0
        try:
            check_regular(path)
            with pyarrow.parquet.ParquetFile(path) as file:
                columns = needed_columns(file.schema_arrow, keys, str(path))
                # A dot in a name would be taken for a step into a struct, so then everything is read.
                chosen = None if any("." in column for column in columns) else columns
                for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=chosen):
                    for record in batch_records(batch):
                        yield (f"{name}:{number}", f"{path}: row {number}"), record
                        number += 1
        except (OSError, pyarrow.ArrowException) as error:
            if number:
                raise DataError(f"the data file {path} cannot be read beyond row {number - 1}: {error}") from error
            raise unreadable(path, error) from error
