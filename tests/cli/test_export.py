from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import TinyModelDir
from tests.evaluation.runs import make_run, masters
from unison.cli.main import main
from unison.evaluation.files import evaluation_path
from unison.models.loading import load_model
from unison.models.names import published_tensors

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def run(tiny_model_dir: TinyModelDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return make_run(Path("run"), tiny_model_dir(tie_word_embeddings=True))


def logits(folder: Path, dtype: torch.dtype) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    with torch.no_grad():
        result: torch.Tensor = model(torch.tensor([[5, 70, 200, 9]])).logits
    return result


def test_an_exported_checkpoint_gives_the_logits_of_its_masters_in_transformers(
    run: Path, tiny_model_dir: TinyModelDir
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = tiny_model_dir(tie_word_embeddings=True)
    assert main(["export", "run@1", "out", "--dtype", "float32"]) == 0
    expected = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        for parameter in expected.parameters():
            parameter.mul_(1 + 0.01 * 1)  # what makes step 1 of the run
        wanted = expected(torch.tensor([[5, 70, 200, 9]])).logits
    assert torch.equal(logits(Path("out"), torch.float32), wanted)
    tokenizer = AutoTokenizer.from_pretrained("out")
    messages = [{"role": "user", "content": "Hello"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == AutoTokenizer.from_pretrained(
        base
    ).apply_chat_template(messages, tokenize=False)


def test_the_default_dtype_gives_the_very_weights_that_sampled(run: Path) -> None:
    assert main(["export", "run@2", "from-checkpoint"]) == 0
    assert main(["export", "run", "from-export"]) == 0
    one, other = (load_file(f"{name}/model.safetensors") for name in ("from-checkpoint", "from-export"))
    assert set(one) == set(other) and all(torch.equal(one[name], other[name]) for name in one)
    assert all(tensor.dtype == torch.bfloat16 for tensor in one.values())
    assert torch.equal(logits(Path("from-checkpoint"), torch.float32), logits(Path("run/model"), torch.float32))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_each_dtype_is_one_rounding_of_the_masters(run: Path, tiny_model_dir: TinyModelDir, dtype: str) -> None:
    base = tiny_model_dir(tie_word_embeddings=True)
    assert main(["export", "run@1", "out", "--dtype", dtype]) == 0
    expected = published_tensors(load_model(base, torch.float32), masters(base, 1))
    saved = load_file("out/model.safetensors")
    wanted = getattr(torch, dtype)
    assert all(torch.equal(saved[name], tensor.to(wanted)) for name, tensor in expected.items())
    assert json.loads(Path("out/config.json").read_text())["dtype"] == dtype


def test_the_card_says_what_the_model_is_with_the_runs_evaluation(run: Path, capsys: Capture) -> None:
    assert main(["eval", "--model", "run@1", "--json", "whole.json"]) == 0
    digest = json.loads(Path("whole.json").read_text())["model"]["weights_digest"]
    evaluation_path(run, 1).parent.mkdir()
    evaluation_path(run, 1).write_text(Path("whole.json").read_text())
    assert main(["export", "run@1", "out"]) == 0
    card = Path("out/README.md").read_text()
    for word in ("| step | 1 |", f"`{digest}`", "exact_answer", "main  sampled", "library_name: transformers"):
        assert word in card
    assert main(["export", "run@2", "other"]) == 0
    assert "no evaluation at this step" in Path("other/README.md").read_text()
    assert digest[:16] in capsys.readouterr().out


def test_names_in_a_card_cannot_break_out_of_their_place(run: Path) -> None:
    config = (run / "config.toml").read_text().replace('"a run"', '"x`| # y <b>"')
    (run / "config.toml").write_text(config)
    assert main(["export", "run", "out"]) == 0
    card = Path("out/README.md").read_text()
    assert "x`" not in card and "|  # y" not in card and "<b>" not in card.split("| | |")[0]


def test_an_exported_model_is_a_model_for_every_other_command(run: Path, capsys: Capture) -> None:
    assert main(["export", "run@2", "deep/out"]) == 0
    assert main(["generate", "--model", "deep/out", "--prompt", "1+1=", "--max-new-tokens", "2"]) == 0
    assert sorted(path.name for path in Path("deep").iterdir()) == ["out"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run@1"], "the following arguments are required: OUT"),
        (["run@1", "full"], "full is not empty"),
        (["run@1", "run/config.toml"], "is a file"),
        (["run@9", "out"], "there are steps 1, 2"),
        (["no-such", "out"], "'no-such' is no run folder"),
        (["run@1", "out", "--dtype", "int8"], "invalid choice"),
        (["run@1", "/proc/out"], "could not be exported to /proc/out"),
    ],
)
def test_what_cannot_be_exported_is_one_sentence_and_leaves_nothing(
    run: Path, words: list[str], message: str, capsys: Capture
) -> None:
    Path("full").mkdir()
    Path("full/file").touch()
    assert main(["export", *words]) == 2
    assert message in capsys.readouterr().err
    assert not Path("out").exists() and not list(Path().glob("*.part"))


def test_weights_too_large_for_float16_are_refused(run: Path, tiny_model_dir: TinyModelDir, capsys: Capture) -> None:
    from unison.checkpoint.save import Saver

    weights = masters(tiny_model_dir(tie_word_embeddings=True), 3)
    weights["norm.weight"][0] = 1e6
    Saver(run / "checkpoints").save(3, {"weights": weights}, {}, {})
    assert main(["export", "run@3", "out", "--dtype", "float16"]) == 2
    assert "norm.weight holds a value that float16 has no finite number for" in capsys.readouterr().err
    assert not Path("out").exists()


def test_nothing_of_the_run_is_executed(run: Path, tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text("open('ran', 'w')\n")
    config = (run / "config.toml").read_text().replace('"exact_answer"', '"evil:reward"')
    assert "evil" in config
    (run / "config.toml").write_text(config)
    (run / "modeling.py").write_text("open('ran', 'w')\n")
    assert main(["export", "run@1", "out"]) == 0
    assert not Path("ran").exists() and not Path("out/modeling.py").exists()
