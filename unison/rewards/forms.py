"""The forms a reward function can have, told apart by the names of its parameters.

    def reward(text, label, **options) -> float | None       # any other names: called for each sample
    def reward(samples, **options) -> list[float | None]     # `samples` first: called once for all samples of a step
    def reward(group, **options) -> list[float | None]       # `group` first: called once for each prompt's samples
    def reward(completions, **columns) -> list[float | None] # `completions` anywhere: called as TRL's GRPOTrainer does
    def reward(data_source, solution_str, ground_truth, extra_info=None) -> float | dict
                                                             # `solution_str` and `ground_truth`: called as verl does

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
Form = Literal["sample", "batch", "group", "trl", "verl"]

_WANTED: Final[Mapping[Form, tuple[str, int]]] = {
    "sample": ("(text, label, **options)", 2),
    "batch": ("(samples, **options)", 1),
    "group": ("(group, **options)", 1),
}
_VERL_ARGUMENTS: Final = ("data_source", "solution_str", "ground_truth", "extra_info")
_TRL_ARGUMENTS: Final = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
_NOT_COLUMNS: Final = ("prompt", "completion", "completion_ids")


class FunctionGrader:
    """A reward function with its options, as a Grader.

    ``label_column`` is what the data calls its labels, for functions of TRL's form; ``section`` is the part of the
    configuration that the options come from. What the function raises or returns goes through unchecked: ``score``
    judges it.
    """

    def __init__(
        self,
        name: str,
        function: RewardFunction,
        options: Mapping[str, Any] | None = None,
        label_column: str | None = None,
        section: str = "reward",
    ) -> None:
        self.name = name
        self._function = function
        self._options = dict(options or {})
        self._label_column = label_column
        self.form, self._signature = _read_form(name, function, self._options, section)
        check = getattr(function, "check_options", None)
        if callable(check):
            try:
                check(**self._options)
            except RewardError as error:
                raise RewardError(f"{section}.options: {error}") from error
        most = getattr(function, "most_seconds", None)
        self.most_seconds: tuple[float, str] | None = most(**self._options) if callable(most) else None
        """The longest that a call takes by itself, and what says so; None where nobody knows."""

    def __call__(self, samples: Sequence[Sample]) -> Sequence[float | None]:
        if self.form == "batch":
            scores: Sequence[float | None] = self._function(samples, **self._options)
            return scores
        if self.form == "trl":
            return self._as_trl(samples)
        if self.form == "verl":
            return [self._as_verl(sample) for sample in samples]
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
        self._check_columns(given)
        scores: Sequence[float | None] = self._function(**self._named(given))
        return scores

    def _check_columns(self, given: Mapping[str, Any]) -> None:
        """Raises RewardError where a parameter that needs a value is no column of the rows."""
        missing = [name for name in _needed(self._signature) if name not in given]
        if missing:
            columns = [name for name in given if name not in _TRL_ARGUMENTS and name not in self._options]
            raise RewardError(
                f"the reward {self.name!r} takes {missing[0]!r}, and the rows have no such column"
                f"{did_you_mean(missing[0], columns)} (they have {', '.join(columns)})"
            )

    def _as_verl(self, sample: Sample) -> Any:
        """One call by keywords as verl's NaiveRewardManager makes it, which takes the "score" of a dict."""
        metadata = sample.metadata
        given = {
            "data_source": metadata.get("data_source"),
            "solution_str": sample.text,
            "ground_truth": metadata.get("label"),
            "extra_info": metadata.get("extra_info"),
            **self._options,
        }
        result = self._function(**self._named(given))
        if not isinstance(result, Mapping):
            return result
        if "score" not in result:
            raise RewardError(f"it returned a dict without 'score' (it has {', '.join(map(str, result)) or 'no keys'})")
        return result["score"]

    def _named(self, given: dict[str, Any]) -> dict[str, Any]:
        """Those arguments that the function takes by name: all, if it has ``**kwargs``."""
        parameters = self._signature.parameters
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            return given
        return {name: value for name, value in given.items() if name in parameters}


