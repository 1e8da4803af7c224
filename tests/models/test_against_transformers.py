"""The decoder against transformers, from the same folder: logits, activations and gradients in float32."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conftest import TinyModelDir
from unison.models.decoder import Decoder, Taps
from unison.models.loading import load_model
from unison.models.names import published_tensors
from unison.models.rope import RopeTable, inverse_frequencies
from unison.models.spec import RopeSpec
from unison.ops.padding import EXACT, FAST, NumericsPath
from unison.ops.plan import packed_plan
from unison.ops.vocab import token_logprobs, vocabulary_logits

TOLERANCE = 3e-4
LENGTHS = (1, 2, 31, 33, 130, 390)
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e3}
# 128 original positions put the frequencies of 32 dimensions on all three sides of the ramp.
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
    "rope_theta": 1e4,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama attention bias": ("llama", {"attention_bias": True}),
    "llama mlp bias": ("llama", {"mlp_bias": True}),
    "llama all biases, tied": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama one head per key": ("llama", {"num_key_value_heads": 4}),
    "llama one key for all heads": ("llama", {"num_key_value_heads": 1}),
    "qwen3 three heads per key": ("qwen3", {"num_attention_heads": 6}),
    "llama linear rope": ("llama", {"rope_parameters": LINEAR}),
    "llama llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama large theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "llama other epsilon": ("llama", {"rms_norm_eps": 1e-2}),
    "llama head dim of its own": ("llama", {"head_dim": 8}),
    "qwen2": ("qwen2", {"head_dim": 16}),
    "qwen2 tied": ("qwen2", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3 attention bias": ("qwen3", {"attention_bias": True}),
    "qwen3 odd vocabulary": ("qwen3", {"vocab_size": 515}),
}
BOTH_PATHS = pytest.mark.parametrize("path", [EXACT, FAST], ids=["exact", "fast"])


def their_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def random_rows(vocab_size: int, lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]


def packed_hidden(
    model: Decoder, rows: Sequence[Sequence[int]], path: NumericsPath, taps: Taps | None = None
) -> list[Tensor]:
    """Hidden states of each row, all of them computed in one call."""
    plan = packed_plan([len(row) for row in rows], path=path)
    padding = [0] * (plan.num_rows - sum(map(len, rows)))
    tokens = torch.tensor([token for row in rows for token in row] + padding)
    positions = torch.tensor([[place for row in rows for place in range(len(row))] + padding])
    hidden = model(tokens, positions, plan, taps=taps)
    return [hidden[start:end] for start, end in plan.segments]


def packed_logits(model: Decoder, rows: Sequence[Sequence[int]], path: NumericsPath) -> list[Tensor]:
    return [vocabulary_logits(hidden, model.head_weight(), path) for hidden in packed_hidden(model, rows, path)]


@torch.no_grad()
def assert_same_logits(folder: Path, rows: Sequence[Sequence[int]], path: NumericsPath) -> None:
    theirs = their_model(folder)
    for row, logits in zip(rows, packed_logits(load_model(folder, torch.float32), rows, path), strict=True):
        expected = theirs(torch.tensor([row])).logits[0]
        assert expected.std() > 0.5, "logits too flat to tell anything"
        torch.testing.assert_close(logits, expected, rtol=0, atol=TOLERANCE)


@BOTH_PATHS
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_a_packed_batch_are_those_of_each_sequence_alone(
    tiny_model_dir: TinyModelDir, variant: str, path: NumericsPath
) -> None:
    family, options = VARIANTS[variant]
    folder = tiny_model_dir(family, **options)
    assert_same_logits(folder, random_rows(json.loads((folder / "config.json").read_text())["vocab_size"]), path)


@pytest.mark.parametrize("order", [(390, 1, 130, 2, 33, 31), (5, 5, 5), (1,), (8,), (1, 1, 1, 1, 1)])
def test_logits_do_not_depend_on_the_order_of_packing(tiny_model_dir: TinyModelDir, order: tuple[int, ...]) -> None:
    assert_same_logits(tiny_model_dir("qwen3"), random_rows(512, order), EXACT)


@pytest.mark.parametrize("rope", [LINEAR, LLAMA3], ids=["linear", "llama3"])
@pytest.mark.parametrize("kind_key", ["type", "rope_type"])
def test_old_style_rope_settings_mean_the_same(
    tiny_model_dir: TinyModelDir, tmp_path: Path, rope: dict[str, Any], kind_key: str
) -> None:
    folder = tmp_path / "old"
    shutil.copytree(tiny_model_dir("llama", rope_parameters=rope), folder)
    config = json.loads((folder / "config.json").read_text())
    settings = config.pop("rope_parameters")
    config["rope_theta"] = settings.pop("rope_theta")
    config["rope_scaling"] = {kind_key: settings.pop("rope_type"), **settings}
    (folder / "config.json").write_text(json.dumps(config))
    assert_same_logits(folder, random_rows(512), EXACT)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@torch.no_grad()
def test_taps_give_the_residual_stream_and_the_last_hidden_state(tiny_model_dir: TinyModelDir, family: str) -> None:
    folder = tiny_model_dir(family)
    (row,) = random_rows(512, (40,))
    taps = Taps(frozenset({"layer.0", "final"}))
    (hidden,) = packed_hidden(load_model(folder, torch.float32), [row], EXACT, taps)
    expected = their_model(folder)(torch.tensor([row]), output_hidden_states=True).hidden_states
    assert taps.values.keys() == {"layer.0", "final"}
    torch.testing.assert_close(taps.values["layer.0"], expected[1][0], rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(taps.values["final"], expected[-1][0], rtol=0, atol=TOLERANCE)
    assert torch.equal(taps.values["final"], hidden)


@torch.no_grad()
def test_embeddings_may_take_the_place_of_tokens(tiny_model_dir: TinyModelDir) -> None:
    model = load_model(tiny_model_dir(), torch.float32)
    tokens, positions = torch.tensor(random_rows(512, (8,))[0]), torch.arange(8)[None]
    plan = packed_plan([8], path=EXACT)
    by_embedding = model(None, positions, plan, embeddings_TE=model.embed[tokens])
    assert torch.equal(by_embedding, model(tokens, positions, plan))


def test_a_call_that_cannot_be_meant_is_refused(tiny_model_dir: TinyModelDir) -> None:
    model = load_model(tiny_model_dir(), torch.float32)
    tokens, positions = torch.zeros(8, dtype=torch.int64), torch.arange(8)[None]
    plan = packed_plan([8], path=EXACT)
    with pytest.raises(ValueError, match="either tokens or embeddings"):
        model(None, positions, plan)
    with pytest.raises(ValueError, match="either tokens or embeddings"):
        model(tokens, positions, plan, embeddings_TE=model.embed[tokens])
    with pytest.raises(ValueError, match="3 axes"):
        model(tokens, positions.expand(3, -1), plan)
    with pytest.raises(ValueError, match=r"layer\.2"):
        model(tokens, positions, plan, taps=Taps(frozenset({"layer.2"})))


@BOTH_PATHS
@pytest.mark.parametrize("variant", ["llama", "llama all biases, tied", "qwen2", "qwen3", "qwen3 tied"])
def test_gradients_of_summed_log_probs(tiny_model_dir: TinyModelDir, variant: str, path: NumericsPath) -> None:
    family, options = VARIANTS[variant]
    folder = tiny_model_dir(family, **options)
    rows = random_rows(512, (2, 31, 33, 130))
    model = load_model(folder, torch.float32).requires_grad_(True)
    hidden = torch.cat([part[:-1] for part in packed_hidden(model, rows, path)])
    targets = torch.tensor([token for row in rows for token in row[1:]])
    values, _ = token_logprobs(hidden, model.head_weight(), targets, torch.ones(len(targets)), path=path)
    values.sum().backward()
    theirs = their_model(folder)
    total = torch.zeros(())
    for row in rows:
        logprobs = theirs(torch.tensor([row])).logits[0, :-1].log_softmax(-1)
        total = total + logprobs.gather(1, torch.tensor(row[1:])[:, None]).sum()
    total.backward()
    torch.testing.assert_close(values.sum(), total, rtol=1e-5, atol=0)
    expected = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    ours = published_tensors(model, gradients)
    assert ours.keys() == expected.keys()
    for name, gradient in ours.items():
        scale = expected[name].norm()
        assert scale > 0, name
        assert (gradient - expected[name]).norm() <= 1e-4 * scale, name


@BOTH_PATHS
def test_the_real_model_agrees(smollm2: Path, path: NumericsPath) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    texts = ("The capital of France is Paris, and that of Italy is", "def add(a, b):\n    return a +")
    assert_same_logits(smollm2, [tokenizer(text)["input_ids"] for text in texts], path)


def test_rope_frequencies_by_hand() -> None:
    plain = inverse_frequencies(RopeSpec(theta=1e4), 8)
    torch.testing.assert_close(plain, torch.tensor([1.0, 0.1, 0.01, 0.001]))
    linear = inverse_frequencies(RopeSpec(theta=1e4, kind="linear", factor=4.0), 8)
    torch.testing.assert_close(linear, torch.tensor([0.25, 0.025, 0.0025, 0.00025]))
    llama3 = RopeSpec(
        theta=1e4, kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=128
    )
    # 128 / wavelength is 20.4, 2.04, 0.2 and 0.02: kept, on the ramp at (2.037 - 1) / 3, divided, divided.
    ramp = (128 * 0.1 / (2 * 3.141592653589793) - 1) / 3
    middle = 0.1 * ramp + 0.1 / 8 * (1 - ramp)
    expected = torch.tensor([1.0, middle, 0.01 / 8, 0.001 / 8])
    torch.testing.assert_close(inverse_frequencies(llama3, 8), expected)


def test_a_rope_row_does_not_depend_on_what_was_asked_before() -> None:
    spec = RopeSpec(theta=1e4)
    far_first, near_first = RopeTable(spec, 32), RopeTable(spec, 32)
    far = far_first.rows(torch.tensor([5000, 7]))
    near = [near_first.rows(torch.tensor([position])) for position in (7, 1023, 1024, 5000)]
    for part in (0, 1):
        assert torch.equal(far[part][0], near[3][part][0])
        assert torch.equal(far[part][1], near[0][part][0])
    assert far_first.rows(torch.empty(0, dtype=torch.int64))[0].shape == (0, 1, 32)
