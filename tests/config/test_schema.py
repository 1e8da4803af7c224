from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from unison.config.fields import Field, fields, sections
from unison.config.reference import render_help, render_reference

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
HEAVY = ("torch", "transformers", "tokenizers", "numpy", "matplotlib", "rich")


@pytest.mark.parametrize("field", list(fields().values()), ids=list(fields()))
def test_each_key_has_a_description_and_a_type_that_can_be_written(field: Field) -> None:
    assert len(field.description) > 8 and field.description.endswith(".")
    assert field.type_text and field.allowed
    assert field.path == f"{field.table}.{field.key}" and field.section in sections()


def test_only_the_model_must_be_given() -> None:
    assert [name for name, field in fields().items() if field.required] == ["model.path", "reward.parts.*.function"]


def test_the_committed_page_of_keys_is_the_generated_one() -> None:
    assert PAGE.read_text(encoding="utf-8") == render_reference(), (
        "run: python -m unison.config.reference > docs/configuration.md"
    )


def test_help_names_each_key_within_the_width() -> None:
    text = render_help(80)
    assert all(f"--{field.shown_path}  " in text for field in fields().values())
    assert max(map(len, text.splitlines())) <= 80


def test_importing_the_configuration_is_light_and_quick() -> None:
    code = f"import sys, unison.config; print([name for name in {HEAVY!r} if name in sys.modules])"
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert time.monotonic() - start < 3  # a tenth of this on an idle machine; torch alone takes longer
