"""``unison check run``: what a run folder says of itself, proven from its files and its data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from unison.assembly import build_prompts, learn, prompt_task
from unison.checkpoint.find import find
from unison.checkpoint.load import Loaded, load_found
from unison.checkpoint.manifest import DELETED, TEMPORARY
from unison.checkpoint.run_state import PENDING_FILE, STATE_FILE, decode_state
from unison.config.load import load_config
from unison.core.errors import CheckpointError, ConfigError, DataError, UnisonError
from unison.core.records import Sample
from unison.core.wire import decode_samples
from unison.rollout.collect import tasks_of
from unison.rollout.greedy import without_greedy
from unison.rollout.kept import samples_path
from unison.rollout.ledger import FILE_NAME, LedgerEntry, audit, group_accounts, read_ledger


@dataclass(frozen=True, slots=True)
class RunFinding:
    """One thing that was looked at; ``problems`` is empty where it is as it should be."""

    name: str
    text: str
    problems: tuple[str, ...] = ()


def check_run(run: Path, *, with_data: bool = True) -> list[RunFinding]:
    """Look at ledger, samples and checkpoints of a run that is not under way.

    With data, the prompts are drawn once more as configured, and the ledger must follow them one by one.
    Raises ConfigError for a folder that holds no run.
    """
    if not (run / "config.toml").is_file():
        raise ConfigError(f"{run} is no run folder: it has no config.toml")
    path = run / FILE_NAME
    entries: list[LedgerEntry] = []
    unreadable: list[str] = []
    try:
        entries = read_ledger(path) if path.exists() else []
    except DataError as error:
        unreadable = [str(error)]
    is_fork = load_config([run / "config.toml"]).config.run.fork is not None
    findings, pending = _checkpoints(run, None if unreadable else entries, is_fork)
    if unreadable:
        return [RunFinding("ledger", "cannot be read", tuple(unreadable)), *findings]
    return [_ledger(run, entries, pending, is_fork, with_data), _samples(run, entries), *findings]


def _ledger(run: Path, entries: list[LedgerEntry], pending: list[str], is_fork: bool, with_data: bool) -> RunFinding:
    problems = audit(entries, pending=pending)
    if entries and entries[0].step != 1 and not is_fork:
        problems.append(f"it begins with step {entries[0].step}, and the run is no fork")
    text = f"{len(entries)} steps, {sum(len(entry.groups) for entry in entries) + len(pending)} prompts drawn"
    accounts = [account for entry in entries for account in entry.groups.values()]
    trained = sum(account.outcome == "trained" for account in accounts)
    text += f": {trained} trained, {len(accounts) - trained} discarded, {len(pending)} pending"
    if with_data and (entries[0].step == 1 if entries else not is_fork):
        try:
            problems += audit(entries, pending=pending, drawn=_drawn(run, entries, len(pending)))
            text += "; in the order of the data"
        except UnisonError as error:
            problems.append(f"the data could not be drawn once more: {error}")
    return RunFinding("ledger", text, tuple(dict.fromkeys(problems)))


def _drawn(run: Path, entries: list[LedgerEntry], num_pending: int) -> Iterator[str]:
    """The keys that the data gives out, drawn as the run drew them, with the rewards it gave back."""
    prompts = build_prompts(load_config([run / "config.toml"]).config)
    for entry in entries:
        for count in entry.draws:
            yield from (prompt_task(prompt).key for prompt in prompts.draw(count))
        learn(prompts.cursor, {key: account.reward_mean for key, account in entry.groups.items()})
    if num_pending:
        yield from (prompt_task(prompt).key for prompt in prompts.draw(num_pending))


def _samples(run: Path, entries: list[LedgerEntry]) -> RunFinding:
    problems = []
    num_kept = 0
    for entry in entries:
        if entry.samples_sha256 is None:
            continue
        path = samples_path(run, entry.step)
        try:
            data = path.read_bytes()
        except OSError as error:
            problems.append(f"{path.name}: {error.strerror}")
            continue
        num_kept += 1
        if hashlib.sha256(data).hexdigest() != entry.samples_sha256:
            problems.append(f"{path.name}: its SHA-256 differs from the ledger's")
            continue
        try:
            problems += [f"{path.name}: {problem}" for problem in _account_problems(entry, decode_samples(data))]
        except DataError as error:
            problems.append(f"{path.name}: {error}")
    return RunFinding("samples", f"of {num_kept} steps, as the ledger says", tuple(problems))


def _account_problems(entry: LedgerEntry, samples: Sequence[Sample]) -> list[str]:
    """Where the ledger says otherwise of a step's prompts than its samples do."""
    samples = without_greedy(samples)
    accounts = group_accounts(samples, set(), {})
    if list(accounts) != list(entry.groups):
        return [f"its prompts are not those that the ledger has for step {entry.step}"]
    problems = [
        f"prompt {key} ended otherwise than the ledger says of step {entry.step}"
        for key, account in accounts.items()
        if (account.statuses, account.reward_mean) != (entry.groups[key].statuses, entry.groups[key].reward_mean)
    ]
    if entry.reward_sum != sum(sample.reward for sample in samples if sample.reward is not None):
        problems.append(
            f"its rewards do not add up to the {entry.reward_sum} that the ledger says of step {entry.step}"
        )
    return problems


def _checkpoints(run: Path, entries: list[LedgerEntry] | None, is_fork: bool) -> tuple[list[RunFinding], list[str]]:
    """A finding for each checkpoint, and the keys of the prompts that the newest intact one has pending.

    ``entries`` is None where the ledger cannot be read.
    """
    findings: list[RunFinding] = []
    pending: list[str] | None = None
    for found in find(run / "checkpoints"):
        if found.path.name.startswith((TEMPORARY, DELETED)):
            text = "left by a save or a deletion that was killed; the next save removes it"
            findings.append(RunFinding(f"checkpoints/{found.path.name}", text))
            continue
        problems: list[str] = []
        try:
            loaded = load_found(found)
            problems = _state_problems(loaded, entries, is_fork) if entries is not None else []
            if pending is None:
                pending = _pending_keys(loaded, entries or [])
        except (CheckpointError, DataError) as error:
            problems = [str(error)]
        findings.append(RunFinding(f"checkpoints/{found.path.name}", "intact to the last byte", tuple(problems)))
    return findings, pending or []


def _state_problems(loaded: Loaded, entries: Sequence[LedgerEntry], is_fork: bool) -> list[str]:
    state = decode_state(loaded.documents.get(STATE_FILE))
    digests = {entry.step: entry.weights_digest for entry in entries}
    last = max(digests, default=0)
    if state.step > last and (entries or not is_fork):
        return [f"the ledger ends with step {last}, before its step {state.step}"]
    if state.step in digests and digests[state.step] != state.weights_digest:
        return [f"its weights are not those of step {state.step} in the ledger"]
    return []


def _pending_keys(loaded: Loaded, entries: Sequence[LedgerEntry]) -> list[str]:
    state = decode_state(loaded.documents.get(STATE_FILE))
    # What a later step has trained since is no longer pending.
    if any(entry.step > state.step for entry in entries) or PENDING_FILE not in loaded.blobs:
        return []
    return [task.key for task in tasks_of(decode_samples(loaded.blobs[PENDING_FILE]))]
