"""The forms a reward function can have, told apart by the names of its parameters.

    def reward(text, label, **options) -> float | None       # any other names: called for each sample
    def reward(samples, **options) -> list[float | None]     # `samples` first: called once for all samples of a step
    def reward(group, **options) -> list[float | None]       # `group` first: called once for each prompt's samples
    def reward(completions, **columns) -> list[float | None] # `completions` anywhere: called as TRL's GRPOTrainer does

A sample has ``text`` (the response), ``metadata["label"]`` and ``metadata["prompt"]``. None means "no opinion". Options
come from the configuration as keyword arguments. An object that has ``check_options`` is called with them as it is
loaded, and refuses by RewardError what could not work; one that has ``most_seconds`` tells by it how long a call may
take and which options say so, which must lie within its deadline.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

from unison.config.names import did_you_mean
from unison.core.errors import RewardError
from unison.core.records import Sample

RewardFunction = Callable[..., Any]
Form = Literal["sample", "batch", "group", "trl"]

_WANTED: Final[Mapping[Form, tuple[str, int]]] = {
    "sample": ("(text, label, **options)", 2),
    "batch": ("(samples, **options)", 1),
    "group": ("(group, **options)", 1),
}
_TRL_ARGUMENTS: Final = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
_NOT_COLUMNS: Final = ("prompt", "completion", "completion_ids")


class FunctionGrader:
    """A reward function with its options, as a Grader.

    ``label_column`` is what the data calls its labels, for functions of TRL's form. What the function raises or
    returns goes through unchecked: ``score`` judges it.
    """

    def __init__(
        self,
        name: str,
        function: RewardFunction,
        options: Mapping[str, Any] | None = None,
        label_column: str | None = None,
    ) -> None:
        self.name = name
        self._function = function
        self._options = dict(options or {})
        self._label_column = label_column
        self.form, self._signature = _read_form(name, function, self._options)
        check = getattr(function, "check_options", None)
        if callable(check):
            check(**self._options)
        most = getattr(function, "most_seconds", None)
        self.most_seconds: tuple[float, str] | None = most(**self._options) if callable(most) else None
        """The longest that a call takes by itself, and what says so; None where nobody knows."""

    def __call__(self, samples: Sequence[Sample]) -> Sequence[float | None]:
        if self.form == "batch":
            scores: Sequence[float | None] = self._function(samples, **self._options)
            return scores
        if self.form == "trl":
            return self._as_trl(samples)
        if self.form == "group":
            return self._by_group(samples)
        return [self._function(sample.text, sample.metadata.get("label"), **self._options) for sample in samples]

    def _by_group(self, samples: Sequence[Sample]) -> Sequence[float | None]:
        places = cut("group", samples)
        if len(places) == 1:
            whole: Sequence[float | None] = self._function(list(samples), **self._options)
            return whole
        scores: list[float | None] = [None] * len(samples)
        for indices in places:
            found = list(self._function([samples[i] for i in indices], **self._options))
            if len(found) != len(indices):
                raise RewardError(f"the reward {self.name!r} returned {len(found)} scores for {len(indices)} samples")
            for i, value in zip(indices, found, strict=True):
                scores[i] = value
        return scores

    def _as_trl(self, samples: Sequence[Sample]) -> Sequence[float | None]:
        """Keyword arguments as in TRL 1.x; a function without ``**kwargs`` gets those it names."""
        given = {
            **_columns(samples, self._label_column),
            "prompts": [sample.metadata.get("prompt") for sample in samples],
            "completions": [_completion(sample) for sample in samples],
            "completion_ids": [sample.response_ids for sample in samples],
            "trainer_state": None,
            "log_extra": _log_nothing,
            "log_metric": _log_nothing,
            **self._options,
        }
        parameters = self._signature.parameters.values()
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            given = {name: value for name, value in given.items() if name in self._signature.parameters}
        scores: Sequence[float | None] = self._function(**given)
        return scores


def cut(form: Form, samples: Sequence[Sample]) -> list[list[int]]:
    """Which samples each call of a function of this form gets, as indices in order."""
    if not samples:
        return []
    if form == "sample":
        return [[i] for i in range(len(samples))]
    if form in ("batch", "trl"):
        return [list(range(len(samples)))]
    groups: dict[str, list[int]] = {}
    for i, sample in enumerate(samples):
        groups.setdefault(sample.group_id, []).append(i)
    return list(groups.values())


def _columns(samples: Sequence[Sample], label_column: str | None) -> dict[str, list[Any]]:
    """The rows' columns as lists, the label under its own name as well; None where a row lacks one."""
    names = dict.fromkeys(name for sample in samples for name in sample.metadata if name not in _NOT_COLUMNS)
    columns = {name: [sample.metadata.get(name) for sample in samples] for name in names}
    if label_column is not None:
        columns[label_column] = [sample.metadata.get("label") for sample in samples]
    return columns


