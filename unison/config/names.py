"""Did-you-mean: from a name nobody knows to the one that was meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from unison.config.fields import Field, fields, named_tables, sections

MOVED: Final[dict[str, str]] = {}
"""Old dotted key -> its present dotted key, so that an old file is told where its key went."""

SYNONYMS: Final[Mapping[str, tuple[str, ...]]] = {
    "accumulation_tokens": ("trainer.micro_batch_tokens",),
    "adam_beta1": ("trainer.beta1",),
    "adam_beta2": ("trainer.beta2",),
    "adv_estimator": ("algorithm.name",),
    "answer_key": ("data.label_key",),
    "apply_chat_template": ("data.chat",),
    "apply_chat_template_kwargs": ("data.template_options",),
    "batch_size": ("rollout.prompts_per_step", "trainer.micro_batch_tokens"),
    "beta": ("algorithm.kl_coef",),
    "betas": ("trainer.beta1", "trainer.beta2"),
    "block_size": ("engine.page_size",),
    "checkpoint": ("model.path",),
    "chunked_prefill_size": ("engine.prefill_chunk",),
    "clip_eps": ("algorithm.clip_low", "algorithm.clip_high"),
    "clip_range": ("algorithm.clip_low", "algorithm.clip_high"),
    "cliprange": ("algorithm.clip_low", "algorithm.clip_high"),
    "dataset": ("data.train", "data.source"),
    "entropy_chunk": ("trainer.logprob_chunk_tokens",),
    "eps": ("trainer.adam_epsilon",),
    "epsilon": ("algorithm.clip_low", "trainer.adam_epsilon"),
    "epsilon_high": ("algorithm.clip_high",),
    "epsilon_low": ("algorithm.clip_low",),
    "eval_every": ("eval.every",),
    "eval_file": ("data.eval",),
    "eval_interval": ("eval.every",),
    "eval_size": ("eval.problems",),
    "eval_steps": ("eval.every",),
    "folder": ("run.dir",),
    "generations": ("rollout.samples_per_prompt",),
    "grad_clip": ("trainer.max_grad_norm",),
    "gradient_clipping": ("trainer.max_grad_norm",),
    "group_size": ("rollout.samples_per_prompt",),
    "input_key": ("data.prompt_key",),
    "interval": ("eval.every",),
    "kl_beta": ("algorithm.kl_coef",),
    "kl_coefficient": ("algorithm.kl_coef",),
    "kl_loss_coef": ("algorithm.kl_coef",),
    "kl_weight": ("algorithm.kl_coef",),
    "lr": ("trainer.learning_rate",),
    "lr_scheduler": ("trainer.schedule",),
    "lr_scheduler_type": ("trainer.schedule",),
    "max_completion_length": ("rollout.max_new_tokens",),
    "max_grad": ("trainer.max_grad_norm",),
    "max_length": ("rollout.max_new_tokens", "data.max_prompt_tokens"),
    "max_norm": ("trainer.max_grad_norm",),
    "max_num_batched_tokens": ("engine.max_batch_tokens",),
    "max_num_seqs": ("engine.max_running",),
    "max_prompt_length": ("data.max_prompt_tokens",),
    "max_response_length": ("rollout.max_new_tokens",),
    "max_running_requests": ("engine.max_running",),
    "max_steps": ("trainer.steps",),
    "max_tokens": ("rollout.max_new_tokens",),
    "max_total_tokens": ("engine.kv_tokens",),
    "micro_batch_size": ("trainer.micro_batch_tokens",),
    "min_lr": ("trainer.min_learning_rate",),
    "model": ("model.path",),
    "model_name": ("model.path",),
    "model_name_or_path": ("model.path",),
    "model_path": ("model.path",),
    "n": ("rollout.samples_per_prompt",),
    "n_samples": ("rollout.samples_per_prompt", "eval.samples"),
    "nucleus": ("rollout.top_p",),
    "num_epochs": ("trainer.steps",),
    "num_generations": ("rollout.samples_per_prompt",),
    "num_prompts": ("rollout.prompts_per_step",),
    "num_samples": ("rollout.samples_per_prompt", "eval.samples"),
    "num_steps": ("trainer.steps",),
    "num_threads": ("run.threads",),
    "out": ("run.dir",),
    "out_dir": ("run.dir",),
    "output": ("run.dir",),
    "output_dir": ("run.dir",),
    "precision": ("model.dtype",),
    "prompt_data": ("data.train",),
    "prompts": ("rollout.prompts_per_step", "data.train"),
    "random_seed": ("run.seed",),
    "reward_fn": ("reward.function",),
    "rollout_n": ("rollout.samples_per_prompt",),
    "save_dir": ("run.dir",),
    "scheduler": ("trainer.schedule",),
    "temp": ("rollout.temperature", "eval.temperature"),
    "test_file": ("data.eval",),
    "torch_dtype": ("model.dtype",),
    "total_steps": ("trainer.steps",),
    "train_batch_size": ("rollout.prompts_per_step",),
    "train_file": ("data.train",),
    "train_files": ("data.train",),
    "val_file": ("data.eval",),
    "val_files": ("data.eval",),
    "validation": ("data.eval",),
    "warmup": ("trainer.warmup_steps",),
    "wd": ("trainer.weight_decay",),
}
"""What other tools call a key -> our dotted keys. Looked up by last part."""

_MOST_SUGGESTIONS: Final = 3
_LEAST_PREFIX: Final = 3


def edit_distance(left: str, right: str) -> int:
    """Letters to insert, delete, change or swap with their neighbour to get from one to the other."""
    before: list[int] = []
    row = list(range(len(right) + 1))
    for i, a in enumerate(left, 1):
        before, row, above = row, [i], before
        for j, b in enumerate(right, 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (a != b))
            if i > 1 and j > 1 and a == right[j - 2] and left[i - 2] == b:
                cost = min(cost, above[j - 2] + 1)
            row.append(cost)
    return row[-1]


def one_letter_off(left: str, right: str) -> bool:
    return abs(len(left) - len(right)) <= 1 and edit_distance(left, right) == 1


def nearest(word: str, candidates: Iterable[str], *, cutoff: float = 0.6) -> list[str]:
    """Up to three candidates like ``word``: those one letter away, else those it begins, else alike ones."""
    pool = list(candidates)
    close = [name for name in pool if one_letter_off(word, name)]
    close = close or [name for name in pool if len(word) >= _LEAST_PREFIX and name.startswith(word)]
    return close[:_MOST_SUGGESTIONS] or difflib.get_close_matches(word, pool, _MOST_SUGGESTIONS, cutoff)


def did_you_mean(word: str, candidates: Iterable[str], *, cutoff: float = 0.6) -> str:
    """``; did you mean a or b?``, or nothing: to be put behind the complaint about ``word``."""
    found = nearest(word, candidates, cutoff=cutoff)
    return f"; did you mean {join_or(found)}?" if found else ""


def join_or(names: Sequence[str]) -> str:
    """``a``, ``a or b``, ``a, b or c``."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def explain_unknown(path: str, *, prefix: str = "", other_names: Sequence[str] = ()) -> str:
    """The end of a sentence about the unknown dotted key ``path``, naming what was probably meant.

    ``prefix`` is put before each suggested name (``--`` for flags); ``other_names`` are names that
    are not configuration keys but may have been meant, such as a command's own flags.
    """
    entry = _in_named_table(path)
    if entry is not None:
        return entry
    head, rest = _split_option(path)
    if head in MOVED:
        return f"has moved: it is {prefix}{MOVED[head]}{rest} now"
    if _takes_options(head):
        return f"is unknown; an option of {head} has one plain name, like {prefix}{head}.name"
    names = other_names if "." not in head else ()
    for lead, found in (
        ("did you mean", _one_letter_off(head, names)),
        ("that is", _same_key_elsewhere(head)),
        ("did you mean", _synonyms(head)),
        ("did you mean", _alike(head, names)),
    ):
        if found:
            shown = [prefix + name + (rest if _takes_options(name) else "") for name in found]
            return f"is unknown; {lead} {join_or(shown)}{'?' if lead == 'did you mean' else ''}"
    section = head.partition(".")[0]
    if section in sections():
        keys = [field.key for field in fields().values() if field.table == section]
        return f"is unknown; the keys of [{section}] are {', '.join(keys)}"
    return f"is unknown; the sections are {', '.join(sections())}"


