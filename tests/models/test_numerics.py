from __future__ import annotations

import pytest

from unison.core.errors import NumericsError
from unison.models.families.llama import read_spec
from unison.models.numerics import choose_numerics
from unison.models.tiny_random import CONFIG


@pytest.mark.parametrize(
    ("dtype", "numerics", "complaint"),
    [
        ("bf16", "auto", "dtype='bf16' is unknown; did you mean bfloat16.*; use auto, bfloat16 or float32"),
        ("auto", "exct", "numerics='exct' is unknown; did you mean exact.*; use auto, exact or fast"),
    ],
)
def test_an_unknown_name_is_refused_with_the_right_ones(dtype: str, numerics: str, complaint: str) -> None:
    with pytest.raises(NumericsError, match=complaint):
        choose_numerics(read_spec(CONFIG), dtype, numerics)
