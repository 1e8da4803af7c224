"""The pages of the algorithms say what the code does: names, settings, defaults and metrics."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from tests.hygiene.tree import REPO, name
from unison.algorithms.correction_recipes import CORRECTIONS
from unison.algorithms.kl import KlKind
from unison.algorithms.recipes import RECIPES
from unison.algorithms.registry import find_advantage, find_loss, names, settings_of
from unison.config.algorithm import Aggregation, AlgorithmConfig, CorrectionConfig
from unison.config.schema import TrainConfig
from unison.observability.metrics import METRICS

FOLDER = REPO / "docs" / "algorithms"
PAGES = [*sorted(FOLDER.glob("*.md")), REPO / "docs" / "new_algorithm.md"]
SECTIONS = {field.name: getattr(field.type, "__struct_fields__", ()) for field in msgspec.structs.fields(TrainConfig)}
METRIC_GROUPS = ("train", "rollout", "critic", "mismatch", "eval")


def read(page: str) -> str:
    return (FOLDER / page).read_text(encoding="utf-8")


def rows(text: str) -> list[list[str]]:
    """The cells of all rows of tables."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]


def quoted(page: Path) -> list[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`\n]+)`", text)


def test_the_index_lists_every_recipe_as_it_is() -> None:
    listed = {
        match[1]: row for row in rows(read("README.md")) if (match := re.match(r"\[`(\w+)`\]\(\w+\.md\)", row[0]))
    }
    assert listed.keys() == RECIPES.keys()
    for key, row in listed.items():
        recipe = RECIPES[key]
        assert row[1:4] == [recipe.advantage, recipe.loss, recipe.aggregation], key


def test_every_part_stands_on_some_page() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    parts = [*names("advantage"), *names("loss"), *CORRECTIONS, *get_args(Aggregation), *get_args(KlKind)]
    missing = [part for part in parts if part != "gae" and f"`{part}`" not in text and f"loss {part}" not in text]
    assert not missing


@pytest.mark.parametrize("key", AlgorithmConfig.__struct_fields__)
def test_every_setting_stands_on_some_page(key: str) -> None:
    text = " ".join(word for page in PAGES for word in quoted(page))
    assert re.search(rf"\b{key}\b", text) or key == "name"


@pytest.mark.parametrize("key", CorrectionConfig.__struct_fields__)
def test_every_setting_of_a_correction_stands_on_its_page(key: str) -> None:
    text = " ".join(quoted(FOLDER / "corrections.md"))
    assert re.search(rf"\b{key}\b", text)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_keys_and_metrics_that_a_page_names_exist(page: Path) -> None:
    unknown = []
    for word in quoted(page):
        for section, key in re.findall(r"(?<![\w/.])(?:--)?([a-z]+)\.([a-z_]+)\b(?!\.(?:py|md|toml))", word):
            if section in SECTIONS and key not in SECTIONS[section] and key not in ("toml", "jsonl", "py"):
                unknown.append(f"{section}.{key}")
        if re.fullmatch(rf"(?:{'|'.join(METRIC_GROUPS)})/\w+", word) and word not in METRICS:
            unknown.append(word)
    assert not unknown


@pytest.mark.parametrize(
    ("page", "recipe"),
    [(f"{key.removesuffix('_baseline')}.md", key) for key in RECIPES] + [("dppo.md", "dppo")],
)
def test_defaults_of_a_page_are_those_of_recipe_and_functions(page: str, recipe: str) -> None:
    """Rows like ``| `clip_low`, `clip_high` | 0.2, 0.28 |``, under the recipe of the page."""
    of_functions = settings_of(find_advantage(RECIPES[recipe].advantage)) | settings_of(find_loss(RECIPES[recipe].loss))
    known = {**of_functions, **{key: value for key, value in RECIPES[recipe].settings.items() if key in of_functions}}
    for row in rows(read(page)):
        keys, values = re.findall(r"`(?:algorithm\.)?(\w+)`", row[0]), row[1].split(", ")
        for key, value in zip(keys, values, strict=False):
            if key in known and len(keys) == len(values):
                assert same(value, known[key]), f"{page}: {key}={known[key]}"


def same(written: str, default: object) -> bool:
    if default is None or isinstance(default, bool):
        return written == {None: "off", True: "true", False: "false"}[default]
    return float(written) == default if isinstance(default, float) else written == default
