from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from unison.checks.plugin import KINDS, guess_kind, run_plugin_check
from unison.checks.plugin_report import a_kind
from unison.cli.main import main
from unison.core.errors import ConfigError

Write = Callable[[str], str]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Write]:
    """Writes a module outside the package, in the current folder, and says its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    made: list[str] = []

    def write(code: str) -> str:
        name = f"outside_{len(made)}_{abs(hash(request.node.name)) % 10**8}"
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(code))
        made.append(name)
        return name

    yield write
    for name in made:
        sys.modules.pop(name, None)


def checked(path: str, kind: str | None = None, **options: object) -> tuple[bool, str]:
    lines: list[str] = []
    report = run_plugin_check(path, kind, options, write=lines.append)
    text = "\n".join(lines)
    assert all("fix: " in line for line in lines if line.startswith("problem"))
    assert report.passed == (" has " not in lines[-1])
    return report.passed, text


GOOD = {
    "reward": """
        def good(text, label):
            return float(label is not None and str(label) in text)
        """,
    "source": """
        from unison.data.source import PromptRow

        def good(config, split, seed):
            start = 0 if split == "train" else 100
            return [PromptRow(f"{split}:{i}", f"{i}+1=", str(i + 1), {"i": i}) for i in range(start, start + 5)]
        """,
    "rollout": """
        from dataclasses import replace
        from unison.core.records import GenerationRequest
        from unison.core.seeds import derive_seed
        from unison.rollout.collect import complete_sample

        async def good(client, task, sampling, sample):
            first = replace(sampling, max_new_tokens=4)
            request = GenerationRequest(request_id=sample.sample_id, prompt_ids=task.token_ids, sampling=first)
            complete_sample(sample, await client.generate(request))
            sample.append_world([10, 61], role="tool")
            again = replace(sampling, max_new_tokens=4, seed=derive_seed(sampling.seed, "again"))
            ids = tuple(sample.token_ids)
            request = GenerationRequest(request_id=sample.sample_id + "b", prompt_ids=ids, sampling=again)
            complete_sample(sample, await client.generate(request))
        """,
    "filter": """
        def good(group):
            return len({sample.reward for sample in group}) > 1 or "all alike"
        """,
    "hook": """
        class Hook:
            def on_step(self, step, metrics):
                self.last = metrics.get("train/loss")

            def on_finish(self, summary):
                pass

        good = Hook()
        """,
    "tracker": """
        class Tracker:
            def log(self, step, metrics):
                pass

            def close(self):
                pass

        def good(run):
            return Tracker()
        """,
    "advantage": """
        from unison.algorithms.registry import register_advantage

        def good(batch, *, strength=1.0):
            return batch.spread(batch.outcomes_N.nan_to_num() * strength)
        """,
    "loss": """
        from unison.algorithms.losses.base import LossBatch, PolicyLoss

        def good(batch: LossBatch, *, cap=20.0):
            ratio = (batch.logprobs_N - batch.old_logprobs_N.detach()).clamp(max=cap).exp()
            return PolicyLoss(-ratio * batch.advantages_N.detach(), ratio.detach(), ratio.detach() < 0)
        """,
    "recipe": """
        from unison.algorithms.recipes import Recipe

        good = Recipe(advantage="rloo", loss="sapo", settings={"temperature_positive": 2.0, "kl_in": "reward"})
        """,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_good_plugin_of_each_kind_passes(kind: str, module: Write, capsys: pytest.CaptureFixture[str]) -> None:
    path = f"{module(GOOD[kind])}:good"
    assert main(["check", "plugin", path, "--kind", kind]) == 0
    said = capsys.readouterr().out
    assert "problem" not in said and said.rstrip().splitlines()[-1].startswith(
        f"{path} is fit for use as {a_kind(kind)}"
    )


@pytest.mark.parametrize("kind", ["reward", "source", "rollout", "hook", "tracker", "loss", "recipe"])
def test_the_kind_is_told_from_the_signature_and_said(kind: str, module: Write) -> None:
    passed, said = checked(f"{module(GOOD[kind])}:good")
    assert passed and said.startswith(f"note     checked as a {kind}, since it ")


BAD = [
    ("reward", "def bad(text, label): return 'good'", "returned 'good', a str"),
    ("reward", "def bad(text, label): return float('nan')", "returned nan, a float"),
    ("reward", "def bad(text, label): return text[0] == label", "an empty text: it raised IndexError"),
    (
        "reward",
        "def bad(text, label): return text.encode('ascii') and 1.0",
        "letters of many scripts: it raised Unicode",
    ),
    ("reward", "def bad(text, label): return float(int(text.strip()[:9] or 0))", "it raised ValueError"),
    ("reward", "def bad(samples): return [1.0] * (len(samples) - 1)", "returned 0 scores for 1 samples"),
    ("reward", "def bad(samples): return 1.0", "it returned a float"),
    ("reward", "import os\ndef bad(text, label): return os.urandom(8)[0] / 256", "the same samples were scored"),
    ("reward", "n = []\ndef bad(text, label): n.append(0); return len(n)", "the same samples were scored"),
    ("reward", "def bad(text, label): float(text == label)", "returns None for everything: does it forget to return?"),
    ("rollout", "def bad(client, task, sampling, sample): pass", "is no async function"),
    (
        "reward",
        "def bad(samples):\n  for s in samples: s.text = ''\n  return [0.0 for s in samples]",
        "it changed the samples",
    ),
    ("reward", "async def bad(text, label): return 1.0", "is async"),
    ("reward", "def bad(text): return 1.0", "cannot be called as (text, label"),
    ("reward", "def bad(text, label): raise SystemExit(3)", "it raised SystemExit: 3"),
    (
        "reward",
        "import time\ndef bad(text, label):\n  time.sleep(1.1 if 'word' in text else 0)\n  return 0",
        "it took 1.1 s",
    ),
    ("source", "def bad(config, split, seed): return 3", "train: it returned a int"),
    ("source", "def bad(config, split, seed): return []", "train: it has no rows"),
    ("source", "def bad(config, split, seed): return ['a']", "train: row 0 is a str"),
    ("source", "def bad(config, split): return []", "raised TypeError"),
    ("source", "def bad(config, split, seed): return open(config.train)", "train: opening it raised TypeError"),
    (
        "source",
        "from unison.data.source import PromptRow\ndef bad(config, split, seed): return [PromptRow('a', 'x')] * 2",
        "train: two rows have the row_id 'a'",
    ),
    (
        "source",
        "from unison.data.source import PromptRow\ndef bad(config, split, seed): return [PromptRow('a', 'x', {1, 2})]",
        "label or metadata that JSON cannot hold",
    ),
    (
        "source",
        "from unison.data.source import PromptRow\n"
        "def bad(config, split, seed): return [PromptRow('a', [{'text': 'x'}])]",
        "neither text nor messages",
    ),
    (
        "source",
        "import random\nfrom unison.data.source import PromptRow\n"
        "def bad(config, split, seed): return [PromptRow('a', str(random.random()))]",
        "opened twice with one seed, the rows differ",
    ),
    ("filter", "def bad(row): return 'yes'", "a row: it returned 'yes'"),
    ("filter", "def bad(row): return row.metadata['level'] > 0", "without label: it raised KeyError"),
    (
        "filter",
        "def bad(group): return max(s.reward for s in group) > 0",
        "a group nobody could score: it raised TypeError",
    ),
    ("filter", "def bad(group): return None", "a group with contrast: it returned None"),
    ("filter", "def bad(group):\n  group[0].reward = 5\n  return True", "it changed what it was given"),
    ("hook", "class bad:\n  def on_stpe(self, step, metrics): pass", "on_stpe is never called; did you mean on_step?"),
    ("hook", "class bad:\n  def on_step(self, step): pass", "on_step cannot be called as on_step(step, metrics)"),
    ("hook", "class bad:\n  async def on_step(self, step, metrics): pass", "on_step is async"),
    ("hook", "class bad:\n  def on_step(self, step, metrics): metrics['train/kl']", "raised KeyError"),
    ("hook", "class bad:\n  def on_step(self, step, metrics): metrics.clear()", "changed what it was given"),
    ("hook", "bad = 3", "it has no on_... methods"),
    ("tracker", "def bad(run): return 3", "it returned a int"),
    ("tracker", "def bad(): return 3", "opening it for a new run raised TypeError"),
    (
        "tracker",
        "class T:\n  def log(self, step, metrics): int(metrics['train/loss'])\n  def close(self): pass\n"
        "def bad(run): return T()",
        "log(0, {'eval/accuracy': 0.25}) raised KeyError",
    ),
    ("rollout", "def bad(client, task, sampling, sample): pass", "is no async function"),
    ("rollout", "async def bad(client, task): pass", "cannot be called with (client, task, sampling, sample)"),
    ("rollout", "async def bad(client, task, sampling, sample): pass", "left sample 'made-up@0/0' pending"),
    ("rollout", "async def bad(client, task, sampling, sample): return []", "returned no sample for"),
]


@pytest.mark.parametrize(("kind", "code", "complaint"), BAD, ids=[f"{kind}: {text}" for kind, _, text in BAD])
def test_a_bad_plugin_is_told_what_is_wrong_and_how_to_mend_it(
    kind: str, code: str, complaint: str, module: Write
) -> None:
    passed, said = checked(f"{module(code)}:bad", kind)
    assert not passed and complaint in said, said


ROLLOUT = """
    from dataclasses import replace
    from unison.core.records import GenerationRequest
    from unison.rollout.collect import complete_sample

    async def bad(client, task, sampling, sample):
        {before}
        request = GenerationRequest(request_id=sample.sample_id, prompt_ids={prompt}, sampling={sampling})
        complete_sample(sample, await client.generate(request))
        {after}
    """


@pytest.mark.parametrize(
    ("parts", "complaint"),
    [
        ({"prompt": "task.token_ids[1:]"}, "was not drawn after the ids before it"),
        ({"after": "sample.token_ids[-1] ^= 1"}, "was not drawn after the ids before it"),
        ({"after": "sample.logprobs.pop()"}, "tokens but 15 log-probs"),
        ({"sampling": "replace(sampling, seed=None)"}, "drawn again, the samples differ"),
        ({"after": "sample.finish_reason = None"}, "has no finish_reason"),
        ({"before": "sample.token_ids[0] = 9"}, "changed the prompt"),
        ({"before": "raise ConnectionError('gone')"}, "failed on sample 'made-up@0/0': ConnectionError: gone"),
        ({"after": "return [sample, sample]"}, "two samples with the sample_id 'made-up@0/0'"),
    ],
    ids=str,
)
def test_a_rollout_function_that_breaks_the_tokens_is_found_out(
    parts: dict[str, str], complaint: str, module: Write
) -> None:
    pieces = {"before": "pass", "prompt": "task.token_ids", "sampling": "sampling", "after": "pass"} | parts
    passed, said = checked(f"{module(ROLLOUT.format(**pieces))}:bad", "rollout")
    assert not passed and complaint in said, said


@pytest.mark.parametrize(
    ("code", "form"),
    [
        ("def good(samples, *, most=3): return [None if not s.text else 1 for s in samples]", "once for all samples"),
        ("def good(group): return [float(len(s.text)) for s in group]", "once for each prompt's samples"),
        ("def good(prompts, completions, **kwargs): return [float(len(text)) for text in completions]", "TRL's"),
        (
            "def good(data_source, solution_str, ground_truth, extra_info=None, **kwargs):\n"
            "  return {'score': float(solution_str == ground_truth)}",
            "verl's, once for each sample",
        ),
    ],
)
def test_every_form_of_a_reward_passes(code: str, form: str, module: Write) -> None:
    passed, said = checked(f"{module(code)}:good")
    assert passed and form in said


@pytest.mark.parametrize("draw", ["random.random()", "numpy.random.rand()"])
def test_random_numbers_that_are_seeded_for_each_call_are_noted(draw: str, module: Write) -> None:
    name = module(f"import random, numpy\ndef good(text, label): return float({draw})")
    passed, said = checked(f"{name}:good")
    assert passed and "note     it draws from random or numpy.random, which are seeded for each call" in said


def test_a_rollout_function_without_async_is_told_so(module: Write) -> None:
    passed, said = checked(f"{module('def bad(client, task, sampling, sample): return None')}:bad")
    assert not passed and "checked as a rollout" in said and "`async` is missing" in said


def test_options_are_given_and_unknown_ones_are_a_problem(module: Write, capsys: pytest.CaptureFixture[str]) -> None:
    name = module("def good(text, label, *, most=3): return min(len(text), most)")
    assert main(["check", "plugin", f"{name}:good", "--option", "most=5"]) == 0
    assert main(["check", "plugin", f"{name}:good", "--option", "mots=5"]) == 1
    assert "takes no option 'mots'; did you mean most?" in capsys.readouterr().out
    assert main(["check", "plugin", f"{name}:good", "--option", "most"]) == 2


def test_what_is_made_on_the_spot_is_not_found_by_another_process(module: Write) -> None:
    name = module(
        f"""
        import os
        if os.getpid() == {os.getpid()}:
            def good(text, label):
                return 0.0
        """
    )
    passed, said = checked(f"{name}:good", "reward")
    assert not passed and "another process cannot load it" in said


def test_a_source_whose_rows_are_in_both_splits_is_noted(module: Write) -> None:
    code = "from unison.data.source import PromptRow\ndef s(config, split, seed): return [PromptRow('a', 'x')]"
    passed, said = checked(f"{module(code)}:s", "source")
    assert passed and "1 rows are in both splits" in said


@pytest.mark.parametrize(
    ("path", "kind", "complaint"),
    [
        ("no_colon", None, "is no module:object path"),
        ("no_such_module:x", None, "importing no_such_module failed"),
        ("json:dmups", None, "has no 'dmups'; did you mean dumps"),
        ("json:dumps", "rewrad", "the kind 'rewrad' is unknown; did you mean reward"),
        ("sys:maxsize", None, r"cannot tell what .* is meant for; add --kind reward, source"),
    ],
)
def test_what_cannot_be_checked_is_refused(path: str, kind: str | None, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        run_plugin_check(path, kind, write=lambda line: None)


def test_kinds_that_look_alike_are_told_apart() -> None:
    def reward(group: object) -> list[float]:
        return []

    def verdict(group: object) -> bool | str:
        return True

    def keep_some(group):  # type: ignore[no-untyped-def]
        return True

    def trl(prompts, completions, **kwargs):  # type: ignore[no-untyped-def]
        return []

    guesses = {f.__name__: guess_kind(f) for f in (reward, verdict, keep_some, trl)}
    assert {name: guess and guess.kind for name, guess in guesses.items()} == {
        "reward": "reward",
        "verdict": "filter",
        "keep_some": "filter",
        "trl": "reward",
    }
