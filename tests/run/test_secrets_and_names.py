"""Secrets of a run stay in its process; names and texts of others are shown, never obeyed."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from unison.config.checks import check_config
from unison.config.schema import DataConfig, ModelConfig, RunConfig, TrainConfig
from unison.core.errors import ConfigError

REPO = Path(__file__).parents[2]
SECRET = "canary-7f3a91c0-of-the-test"
ESCAPE = "\x1b[2J\x1b]0;mine\x07"
SCRIPT = "<script>alert(1)</script>"


class Judge(http.server.BaseHTTPRequestHandler):
    """Scores most answers, and fails on the others with its own words and what it was sent."""

    asked: ClassVar[list[str | None]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.asked.append(self.headers["Authorization"])
        score = sum(body) % 7
        data = json.dumps({"score": score} if score else {"wrong": f"{ESCAPE}{self.headers}"}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def judge_url() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Judge) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def unison(*words: str) -> subprocess.CompletedProcess[bytes]:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(REPO),
        "JUDGE_KEY": f"Bearer {SECRET}",
        "HF_TOKEN": SECRET,
        "WANDB_API_KEY": SECRET,
        "AWS_SECRET_ACCESS_KEY": SECRET,
    }
    command = [sys.executable, "-m", "unison.cli.main", *words]
    return subprocess.run(command, env=environment, capture_output=True, timeout=240, check=False)


def test_a_secret_is_in_nothing_that_a_run_writes_and_hostile_texts_are_inert(judge_url: str, tmp_path: Path) -> None:
    data = tmp_path / f"rows{ESCAPE}.jsonl"
    rows = [{"question": f"{ESCAPE}{SCRIPT}{i}\u202e\r", "label": f"{ESCAPE}{SCRIPT}"} for i in range(8)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = tmp_path / "run"
    flags = {
        "model.path": "tiny-random",
        "run.dir": str(folder),
        "run.name": SCRIPT.replace("/", "|"),
        "data.train": str(data),
        "data.prompt_key": "question",
        "reward.function": "http",
        "reward.options.url": judge_url,
        "reward.options.header_env": "JUDGE_KEY",
        "trainer.steps": "2",
        "rollout.prompts_per_step": "4",
        "rollout.samples_per_prompt": "4",
        "rollout.max_new_tokens": "8",
        "algorithm.truncated": "keep",
        "eval.problems": "0",
        "checkpoint.every": "1",
    }
    result = unison("train", *[word for name, value in flags.items() for word in (f"--{name}", value)])
    said = result.stdout + result.stderr
    assert result.returncode == 0, said[-2000:]
    assert Judge.asked and set(Judge.asked) == {f"Bearer {SECRET}"}
    shown = unison("samples", str(folder)).stdout
    assert b"unscorable" in said and SCRIPT.encode() in shown
    for text in (said, shown, unison("train", str(folder)).stderr):
        assert not {0x1B, 0x07, 0x0D} & set(text) and "\u202e".encode() not in text
    written = [path for path in folder.rglob("*") if path.is_file()]
    assert len(written) > 8
    leaks = [path for path in written if SECRET.encode() in path.read_bytes()]
    assert not leaks and SECRET.encode() not in said + shown
    assert not [path for path in written if path.suffix in (".html", ".htm")]


@pytest.mark.parametrize("name", ["..", ".", "../../x", "/tmp/x", "a/b", f"a{ESCAPE}", "a\nb", "a\0b", "x" * 201])
def test_a_run_name_is_one_name_of_a_folder(name: str) -> None:
    config = TrainConfig(
        model=ModelConfig(path="tiny-random"), run=RunConfig(name=name), data=DataConfig(source="sums")
    )
    with pytest.raises(ConfigError, match="no name of a folder") as failure:
        check_config(config)
    assert str(failure.value).isprintable()
