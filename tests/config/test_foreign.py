from __future__ import annotations

from pathlib import Path

import pytest

from unison.config.coming_from import render_page
from unison.config.fields import fields, find_field, named_tables
from unison.config.foreign import FOREIGN, SYSTEMS, Foreign, find_foreign, normalised
from unison.config.load import load_config
from unison.config.names import explain_unknown
from unison.core.errors import ConfigError

PAGE = Path(__file__).parents[2] / "docs" / "coming_from.md"


def names_of(system: str) -> list[Foreign]:
    return [entry for entry in FOREIGN if entry.system == system]


@pytest.mark.parametrize("system", SYSTEMS)
def test_each_system_has_forty_names_with_a_counterpart(system: str) -> None:
    assert sum(bool(entry.ours) for entry in names_of(system)) >= 40


def test_all_targets_exist_and_what_has_none_says_why() -> None:
    known = {*fields(), *named_tables()}
    for entry in FOREIGN:
        assert set(entry.ours) <= known, entry
        assert entry.ours or len(entry.note) > 10, entry
        assert len(set(entry.ours)) == len(entry.ours)


def test_keys_that_notes_name_exist() -> None:
    known = {*fields(), *named_tables()}
    sections = {name.partition(".")[0] for name in known}
    for entry in FOREIGN:
        for word in entry.note.replace(";", " ").replace(",", " ").split():
            if word.partition(".")[0] in sections and "." in word.strip("."):
                assert word in known, (entry.name, word)


def test_no_name_is_a_key_of_ours() -> None:
    assert not {entry.name for entry in FOREIGN if find_field(entry.normalised)}


@pytest.mark.parametrize("system", SYSTEMS)
def test_no_system_has_a_name_twice(system: str) -> None:
    found = [entry.normalised for entry in names_of(system)]
    assert len(found) == len(set(found)), {name for name in found if found.count(name) > 1}


def test_the_committed_page_is_the_generated_one() -> None:
    assert PAGE.read_text(encoding="utf-8") == render_page(), (
        "run: python -m unison.config.coming_from > docs/coming_from.md"
    )


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_name_as_a_flag_is_answered_with_ours(system: str) -> None:
    for entry in names_of(system):
        with pytest.raises(ConfigError) as caught:
            load_config([], [f"--{entry.name.lstrip('-')}", "1"])
        message = str(caught.value)
        assert system in message and entry.note in message, entry
        for key in entry.ours:
            assert f"--{key.replace('.*.', '.NAME.')}" in message, entry


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_name_in_a_file_is_answered_with_ours(system: str, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    for entry in names_of(system):
        table, _, key = entry.name.lstrip("-").rpartition(".")
        file.write_text(f"[{table}]\n{key} = 1\n" if table else f"{key} = 1\n")
        with pytest.raises(ConfigError) as caught:
            load_config([file])
        message = str(caught.value)
        assert message.startswith(f"{file}:{2 if table else 1}: key ") and system in message, entry
        assert all(key.replace(".*.", ".NAME.") in message for key in entry.ours), entry


@pytest.mark.parametrize(
    ("written", "answer"),
    [
        ("actor_rollout_ref.rollout.n", "is unknown; that is called rollout.samples_per_prompt here (verl)"),
        ("rollout-batch-size", "is unknown; that is called rollout.prompts_per_step here (slime, OpenRLHF)"),
        ("rollout_batch_size", "is unknown; that is called rollout.prompts_per_step here (slime, OpenRLHF)"),
        ("num_generations", "is unknown; that is called rollout.samples_per_prompt here (TRL)"),
        ("weight_decay", "is unknown; that is called trainer.weight_decay here (slime, TRL)"),
        (
            "algorithm.kl_ctrl.kl_coef",
            'is unknown; that is called algorithm.kl_coef here (verl): with algorithm.kl_in = "reward"',
        ),
        ("gamma", "is unknown; that is called algorithm.gamma here (slime, TRL, OpenRLHF)"),
        ("eps-clip-c", "is unknown; that is called algorithm.dual_clip here (slime)"),
        ("critic.optim.lr", "is unknown; that is called critic.learning_rate here (verl)"),
        ("actor.adam.lr", "is unknown; that is called trainer.learning_rate here (OpenRLHF)"),
        ("actor_learning_rate", "is unknown; that is called trainer.learning_rate here (OpenRLHF)"),
        ("num_iterations", "is unknown; that is called trainer.epochs here (TRL)"),
        ("algorithm.rollout_correction.rollout_is", "is unknown; that is called correction.weight here (verl)"),
        ("use_vllm", "is unknown; TRL has it, we do not: the engine is our own"),
        ("trainer.total_epochs", "is unknown; that is called trainer.steps here (verl): in steps; each draws"),
    ],
)
def test_the_answer_names_the_key_the_system_and_what_differs(written: str, answer: str) -> None:
    assert explain_unknown(written).startswith(answer)


def test_a_name_under_a_section_of_ours_leads_to_the_same_key() -> None:
    assert "rollout.samples_per_prompt" in explain_unknown("trainer.num_generations")
    assert "rollout.prompts_per_step" in explain_unknown("data.rollout_batch_size")


def test_nested_tables_of_a_file_are_searched_for_the_first_name_known_elsewhere(tmp_path: Path) -> None:
    file = tmp_path / "verl.toml"
    file.write_text("[actor_rollout_ref.actor]\nstrange = 1\n[actor_rollout_ref.actor.optim]\nlr = 1e-6\n")
    with pytest.raises(ConfigError, match=r":4: key actor_rollout_ref.actor.optim.lr .* trainer.learning_rate"):
        load_config([file])
    file.write_text("[algorithm.kl_ctrl]\nkl_coef = 0.1\n")
    with pytest.raises(ConfigError, match=r":2: key algorithm.kl_ctrl.kl_coef .*algorithm.kl_coef here \(verl\)"):
        load_config([file])


def test_a_setting_without_dashes_is_told_from_a_file() -> None:
    with pytest.raises(ConfigError, match=r"given as a flag.*--rollout.samples_per_prompt here \(verl\)"):
        load_config(["actor_rollout_ref.rollout.n=8"])
    with pytest.raises(ConfigError, match=r"given as a flag, --section\.key VALUE$"):
        load_config(["trainer.steps=8"])


def test_names_are_compared_without_case_and_dashes() -> None:
    assert normalised("--Rollout-Batch-Size") == "rollout_batch_size"
    assert find_foreign("N-SAMPLES-PER-PROMPT") and not find_foreign("trainer.steps") and not find_foreign("")