def _in_named_table(path: str) -> str | None:
    """What to say of an unknown key under ``data.mix`` and its like."""
    parts = path.split(".")
    table = ".".join(parts[:2])
    struct = named_tables().get(table)
    if struct is None:
        return None
    keys = struct.__struct_fields__
    if len(parts) <= 3:
        return f"is unknown; the keys of {table} are {table}.NAME.KEY, with a name of yours and {join_or(keys)} as KEY"
    return f"is unknown{did_you_mean(parts[3], keys)}; the keys of [{'.'.join(parts[:3])}] are {', '.join(keys)}"


def _split_option(path: str) -> tuple[str, str]:
    """``data.options.max`` -> (``data.options``, ``.max``)."""
    section, dot, key = path.partition(".")
    key, more, option = key.partition(".")
    return section + dot + key, more + option


def _takes_options(path: str) -> bool:
    field: Field | None = fields().get(path)
    return field is not None and field.kind == "table"


def _one_letter_off(path: str, other_names: Sequence[str]) -> list[str]:
    """Names that differ by one letter, or only by case and dashes."""
    plain = _normalised(path)
    pool = [*_plain_keys(), *other_names]
    same = [name for name in pool if _normalised(name) == plain]
    return (same or [name for name in pool if one_letter_off(path, name)])[:_MOST_SUGGESTIONS]


def _same_key_elsewhere(path: str) -> list[str]:
    key = _normalised(path.rpartition(".")[2])
    found = [name for name, field in fields().items() if field.key == key and field.named is None]
    return found[:_MOST_SUGGESTIONS]


def _synonyms(path: str) -> list[str]:
    section, _, key = _normalised(path).rpartition(".")
    known = SYNONYMS.get(key, ())
    return [name for name in known if name.startswith(f"{section}.")] or list(known)


def _alike(path: str, other_names: Sequence[str]) -> list[str]:
    found = difflib.get_close_matches(path, [*_plain_keys(), *other_names], _MOST_SUGGESTIONS, 0.75)
    if found:
        return found
    by_key: dict[str, list[str]] = {}
    for name, field in fields().items():
        if field.named is None:
            by_key.setdefault(field.key, []).append(name)
    keys = difflib.get_close_matches(path.rpartition(".")[2], by_key, _MOST_SUGGESTIONS, 0.7)
    return [name for key in keys for name in by_key[key]][:_MOST_SUGGESTIONS]


def _plain_keys() -> list[str]:
    return [name for name, field in fields().items() if field.named is None]


def _normalised(name: str) -> str:
    return name.lower().replace("-", "_")
