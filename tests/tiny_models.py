"""Small random models in Hugging Face layout, written by transformers itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from unison.models.tiny_random import write_byte_tokenizer

VOCAB_SIZE = 512
"""Ids 0 to 255 are the bytes, 256 to 258 control tokens; ids from 259 on have no text."""
SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "bos_token_id": 256,
    "eos_token_id": 258,
    "pad_token_id": 256,
}


def write_tiny_model(folder: Path, family: str, **config_overrides: Any) -> None:
    """A model with float32 weights, a byte tokenizer and a chat template. Always the same bits.

    family: llama, qwen2 or qwen3; config_overrides: fields of the transformers configuration.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **{**SHAPE, **config_overrides})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        randomise(model)
    model.save_pretrained(folder)
    write_byte_tokenizer(folder)


def randomise(model: torch.nn.Module) -> None:
    """Norms off one and biases off zero, so that one left out shows; weights large enough for peaked logits."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.2)
            else:
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