def _completion(sample: Sample) -> str | list[dict[str, str]]:
    """Text for a raw prompt, one message of the assistant for a conversation."""
    if isinstance(sample.metadata.get("prompt"), list):
        return [{"role": "assistant", "content": sample.text}]
    return sample.text


def _log_nothing(*_: object, **__: object) -> None:
    """TRL's logging callbacks, which have no counterpart here."""


def _read_form(name: str, function: RewardFunction, options: Mapping[str, Any]) -> tuple[Form, inspect.Signature]:
    """The function's form. Raises RewardError where the call cannot work."""
    if not callable(function) or inspect.isclass(function):
        raise RewardError(f"the reward {name!r} is a {_kind_of(function)}; name a function, or an object to be called")
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        raise RewardError(f"the reward {name!r} is async; make it a plain function")
    try:
        signature = inspect.signature(function)
    except ValueError as error:
        raise RewardError(f"the reward {name!r} has no readable signature; wrap it in a function") from error
    form = _form_of(signature)
    if form == "trl":
        _check_trl(name, signature, options)
        return form, signature
    wanted, num_given = _WANTED[form]
    _check_options(name, signature, options, num_given)
    try:
        signature.bind(*[None] * num_given, **options)
    except TypeError as error:
        raise RewardError(
            f"the reward {name!r} has the signature {signature}, which cannot be called as {wanted}: {error}"
        ) from error
    return form, signature


def _form_of(signature: inspect.Signature) -> Form:
    first = next(iter(signature.parameters), None)
    if first == "samples":
        return "batch"
    if first == "group":
        return "group"
    return "trl" if "completions" in signature.parameters else "sample"


def _check_trl(name: str, signature: inspect.Signature, options: Mapping[str, Any]) -> None:
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise RewardError(
                f"the reward {name!r} has the signature {signature}; one with `completions` is called by keywords "
                f"alone, and {parameter.name!r} takes none"
            )
    taken = [option for option in options if option in _TRL_ARGUMENTS]
    if taken:
        raise RewardError(f"the reward {name!r} is given {taken[0]!r} with each call; it cannot be an option")
    _check_options(name, signature, options, 0)


def _check_options(name: str, signature: inspect.Signature, options: Mapping[str, Any], num_given: int) -> None:
    parameters = list(signature.parameters.values())
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    accepted = [
        parameter.name
        for index, parameter in enumerate(parameters)
        if parameter.kind is parameter.KEYWORD_ONLY
        or (parameter.kind is parameter.POSITIONAL_OR_KEYWORD and index >= num_given)
    ]
    for option in options:
        if option not in accepted:
            raise RewardError(
                f"the reward {name!r} takes no option {option!r}{did_you_mean(option, accepted)}"
                f" (it takes {', '.join(accepted) or 'none'})"
            )


def _kind_of(value: object) -> str:
    return "class" if inspect.isclass(value) else type(value).__name__