def cut(form: Form, samples: Sequence[Sample]) -> list[list[int]]:
    """Which samples each call of a function of this form gets, as indices in order."""
    if not samples:
        return []
    if form in ("sample", "verl"):
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
    if label_column:
        columns[label_column] = [sample.metadata.get("label") for sample in samples]
    return columns


def _completion(sample: Sample) -> str | list[dict[str, str]]:
    """Text for a raw prompt, one message of the assistant for a conversation."""
    if isinstance(sample.metadata.get("prompt"), list):
        return [{"role": "assistant", "content": sample.text}]
    return sample.text


def _log_nothing(*_: object, **__: object) -> None:
    """TRL's logging callbacks, which have no counterpart here."""


def _read_form(
    name: str, function: RewardFunction, options: Mapping[str, Any], section: str
) -> tuple[Form, inspect.Signature]:
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
        _check_by_keyword(name, signature, options, _TRL_ARGUMENTS)
        return form, signature
    if form == "verl":
        _check_by_keyword(name, signature, options, _VERL_ARGUMENTS)
        _check_given(name, [p for p in _needed(signature) if p not in _VERL_ARGUMENTS], options, section)
        return form, signature
    wanted, num_given = _WANTED[form]
    _check_options(name, signature, options, num_given)
    _check_given(name, _needed(signature, num_given), options, section)
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
    if "completions" in signature.parameters:
        return "trl"
    return "verl" if {"solution_str", "ground_truth"} <= set(signature.parameters) else "sample"


def _check_by_keyword(
    name: str, signature: inspect.Signature, options: Mapping[str, Any], arguments: Sequence[str]
) -> None:
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.POSITIONAL_ONLY:
            mark = next(argument for argument in ("completions", "solution_str") if argument in arguments)
            raise RewardError(
                f"the reward {name!r} has the signature {signature}; one with `{mark}` is called by keywords "
                f"alone, and {parameter.name!r} takes none"
            )
    taken = [option for option in options if option in arguments]
    if taken:
        raise RewardError(f"the reward {name!r} is given {taken[0]!r} with each call; it cannot be an option")
    _check_options(name, signature, options, 0, arguments)


def _needed(signature: inspect.Signature, num_given: int = 0) -> list[str]:
    """The parameters without a default, beside the first ``num_given``, that a keyword can reach."""
    return [
        parameter.name
        for index, parameter in enumerate(signature.parameters.values())
        if parameter.default is parameter.empty
        and (
            parameter.kind is parameter.KEYWORD_ONLY
            or (parameter.kind is parameter.POSITIONAL_OR_KEYWORD and index >= num_given)
        )
    ]


def _check_given(name: str, needed: Sequence[str], options: Mapping[str, Any], section: str) -> None:
    """Raises RewardError where an option that has no default is not there."""
    missing = [option for option in needed if option not in options]
    if missing:
        raise RewardError(
            f"{section}.options.{missing[0]} is missing: the reward {name!r} takes it, and it has no default"
        )


def _check_options(
    name: str, signature: inspect.Signature, options: Mapping[str, Any], num_given: int, given: Sequence[str] = ()
) -> None:
    parameters = list(signature.parameters.values())
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    accepted = [
        parameter.name
        for index, parameter in enumerate(parameters)
        if parameter.name not in given
        and (
            parameter.kind is parameter.KEYWORD_ONLY
            or (parameter.kind is parameter.POSITIONAL_OR_KEYWORD and index >= num_given)
        )
    ]
    for option in options:
        if option not in accepted:
            raise RewardError(
                f"the reward {name!r} takes no option {option!r}{did_you_mean(option, accepted)}"
                f" (it takes {', '.join(accepted) or 'none'})"
            )


def _kind_of(value: object) -> str:
    return "class" if inspect.isclass(value) else type(value).__name__
