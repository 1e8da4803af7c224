"""Model folders in and out: what a folder must hold, what is refused by name, and bits that survive."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.conftest import TinyModelDir
from unison.core.errors import ModelError
from unison.models.decoder import Decoder
from unison.models.loading import WeightLoader, load_model, read_config
from unison.models.names import published_tensors, tensor_slots
from unison.models.saving import COPIED_FILES, export_model
from unison.models.spec import DecoderSpec, RopeSpec
from unison.ops import basic
from unison.ops.padding import EXACT
from unison.ops.vocab import vocabulary_logits
from unison.weights.push import push_weights
from unison.weights.transaction import Staging, WeightStore

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
NORM, EMBED, HEAD = "model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"
QUERIES = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def folder(tiny_model_dir: TinyModelDir, tmp_path: Path) -> Path:
    """A copy of the small Llama that a test may spoil."""
    return copy_of(tiny_model_dir(), tmp_path)


def copy_of(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source, tmp_path / "model"))


def edit_tensors(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file(
        {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()},
        folder / WEIGHTS,
    )


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def refused(folder: Path, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_model(folder, torch.float32)


BAD_TENSORS: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "missing": (lambda t: t.pop(QUERIES), f"1 of 21 tensors were never written: {QUERIES}"),
    "missing head": (lambda t: t.pop(HEAD), f"1 of 21 tensors were never written: {HEAD}"),
    "foreign": (lambda t: t.update({"model.layers.2.mlp.up_proj.weight": t[NORM]}), r"layers\.2.*' has no place"),
    "foreign bias": (lambda t: t.update({QUERIES.replace("weight", "bias"): t[NORM]}), "q_proj.bias' has no place"),
    "too small": (lambda t: t.update({QUERIES: t[QUERIES][:-1]}), rf"{QUERIES}' has shape \[127, 64\]; \[128, 64\]"),
    "transposed": (lambda t: t.update({QUERIES: t[QUERIES].t()}), r"shape \[64, 128\]; \[128, 64\] is needed"),
    "one dim more": (lambda t: t.update({NORM: t[NORM][None]}), r"shape \[1, 64\]; \[64\] is needed"),
    "integers": (lambda t: t.update({NORM: t[NORM].to(torch.int8)}), f"{NORM}' has dtype torch.int8"),
    "float64": (lambda t: t.update({NORM: t[NORM].double()}), "dtype torch.float64; float32, bfloat16 or float16"),
    "all missing": (lambda t: t.clear(), "21 of 21 tensors were never written: .* and 16 more"),
    "other frequencies": (
        lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}),
        "differs from the rotary frequencies",
    ),
}


@pytest.mark.parametrize("spoiled", BAD_TENSORS)
def test_a_set_of_tensors_that_is_not_the_model_is_refused(folder: Path, spoiled: str) -> None:
    edit, message = BAD_TENSORS[spoiled]
    edit_tensors(folder, edit)
    refused(folder, message)


def test_a_tensor_that_lies_in_two_files_is_refused(folder: Path) -> None:
    save_file({NORM: torch.ones(64)}, folder / "more.safetensors")
    refused(folder, f"{NORM}' was given twice")


def test_rotary_frequencies_of_old_checkpoints_are_let_pass(folder: Path) -> None:
    frequencies = 1e4 ** (-torch.arange(0, 32, 2) / 32)
    edit_tensors(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": frequencies}))
    load_model(folder, torch.float32)


@pytest.mark.parametrize("spoiled", ["truncated", "garbage", "empty", "header only"])
def test_a_broken_weight_file_is_named(folder: Path, spoiled: str) -> None:
    data = (folder / WEIGHTS).read_bytes()
    broken = {"truncated": data[:-100], "garbage": b"\xff" * 1000, "empty": b"", "header only": data[:200]}[spoiled]
    (folder / WEIGHTS).write_bytes(broken)
    refused(folder, r"model\.safetensors is no readable safetensors file")


def split_weights(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    parts = {"a.safetensors": [NORM, EMBED], "b.safetensors": [name for name in tensors if name not in (NORM, EMBED)]}
    for file, names in parts.items():
        save_file({name: tensors[name] for name in names}, folder / file)
    weight_map = {name: file for file, names in parts.items() for name in names}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def test_a_split_model_loads_by_its_index(folder: Path) -> None:
    expected = load_file(folder / WEIGHTS)
    split_weights(folder)
    save_file({"stray": torch.ones(1)}, folder / "stray.safetensors")
    tensors = published_tensors(load_model(folder, torch.float32))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())


def test_an_index_that_names_an_absent_file_is_refused(folder: Path) -> None:
    split_weights(folder)
    (folder / "b.safetensors").unlink()
    refused(folder, r"lacks weight files named by its index: b\.safetensors")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}', "\ud83d"])
def test_a_broken_index_is_refused(folder: Path, text: str) -> None:
    (folder / INDEX).write_bytes(text.encode("utf-16", "surrogatepass"))
    refused(folder, r"index\.json is no readable weight index")
    (folder / INDEX).write_bytes(text.encode("utf-8", "surrogatepass"))
    refused(folder, r"index\.json is no readable weight index")


@pytest.mark.parametrize("place", ["../outside.safetensors", "/outside.safetensors", ".."])
def test_an_index_does_not_lead_out_of_its_folder(folder: Path, place: str) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {NORM: place}}))
    with pytest.raises(ModelError):
        load_model(folder, torch.float32)


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    refused(folder, "has no weights")
    (folder / "config.json").unlink()
    refused(folder, r"no model folder: it has no config\.json")
    refused(folder / "absent", "no model folder")


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"null", b'"llama"', b"\xff\xfe{}"])
def test_a_broken_config_is_named(folder: Path, text: bytes) -> None:
    (folder / "config.json").write_bytes(text)
    refused(folder, r"config\.json (cannot be read|must hold a JSON object)")


def test_a_tied_model_may_bring_its_output_layer_if_it_is_the_embedding(
    tiny_model_dir: TinyModelDir, tmp_path: Path
) -> None:
    folder = copy_of(tiny_model_dir(tie_word_embeddings=True), tmp_path)
    edit_tensors(folder, lambda t: t.update({HEAD: t[EMBED].clone()}))
    model = load_model(folder, torch.bfloat16)
    assert model.head_weight() is model.embed
    edit_tensors(folder, lambda t: t.update({HEAD: t[EMBED] + 1}))
    refused(folder, "differs from the one it is tied to")
    edit_tensors(folder, lambda t: t.update({HEAD: t[EMBED][:-1]}))
    refused(folder, rf"{HEAD}' has shape \[511, 64\]")


@pytest.mark.parametrize("staging", get_args(Staging))
def test_an_update_of_tied_embeddings_changes_both_ends(staging: Staging) -> None:
    spec = DecoderSpec(
        family="llama",
        vocab_size=3,
        hidden_size=2,
        intermediate_size=2,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        max_positions=8,
        norm_epsilon=1e-5,
        rope=RopeSpec(theta=1e4),
        tied_embeddings=True,
    )
    model = Decoder(spec, torch.float32).requires_grad_(False)
    store = WeightStore(model, staging=staging)
    layers = {slot.name: torch.ones(slot.shape) for slot in tensor_slots(spec)}
    hidden = torch.tensor([[1.0, 2.0]])
    first, second = [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], [[2.0, 0.0], [0.0, 1.0], [1.0, -1.0]]
    for version, (embedding, logits) in enumerate([(first, [1, 2, 3]), (second, [2, 2, -1])], 1):
        push_weights(store, {**layers, EMBED: torch.tensor(embedding)}, version)
        assert vocabulary_logits(hidden, model.head_weight(), EXACT).tolist() == [logits]
        assert basic.embedding(torch.arange(3), model.embed).tolist() == embedding


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_saving_and_loading_keeps_every_bit(
    tiny_model_dir: TinyModelDir, tmp_path: Path, family: str, dtype: torch.dtype
) -> None:
    from transformers import AutoModelForCausalLM

    source = tiny_model_dir(family, head_dim=16)
    model = load_model(source, dtype)
    expected = {name: tensor.to(dtype) for name, tensor in load_file(source / WEIGHTS).items()}
    target = tmp_path / "deep" / "export"
    written = export_model(model, source, target)
    assert written == sorted(target.iterdir())
    saved = load_file(target / WEIGHTS)
    again = published_tensors(load_model(target, dtype))
    theirs = AutoModelForCausalLM.from_pretrained(target).state_dict()
    assert saved.keys() == again.keys() == theirs.keys() == expected.keys()
    for name, tensor in expected.items():
        for other in (saved[name], again[name], theirs[name]):
            assert other.dtype == dtype
            assert torch.equal(other, tensor), name


def test_a_tied_model_is_saved_with_its_embedding_once(tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source = tiny_model_dir(tie_word_embeddings=True)
    export_model(load_model(source, torch.float32), source, tmp_path)
    saved = load_file(tmp_path / WEIGHTS)
    assert HEAD not in saved
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(theirs.lm_head.weight, saved[EMBED])


@pytest.mark.parametrize("file", ["note.txt", ".hidden", "config.json"])
def test_an_export_overwrites_nothing(folder: Path, tmp_path: Path, file: str) -> None:
    target = tmp_path / "export"
    target.mkdir()
    (target / file).write_text("mine")
    with pytest.raises(ModelError, match="is not empty; export into a new folder"):
        export_model(load_model(folder, torch.float32), folder, target)
    assert [(path.name, path.read_text()) for path in target.iterdir()] == [(file, "mine")]


def test_an_export_carries_tokenizer_template_and_config_along(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    edit_config(folder, torch_dtype="float16", my_own_key=[1, 2])
    (folder / "generation_config.json").write_text('{"eos_token_id": [258, 256]}')
    before = read_config(folder)
    target = tmp_path / "export"
    export_model(load_model(folder, torch.bfloat16), folder, target)
    for name in COPIED_FILES:
        assert (target / name).is_file() is (folder / name).is_file()
        if (target / name).is_file():
            assert (target / name).read_bytes() == (folder / name).read_bytes(), name
    assert {"tokenizer.json", "chat_template.jinja", "generation_config.json"} <= {p.name for p in target.iterdir()}
    before.pop("torch_dtype")
    assert read_config(target) == {**before, "dtype": "bfloat16"}
    ids = AutoTokenizer.from_pretrained(target)("Grüße")["input_ids"]
    assert ids == AutoTokenizer.from_pretrained(folder)("Grüße")["input_ids"]


def test_masters_may_be_exported_in_place_of_the_weights(folder: Path, tmp_path: Path) -> None:
    model = load_model(folder, torch.bfloat16)
    masters = {name: parameter.detach().float() + 1e-6 for name, parameter in model.named_parameters()}
    export_model(model, folder, tmp_path / "export", masters)
    saved = load_file(tmp_path / "export" / WEIGHTS)
    assert all(torch.equal(saved[name], tensor) for name, tensor in published_tensors(model, masters).items())
    assert read_config(tmp_path / "export")["dtype"] == "float32"


def test_loading_rounds_once_and_freezes(folder: Path) -> None:
    model = load_model(folder, torch.bfloat16)
    expected = load_file(folder / WEIGHTS)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    for name, tensor in published_tensors(model).items():
        assert torch.equal(tensor, expected[name].to(torch.bfloat16)), name


def test_published_tensors_tile_the_parameters(tiny_model_dir: TinyModelDir) -> None:
    spec = load_model(tiny_model_dir("qwen3", attention_bias=True), torch.float32).spec
    parameters = {
        name: torch.zeros_like(parameter) for name, parameter in Decoder(spec, torch.float32).named_parameters()
    }
    loader = WeightLoader(spec, parameters)
    for number, slot in enumerate(tensor_slots(spec), 1):
        loader.write(slot.name, torch.full(slot.shape, float(number)))
    loader.finish()
    written = {float(value) for tensor in parameters.values() for value in tensor.unique()}
    assert written == {float(number) for number in range(1, len(tensor_slots(spec)) + 1)}
