"""A critic's values: bits of their own, zero at first, from a policy's folder or a critic's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.conftest import TinyModelDir
from unison.core.errors import ModelError
from unison.models.loading import load_model
from unison.models.value_model import VALUE_HEAD, ValueModel, load_value_model, published_values
from unison.ops.padding import EXACT
from unison.ops.plan import packed_plan
from unison.training.masters import MasterWeights

WEIGHTS = "model.safetensors"
BOTH_DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
FAMILIES = pytest.mark.parametrize(
    ("family", "tied"), [("llama", False), ("llama", True), ("qwen2", False), ("qwen3", True)]
)


def critic(folder: Path, dtype: torch.dtype = torch.float32) -> ValueModel:
    """A critic with a head that has learnt something."""
    model = load_value_model(folder, dtype)
    model.value_head.normal_(generator=torch.Generator().manual_seed(1))
    return model


def texts(lengths: Sequence[int]) -> list[Tensor]:
    return [
        torch.randint(256, (length,), generator=torch.Generator().manual_seed(i)) for i, length in enumerate(lengths)
    ]


def values_of(model: ValueModel, rows: Sequence[Tensor]) -> list[Tensor]:
    """Values of each row of one packed batch."""
    plan = packed_plan([len(row) for row in rows], path=EXACT)
    padding = plan.num_rows - sum(map(len, rows))
    tokens = torch.cat([*rows, torch.zeros(padding, dtype=torch.int64)])
    positions = torch.cat([*(torch.arange(len(row)) for row in rows), torch.zeros(padding, dtype=torch.int64)])
    values: Tensor = model(tokens, positions[None], plan)
    assert values.shape == (plan.num_rows,) and values.dtype == torch.float32
    return [values[start:end] for start, end in plan.segments]


def copy_of(source: Path, tmp_path: Path, edit: Callable[[dict[str, Tensor]], object]) -> Path:
    folder = Path(shutil.copytree(source, tmp_path / "model"))
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS)
    return folder


@FAMILIES
@BOTH_DTYPES
def test_of_a_policy_the_trunk_is_taken_and_every_value_is_zero(
    tiny_model_dir: TinyModelDir, family: str, tied: bool, dtype: torch.dtype
) -> None:
    folder = tiny_model_dir(family, tie_word_embeddings=tied)
    model, policy = load_value_model(folder, dtype), load_model(folder, dtype)
    assert all(torch.equal(value, torch.zeros(len(value))) for value in values_of(model, texts([3, 20])))
    own = dict(model.named_parameters())
    expected = {f"trunk.{name}": tensor for name, tensor in policy.named_parameters() if name != "head"}
    assert own.keys() == {*expected, "value_head"}
    assert all(torch.equal(own[name], tensor) for name, tensor in expected.items())
    assert model.value_head.shape == (1, 64) and {tensor.dtype for tensor in own.values()} == {dtype}
    assert not any(tensor.requires_grad for tensor in own.values())


@BOTH_DTYPES
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_value_depends_on_the_tokens_up_to_its_own_alone(
    tiny_model_dir: TinyModelDir, family: str, dtype: torch.dtype
) -> None:
    model = critic(tiny_model_dir(family), dtype)
    generator = torch.Generator().manual_seed(0)
    rows = texts([1 + int(n) for n in torch.randint(90, (64,), generator=generator)])
    alone = [values_of(model, [row])[0] for row in rows]
    assert len({float(value) for row in alone for value in row}) > 100
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for count in (1, 2, 3, 5, 8, 13, 33, 64):
            for start in {0, 64 - count}:
                together = values_of(model, rows[start : start + count])
                assert all(map(torch.equal, together, alone[start:])), f"{count} rows, {threads} threads"
        for row, expected in zip(rows[:6], alone, strict=False):
            cut = 1 + len(row) // 2
            assert torch.equal(values_of(model, [row[:cut]])[0], expected[:cut])


@BOTH_DTYPES
def test_gradients_make_no_other_forward(tiny_model_dir: TinyModelDir, dtype: torch.dtype) -> None:
    model = critic(tiny_model_dir(), dtype)
    expected = values_of(model, texts([9, 30]))
    model.requires_grad_(True)
    for model.trunk.checkpoint_layers in (False, True):
        assert all(map(torch.equal, values_of(model, texts([9, 30])), expected))


@BOTH_DTYPES
def test_values_are_products_of_the_trunk_and_the_head(tiny_model_dir: TinyModelDir, dtype: torch.dtype) -> None:
    folder, (row,) = tiny_model_dir(), texts([24])
    model = critic(folder, dtype)
    hidden = load_model(folder, dtype)(row, torch.arange(24)[None], packed_plan([24], path=EXACT))
    expected = [
        sum(x * w for x, w in zip(vector, model.value_head[0].tolist(), strict=True)) for vector in hidden.tolist()
    ]
    assert torch.allclose(values_of(model, [row])[0].double(), torch.tensor(expected).double(), rtol=1e-5, atol=1e-5)


def test_at_first_the_head_alone_has_a_gradient_then_every_weight(tiny_model_dir: TinyModelDir) -> None:
    model = load_value_model(tiny_model_dir("qwen3"), torch.float32).requires_grad_(True)
    for head, moved in ((0.0, {"value_head"}), (0.5, {name for name, _ in model.named_parameters()})):
        model.value_head.data.fill_(head)
        model.zero_grad()
        (values_of(model, texts([40]))[0] - 1).square().sum().backward()  # type: ignore[no-untyped-call]
        grads = {name: parameter.grad for name, parameter in model.named_parameters()}
        assert all(grad is not None for grad in grads.values())
        assert {name for name, grad in grads.items() if grad is not None and bool(grad.any())} == moved


@BOTH_DTYPES
@pytest.mark.parametrize("checkpoint_layers", [False, True])
def test_masters_learn_a_value(tiny_model_dir: TinyModelDir, dtype: torch.dtype, checkpoint_layers: bool) -> None:
    folder, rows = tiny_model_dir(), texts([12, 30])
    wide = load_value_model(folder, torch.float32)
    model = wide if dtype == torch.float32 else load_value_model(folder, dtype)
    model.trunk.checkpoint_layers = checkpoint_layers
    masters = MasterWeights(model, {name: parameter.detach() for name, parameter in wide.named_parameters()})
    optimizer = torch.optim.AdamW(masters.parameters.values(), lr=1e-2)
    losses = []
    for _ in range(12):
        masters.zero_gradients()
        for row in rows:
            loss = (values_of(model, [row])[0] - 0.7).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
        assert all(gradient.dtype == torch.float32 for gradient in masters.gradients())
        optimizer.step()
        assert masters.all_finite()
        masters.publish()
        losses.append(float(loss.detach()))
    assert losses[0] == pytest.approx(0.49) and losses[-1] < 0.1
    assert torch.equal(model.value_head, masters.parameters["value_head"].to(dtype))


@FAMILIES
def test_a_saved_critic_comes_back_with_its_head(
    tiny_model_dir: TinyModelDir, tmp_path: Path, family: str, tied: bool
) -> None:
    source = tiny_model_dir(family, tie_word_embeddings=tied)
    model = critic(source)
    save_file({name: t.contiguous() for name, t in published_values(model).items()}, tmp_path / WEIGHTS)
    shutil.copy(source / "config.json", tmp_path)
    again = load_value_model(tmp_path, torch.float32)
    assert all(map(torch.equal, again.parameters(), model.parameters()))
    masters = {name: parameter.double() for name, parameter in model.named_parameters()}
    assert all(tensor.dtype == torch.float64 for tensor in published_values(model, masters).values())


def test_transformers_reads_it_as_a_classifier_of_one_label(tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    source, rows = tiny_model_dir(), texts([17])
    model = critic(source)
    save_file(
        {name: t.contiguous() for name, t in published_values(model).items()}, tmp_path / WEIGHTS, {"format": "pt"}
    )
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForSequenceClassification"]}))
    other, report = AutoModelForSequenceClassification.from_pretrained(
        tmp_path, num_labels=1, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    with torch.no_grad():
        expected = other(rows[0][None]).logits[0, 0]
    assert float(values_of(model, rows)[0][-1]) == pytest.approx(float(expected), abs=1e-4)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.update({VALUE_HEAD: torch.zeros(2, 64)}), r"'score.weight' is torch.float32 \[2, 64\].*\[1, 64\]"),
        (lambda t: t.update({VALUE_HEAD: torch.zeros(1, 64, dtype=torch.int8)}), r"'score.weight' is torch.int8"),
        (lambda t: t.update({"score.bias": torch.zeros(1)}), "'score.bias' has no place in this model"),
        (lambda t: t.pop("model.norm.weight"), "1 of 20 tensors were never written: model.norm.weight"),
    ],
)
def test_what_does_not_fit_is_refused(
    tiny_model_dir: TinyModelDir, tmp_path: Path, edit: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    folder = copy_of(tiny_model_dir(), tmp_path, edit)
    with pytest.raises(ModelError, match=message):
        load_value_model(folder, torch.float32)


def test_a_vocabulary_projection_must_be_the_embedding_where_it_is_tied(
    tiny_model_dir: TinyModelDir, tmp_path: Path
) -> None:
    folder = copy_of(
        tiny_model_dir(tie_word_embeddings=True),
        tmp_path,
        lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}),
    )
    with pytest.raises(ModelError, match="differs from the one it is tied to"):
        load_value_model(folder, torch.float32)
