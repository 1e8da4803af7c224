"""A GGUF file of the Llama architecture, rewritten as a Hugging Face folder.

Written for the models that come inside packages, whose bytes are pinned by digest; so only what
they hold is handled, and anything else is refused by name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from unison.core.errors import ModelError

if TYPE_CHECKING:
    import torch
    from gguf import GGUFReader

CONTROL_TOKEN = 3
"""`tokenizer.ggml.token_type` of a special token."""

GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_gguf(source: Path, folder: Path) -> None:
    """Write config, bfloat16 weights, tokenizer, chat template and end ids of ``source`` into ``folder``.

    Raises ModelError where the file holds something this converter does not know.
    """
    from gguf import GGUFReader
    from safetensors.torch import save_file

    reader = GGUFReader(source)
    config = read_config(reader)
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {key: config[key] for key in TOKEN_ID_KEYS})
    write_tokenizer(reader, config, folder)
    save_file(read_weights(reader, config), folder / "model.safetensors", metadata={"format": "pt"})


def read_config(reader: GGUFReader) -> dict[str, Any]:
    """The transformers configuration that describes the file's weights."""
    architecture = field(reader, "general.architecture")
    if architecture != "llama":
        raise ModelError(f"GGUF architecture {architecture!r} cannot be converted; only 'llama' can")
    if scaling := [key for key in reader.fields if key.startswith("llama.rope.scaling")]:
        raise ModelError(f"GGUF key {scaling[0]!r} is not understood; a file without rope scaling is needed")
    num_heads = field(reader, "llama.attention.head_count")
    hidden_size = field(reader, "llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": field(reader, "tokenizer.ggml.bos_token_id"),
        "dtype": "bfloat16",
        "eos_token_id": field(reader, "tokenizer.ggml.eos_token_id"),
        "head_dim": hidden_size // num_heads,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": field(reader, "llama.feed_forward_length"),
        "max_position_embeddings": field(reader, "llama.context_length"),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": num_heads,
        "num_hidden_layers": field(reader, "llama.block_count"),
        "num_key_value_heads": field(reader, "llama.attention.head_count_kv"),
        "pad_token_id": field(reader, "tokenizer.ggml.padding_token_id"),
        "rms_norm_eps": shortest(field(reader, "llama.attention.layer_norm_rms_epsilon")),
        "rope_parameters": {"rope_theta": shortest(field(reader, "llama.rope.freq_base")), "rope_type": "default"},
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        "vocab_size": field(reader, "llama.vocab_size"),
    }


TOKEN_ID_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


def read_weights(reader: GGUFReader, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """All tensors by Hugging Face name, dequantised in float32 and then rounded to bfloat16."""
    import torch
    from gguf.quants import dequantize

    weights: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        name = hugging_face_name(tensor.name)
        values = dequantize(tensor.data, tensor.tensor_type)
        if ".q_proj." in name:
            values = rows_to_halves(values, config["num_attention_heads"])
        elif ".k_proj." in name:
            values = rows_to_halves(values, config["num_key_value_heads"])
        weights[name] = torch.from_numpy(np.array(values)).to(torch.bfloat16)
    return weights


def hugging_face_name(name: str) -> str:
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``."""
    if name in GLOBAL_NAMES:
        return GLOBAL_NAMES[name]
    match name.split("."):
        case ["blk", layer, part, "weight"] if part in LAYER_NAMES:
            return f"model.layers.{layer}.{LAYER_NAMES[part]}.weight"
    raise ModelError(f"GGUF tensor {name!r} has no place in a Llama model")


def rows_to_halves(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo the row order of GGUF's rotary pairs.

    GGUF keeps the two rows of a rotary pair next to each other; Hugging Face keeps all first rows
    of a head before all second ones. weight: [heads * head_dim, hidden].
    """
    rows, hidden = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, hidden)
    return pairs.swapaxes(1, 2).reshape(rows, hidden)


def write_tokenizer(reader: GGUFReader, config: dict[str, Any], folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = (field(reader, "tokenizer.ggml.model"), field(reader, "tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise ModelError(f"GGUF tokenizer {kind} cannot be converted; only ('gpt2', 'smollm') can")
    tokens = field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in field(reader, "tokenizer.ggml.merges")]
    special = [tokens[i] for i, kind in enumerate(field(reader, "tokenizer.ggml.token_type")) if kind == CONTROL_TOKEN]

    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # "smollm" means: each digit stands alone before GPT-2's splitting, spaces in front of it included.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))

    template = field(reader, "tokenizer.chat_template")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    settings = {
        "add_prefix_space": False,
        "bos_token": tokens[config["bos_token_id"]],
        "clean_up_tokenization_spaces": False,
        "eos_token": tokens[config["eos_token_id"]],
        "model_max_length": config["max_position_embeddings"],
        "pad_token": tokens[config["pad_token_id"]],
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": tokens[field(reader, "tokenizer.ggml.unknown_token_id")],
    }
    write_json(folder / "tokenizer_config.json", settings)


def field(reader: GGUFReader, key: str) -> Any:
    if (found := reader.get_field(key)) is None:
        raise ModelError(f"the GGUF file has no key {key!r}")
    return found.contents()


def shortest(value: float) -> float:
    """The shortest decimal that means the same float32, so 1e-05 and not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
