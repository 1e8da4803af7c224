"""``unison check run``: what a run folder says of itself, proven from its files and its data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from unison.assembly import build_prompts, learn, prompt_task
from unison.checkpoint.find import find
from unison.checkpoint.load import Loaded, load_found
from unison.checkpoint.run_state import STATE_FILE, decode_state
from unison.config.load import load_config
from unison.core.errors import CheckpointError, ConfigError, DataError, UnisonError
from unison.core.wire import decode_samples
from unison.rollout.collect import tasks_of
from unison.rollout.kept import samples_path
from unison.rollout.ledger import LedgerEntry, audit, read_ledger


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
    entries = read_ledger(run / "ledger.jsonl") if (run / "ledger.jsonl").exists() else []
    findings, pending = _checkpoints(run, entries)
    return [_ledger(run, entries, pending, with_data), _samples(run, entries), *findings]


def _ledger(run: Path, entries: list[LedgerEntry], pending: list[str], with_data: bool) -> RunFinding:
    problems = audit(entries, pending=pending)
    text = f"{len(entries)} steps, {sum(len(entry.groups) for entry in entries)} prompts drawn"
    accounts = [account for entry in entries for account in entry.groups.values()]
    trained = sum(account.outcome == "trained" for account in accounts)
    text += f": {trained} trained, {len(accounts) - trained} discarded, {len(pending)} pending"
    if with_data and entries and entries[0].step == 1:
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
            same = hashlib.sha256(path.read_bytes()).hexdigest() == entry.samples_sha256
        except OSError as error:
            problems.append(f"{path.name}: {error.strerror}")
            continue
        num_kept += 1
        if not same:
            problems.append(f"{path.name}: its SHA-256 differs from the ledger's")
    return RunFinding("samples", f"of {num_kept} steps, as the ledger says", tuple(problems))


def _checkpoints(run: Path, entries: list[LedgerEntry]) -> tuple[list[RunFinding], list[str]]:
    """A finding for each checkpoint, and the keys of the prompts that the newest intact one has pending."""
    findings: list[RunFinding] = []
    pending: list[str] | None = None
    digests = {entry.step: entry.weights_digest for entry in entries}
    for found in find(run / "checkpoints"):
        problems: list[str] = []
        try:
            loaded = load_found(found)
            problems = _state_problems(loaded, digests)
            if pending is None:
                pending = _pending_keys(loaded, len(entries))
        except (CheckpointError, DataError) as error:
            problems = [str(error)]
        findings.append(RunFinding(f"checkpoints/{found.path.name}", "intact to the last byte", tuple(problems)))
    return findings, pending or []


def _state_problems(loaded: Loaded, digests: dict[int, str]) -> list[str]:
    state = decode_state(loaded.documents.get(STATE_FILE))
    if state.step in digests and digests[state.step] != state.weights_digest:
        return [f"its weights are not those of step {state.step} in the ledger"]
    return []


def _pending_keys(loaded: Loaded, num_steps: int) -> list[str]:
    state = decode_state(loaded.documents.get(STATE_FILE))
    # What a later step has trained since is no longer pending.
    if state.step < num_steps or "pending" not in loaded.blobs:
        return []
    return [task.key for task in tasks_of(decode_samples(loaded.blobs["pending"]))]
