"""``tiny-random``: a small Llama of random weights, made on the spot, to try everything in seconds.

Its tokens are the 256 bytes and three control tokens. What it writes is noise until it is trained.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from unison.core.seeds import derive_seed
from unison.models.cache import cached_folder
from unison.models.families.llama import read_spec
from unison.models.gguf_convert import write_json
from unison.models.names import TensorSlot, tensor_slots
from unison.ops.philox import uniforms

NAME: Final = "tiny-random"
WRITER_VERSION: Final = 1
"""Raised when other files are written, so that older cached folders are remade."""
CONTROL_TOKENS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TOKEN_IDS: Final = {"bos_token_id": 256, "eos_token_id": 258, "pad_token_id": 256}
CONFIG: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    **TOKEN_IDS,
    "dtype": "bfloat16",
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 2048,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": True,
    "vocab_size": 256 + len(CONTROL_TOKENS),
}
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def ensure_tiny_random() -> Path:
    """The model's Hugging Face folder in the cache, written if it is not there whole.

    Raises ModelError where the cache cannot be written.
    """
    origin = {"title": "small Llama of random weights", "writer": WRITER_VERSION}
    return cached_folder(NAME, origin, lambda folder, _: write_tiny_random(folder))


def write_tiny_random(folder: Path) -> None:
    """Write the model into ``folder``: the same bytes on every machine."""
    from safetensors.torch import save_file

    write_json(folder / "config.json", CONFIG)
    write_json(folder / "generation_config.json", dict(TOKEN_IDS))
    weights = {slot.name: random_weight(slot) for slot in tensor_slots(read_spec(CONFIG))}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_byte_tokenizer(folder)


def random_weight(slot: TensorSlot) -> Tensor:
    """Matrices: uniform noise of variance 1 / columns, seeded by the tensor's name; norms: ones."""
    if len(slot.shape) == 1:
        return torch.ones(slot.shape, dtype=torch.bfloat16)
    count = math.prod(slot.shape)
    noise = torch.from_numpy(uniforms([derive_seed(NAME, slot.name)] * count, range(count)))
    scale = math.sqrt(12 / slot.shape[1])
    return ((noise - 0.5) * scale).reshape(slot.shape).to(torch.bfloat16)


def write_byte_tokenizer(folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja; the id of a byte is its value."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(byte_alphabet())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    settings = {
        "bos_token": CONTROL_TOKENS[0],
        "clean_up_tokenization_spaces": False,
        "eos_token": CONTROL_TOKENS[2],
        "model_max_length": CONFIG["max_position_embeddings"],
        "pad_token": CONTROL_TOKENS[0],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    write_json(folder / "tokenizer_config.json", settings)


def byte_alphabet() -> list[str]:
    """The printable letters that byte-level tokenizers (GPT-2's and its heirs) write for the bytes 0 to 255."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    stand_ins = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(stand_ins)) for byte in range(256)]
