"""A reward function on made-up samples."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, Final

from unison.checks.plugin_report import Called, Report, call, frozen_copy
from unison.core.errors import RewardError
from unison.core.protocols import Grader
from unison.core.records import Sample, SampleStatus
from unison.core.sampling import SamplingParams
from unison.rewards.base import FunctionGrader, as_grader

SLOW_S: Final = 1.0
LONG_CHARS: Final = 100_000
DEADLINE_S: Final = 120.0
_SEED: Final = 20_260_101
_LOADER: Final = """
import sys
from unison.config.plugins import load_object
from unison.core.errors import RewardError
load_object(sys.argv[1], kind="reward", error=RewardError)
"""

TEXTS: Final[Mapping[str, str]] = {
    "a short answer": "8",
    "a sentence": "The answer is 8.",
    "an empty text": "",
    "blanks alone": " \n\t ",
    "letters of many scripts": "Ответ: восемь 八 ८ 🎱 e\u0301",
    "a zero byte": "8\x00\ufffd",
    "markup": "<think>5+3</think>\\boxed{8}",
    "a number of many digits": "9" * 5000,
    "a long text": "word " * (LONG_CHARS // 5),
}


def check_reward(report: Report, path: str, found: Any, options: Mapping[str, Any]) -> None:
    """Its form, then its scores: right count, numbers or None, the same again, nothing changed, in bearable time."""
    try:
        grader = FunctionGrader(path, found, options) if options else as_grader(path, found)
    except RewardError as error:
        report.problem(str(error), "give it one of the forms of docs/plugins.md, and its options by name")
        return
    report.ok(f"its form can be called{_form_of(grader)}")
    _check_other_process(report, path)
    _check_texts(report, grader)
    _check_no_label(report, grader)
    _check_repetition(report, grader)


def made_up_samples(label: Any = "8", texts: Mapping[str, str] = TEXTS) -> list[Sample]:
    """Finished samples of one prompt, one for each text."""
    return [_sample(k, text, label) for k, text in enumerate(texts.values())]


def _sample(copy: int, text: str, label: Any) -> Sample:
    sample = Sample(
        sample_id=f"made-up/{copy}",
        group_id="made-up",
        trajectory_id=f"made-up/{copy}",
        sampling=SamplingParams(),
        seed=copy,
        prompt_length=3,
        metadata={"prompt": "5+3=", "label": label, "row_id": "made-up"},
    )
    sample.append_world([53, 43, 51], role="prompt")
    ids = list(text.encode("utf-8", "replace")[:64]) or [10]
    sample.append_sampled(ids, [-0.5] * len(ids), [0] * len(ids))
    sample.text = text
    sample.status = SampleStatus.COMPLETED
    sample.finish_reason = "stop"
    return sample


def _form_of(grader: Grader) -> str:
    calls = {
        "sample": ": (text, label), once for each sample",
        "batch": ": (samples), once for all samples",
        "group": ": (group), once for each prompt's samples",
        "trl": ": TRL's, once for all samples",
        "verl": ": verl's, once for each sample",
    }
    return calls.get(str(getattr(grader, "form", "")), "")


def _check_other_process(report: Report, path: str) -> None:
    """Graders run in processes of their own, which import the module: nothing of this process reaches them."""
    result = subprocess.run(
        [sys.executable, "-c", _LOADER, path], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    report.expect(
        result.returncode == 0,
        "another process finds it by its name",
        f"another process cannot load it: {(result.stderr.strip().splitlines() or ['it died'])[-1]}",
        'define it at the top of a module, or set reward.isolation = "none"',
    )


def _check_texts(report: Report, grader: Grader) -> None:
    opinions: list[bool] = []
    for name, text in TEXTS.items():
        samples = made_up_samples(texts={name: text})
        called = call(grader, samples)
        if called.error is not None:
            report.problem(
                f"{name}: it raised {called.error}; such a sample would be unscorable",
                "return 0.0 for what is no answer, and None for no opinion",
            )
        elif _check_scores(report, name, called, samples):
            report.ok(f"{name}: scored {_shown(called.value[0])} in {1000 * called.seconds:.1f} ms")
            opinions.append(called.value[0] is not None)
        if called.seconds > SLOW_S:
            report.problem(
                f"{name}: it took {called.seconds:.1f} s for one sample",
                "make it cheaper, or raise reward.timeout_s and reward.workers with this in mind",
            )
    if opinions and not any(opinions):
        report.problem(
            "it returns None for everything: does it forget to return?",
            "return a number; None is no opinion, and a sample that none has an opinion on is unscorable",
        )


def _check_scores(report: Report, name: str, called: Called, samples: Sequence[Sample]) -> bool:
    scores = called.value
    if isinstance(scores, str | bytes) or not hasattr(scores, "__len__"):
        report.problem(f"{name}: it returned a {type(scores).__name__}", "return a list with one score for each sample")
        return False
    if len(scores) != len(samples):
        report.problem(
            f"{name}: it returned {len(scores)} scores for {len(samples)} samples",
            "return one score for each sample, in order, None where there is no opinion",
        )
        return False
    for score in scores:
        if score is not None and (not isinstance(score, Real) or not math.isfinite(score)):
            report.problem(
                f"{name}: it returned {_shown(score)}, a {type(score).__name__}", "return a finite number or None"
            )
            return False
    return True


def _check_no_label(report: Report, grader: Grader) -> None:
    samples = made_up_samples(None, {"a short answer": "8"})
    called = call(grader, samples)
    if called.error is not None:
        report.note(f"without a label it raises {called.error}: every row of the data must have one")
    elif _check_scores(report, "no label", called, samples):
        report.ok(f"a sample without a label: scored {_shown(called.value[0])}")


def _check_repetition(report: Report, grader: Grader) -> None:
    """All texts at once, twice: the same scores, and the samples as they were."""
    samples = made_up_samples()
    before = frozen_copy(samples)
    first, second = call(grader, samples), call(grader, samples)
    error = first.error or second.error
    if error is not None:
        if not report.problems:
            report.problem(f"it raised {error} for several samples at once", "treat samples apart from each other")
        return
    if not _check_scores(report, "several samples at once", first, samples):
        return
    if list(first.value) != list(second.value) and _same_when_seeded(grader, samples):
        report.note(
            "it draws from random or numpy.random, which are seeded for each call where rewards run in processes of "
            'their own: a resumed run draws the same again; with reward.isolation = "none" it would not'
        )
    else:
        report.expect(
            list(first.value) == list(second.value),
            "the same samples are scored the same twice",
            f"the same samples were scored {_shown(list(first.value))}, then {_shown(list(second.value))}",
            "keep nothing between calls, and draw from random or numpy.random, which are seeded for each call; a run "
            "that is resumed would differ",
        )
    report.expect(
        repr(samples) == repr(before),
        "it leaves the samples as they were",
        "it changed the samples it was given",
        "only read from them, and copy what is to be changed",
    )


def _same_when_seeded(grader: Grader, samples: Sequence[Sample]) -> bool:
    """Whether the scores repeat where ``random`` and ``numpy.random`` are seeded before each call, as workers do."""
    scores: list[Any] = []
    state = random.getstate()
    for _ in range(2):
        random.seed(_SEED)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(_SEED)
        called = call(grader, samples)
        scores.append(called.error or list(called.value))
    random.setstate(state)
    return bool(scores[0] == scores[1])


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
