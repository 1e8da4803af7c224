"""config.json read as transformers reads it, or refused with a ModelError; weights streamed one tensor at a time."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.conftest import TinyModelDir
from unison.core.errors import ModelError
from unison.models import loading
from unison.models.loading import load_model, stream_tensors
from unison.models.registry import FAMILIES, read_spec, register_family
from unison.models.rope import inverse_frequencies
from unison.models.spec import DecoderSpec
from unison.models.tiny_random import CONFIG

LINEAR = {"rope_type": "linear", "factor": 2.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE_STYLES: dict[str, dict[str, Any]] = {
    "nothing said": {},
    "theta alone": {"rope_theta": 5e5},
    "whole theta": {"rope_theta": 500000},
    "old style": {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "old style, newer key": {"rope_theta": 5e5, "rope_scaling": {**LINEAR, "type": "linear"}},
    "old style with theta inside": {"rope_theta": 5e5, "rope_scaling": {**LINEAR, "rope_theta": 3e3}},
    "new style": {"rope_parameters": {**LINEAR, "rope_theta": 3e3}},
    "new style with theta outside": {"rope_theta": 3e3, "rope_parameters": LINEAR},
    "new style without kind": {"rope_parameters": {"rope_theta": 3e3}},
    "both styles, equal": {
        "rope_parameters": {**LINEAR, "rope_theta": 3e3},
        "rope_scaling": {**LINEAR, "rope_theta": 3e3},
    },
    "null settings": {"rope_theta": 5e5, "rope_scaling": None, "rope_parameters": None},
    "llama3": {"rope_parameters": {**LLAMA3, "rope_theta": 5e5, "original_max_position_embeddings": 64}},
    "llama3, old style": {"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 64}},
    "llama3, length outside": {"rope_scaling": LLAMA3, "original_max_position_embeddings": 64},
    "whole rotation": {"rope_parameters": {"rope_theta": 3e3, "partial_rotary_factor": 1.0}},
}


def config(**changes: Any) -> dict[str, Any]:
    return {**{key: value for key, value in CONFIG.items() if key != "rope_parameters"}, **changes}


@pytest.mark.parametrize("style", ROPE_STYLES)
def test_rope_settings_mean_what_transformers_takes_them_for(style: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    (tmp_path / "config.json").write_text(json.dumps(config(**ROPE_STYLES[style])))
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(theirs, LlamaConfig)
    spec = read_spec(config(**ROPE_STYLES[style]))
    own = inverse_frequencies(spec.rope, spec.head_dim)
    torch.testing.assert_close(own, LlamaRotaryEmbedding(theirs).inv_freq, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "full_attention="),
        ({"rope_parameters": {**LINEAR, "attention_factor": 0.9}}, "attention_factor=0.9"),
        ({"rope_scaling": {**LINEAR, "rope_theta": "1e4"}}, "rope_theta='1e4'"),
        ({"rope_scaling": LLAMA3}, "original_max_position_embeddings > 0, not None"),
        (
            {
                "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 64},
                "original_max_position_embeddings": 32,
            },
            "original_max_position_embeddings is 32 outside and 64 inside",
        ),
        ({"rope_scaling": "linear"}, "rope_scaling='linear' .* must be an object"),
    ],
)
def test_rope_settings_that_would_pass_for_others_are_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint):
        read_spec(config(**changes))


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 70)
    | st.floats()
    | st.sampled_from(["", "silu", "full_attention", "1"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["rope_type", "factor"]), inner),
    max_leaves=4,
)


@settings(deadline=None, max_examples=400)
@given(
    st.sampled_from(["llama", "qwen2", "qwen3"]),
    st.dictionaries(
        st.sampled_from([*CONFIG, "layer_types", "rope_theta", "rope_scaling", "num_experts"]), JSON, max_size=3
    ),
    st.sets(st.sampled_from(list(CONFIG)), max_size=2),
)
def test_any_config_reads_as_a_spec_or_is_refused(family: str, changes: dict[str, Any], left_out: set[str]) -> None:
    changed = {**CONFIG, "model_type": family, **changes}
    try:
        spec = read_spec({key: value for key, value in changed.items() if key not in left_out})
    except ModelError:
        return
    assert isinstance(spec, DecoderSpec)
    assert spec.num_heads % spec.num_kv_heads == 0 and spec.head_dim % 2 == 0 and spec.num_parameters() > 0


def test_a_family_from_outside_is_read_by_its_own_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unison.models.registry.FAMILIES", dict(FAMILIES))
    register_family("my_llama", "unison.models.families.llama:read_spec")
    assert read_spec({**CONFIG, "model_type": "my_llama"}) == read_spec(CONFIG)
    for reader in ("no.such.module:read_spec", "unison.models.families.llama:no_such", "nothing"):
        register_family("broken", reader)
        with pytest.raises(ModelError, match=f"family 'broken' cannot be read by '{reader}'"):
            read_spec({**CONFIG, "model_type": "broken"})


def test_tensors_are_streamed_and_not_kept(tiny_model_dir: TinyModelDir, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[int] = []
    seen: list[weakref.ref[Tensor]] = []

    def watched(folder: Path) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in stream_tensors(folder):
            copy = tensor.clone()
            del tensor
            seen.append(weakref.ref(copy))
            yield name, copy
            del copy
            alive.append(sum(reference() is not None for reference in seen))

    monkeypatch.setattr(loading, "stream_tensors", watched)
    load_model(tiny_model_dir("qwen3"), torch.bfloat16)
    assert len(seen) == 25
    assert max(alive) == 1, "the tensor just written, and none before it"
