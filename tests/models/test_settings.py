"""Settings of config.json: what would be another model is refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import TinyModelDir
from unison.core.errors import ModelError
from unison.models.loading import load_model, read_config
from unison.models.registry import read_spec


@pytest.fixture
def folder(tiny_model_dir: TinyModelDir, tmp_path: Path) -> Path:
    """A copy of the small Llama whose config.json a test may change."""
    return Path(shutil.copytree(tiny_model_dir(), tmp_path / "model"))


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def rope(**settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 1e4, **settings}}


SCALED = {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
BAD_SETTINGS: list[tuple[dict[str, Any], str]] = [
    (rope(rope_type="yarn", factor=4.0), "rope type 'yarn' is not supported; only default, linear, llama3"),
    (rope(rope_type="dynamic", factor=4.0), "rope type 'dynamic'"),
    (rope(rope_type="longrope", short_factor=[1.0], long_factor=[1.0]), "rope type 'longrope'"),
    ({"rope_parameters": None, "rope_scaling": {"type": "su", "factor": 2.0}}, "rope type 'su'"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_parameters and rope_scaling .* differ"),
    ({"rope_parameters": [1]}, "rope_parameters=.* must be an object"),
    (rope(rope_type="linear"), "rope type linear needs factor > 0, not None"),
    (rope(rope_type="linear", factor=0), "needs factor > 0, not 0"),
    (rope(rope_type="linear", factor="2"), "needs factor > 0, not '2'"),
    (rope(rope_type="llama3", **{**SCALED, "low_freq_factor": None}), "llama3 needs low_freq_factor"),
    (rope(rope_type="llama3", **{**SCALED, "low_freq_factor": 4.0}), "needs high_freq_factor=4.0 above"),
    (rope(rope_type="default", partial_rotary_factor=0.5), "partial_rotary_factor=0.5"),
    (rope(rope_type="default", mrope_section=[1, 2]), "mrope_section"),
    (rope(rope_theta=0.0), "rope_theta=0.0"),
    ({"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]}, "sliding_attention"),
    ({"use_sliding_window": True}, "use_sliding_window"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; only silu"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ({"auto_map": {"AutoModel": "m.M"}}, "auto_map"),
    ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
    ({"model_type": "mamba"}, "model_type='mamba' is not supported; known families: llama, qwen2, qwen3"),
    ({"model_type": None}, "model_type=None"),
    ({"model_type": ["llama"]}, "model_type="),
    ({"hidden_size": None}, "lacks 'hidden_size'"),
    ({"vocab_size": None}, "lacks 'vocab_size'"),
    ({"rms_norm_eps": None}, "lacks 'rms_norm_eps'"),
    ({"num_hidden_layers": 0}, "num_layers=0"),
    ({"vocab_size": 0}, "vocab_size=0"),
    ({"num_attention_heads": 0, "head_dim": None}, "num_attention_heads=0"),
    ({"num_key_value_heads": 0}, "num_kv_heads=0"),
    ({"num_key_value_heads": 3}, "num_attention_heads=4 is no multiple of 3"),
    ({"head_dim": 15}, "head_dim=15 must be even"),
    ({"hidden_size": -64}, "hidden_size=-64"),
    ({"hidden_size": 64.0}, "hidden_size=64.0 .* whole number"),
    ({"hidden_size": "64"}, "hidden_size='64' .* whole number"),
    ({"num_hidden_layers": True}, "num_hidden_layers=True .* whole number"),
    ({"rms_norm_eps": 0.0}, "rms_norm_eps=0.0"),
    ({"rms_norm_eps": "1e-5"}, "rms_norm_eps='1e-5'"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes'"),
    ({"mlp_bias": 1}, "mlp_bias=1"),
    ({"num_local_experts": 8}, "num_local_experts=8"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
    ({"logits_scaling": 8.0}, "logits_scaling=8.0"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_SETTINGS, ids=[str(changes) for changes, _ in BAD_SETTINGS])
def test_a_setting_that_would_be_another_model_is_refused_by_name(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    edit_config(folder, **changes)
    with pytest.raises(ModelError, match=message):
        load_model(folder, torch.float32)


def test_settings_that_change_nothing_are_let_pass(folder: Path) -> None:
    spec = read_spec(read_config(folder))
    edit_config(
        folder,
        hidden_act="swish",
        layer_types=["full_attention"] * 2,
        use_sliding_window=False,
        sliding_window=None,
        attention_dropout=0.0,
        partial_rotary_factor=1.0,
        quantization_config=None,
        num_local_experts=None,
    )
    assert read_spec(read_config(folder)) == spec


def test_the_spec_counts_its_parameters_and_key_bytes(tiny_model_dir: TinyModelDir) -> None:
    for family, options in (
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("qwen2", {"head_dim": 16}),
        ("qwen3", {"attention_bias": True}),
    ):
        model = load_model(tiny_model_dir(family, **options), torch.float32)
        assert model.spec.num_parameters() == sum(parameter.numel() for parameter in model.parameters())
    assert model.spec.kv_bytes_per_token(2) == 2 * 2 * 2 * 32 * 2
