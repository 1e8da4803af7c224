from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from tests.bench.fake_server import serving, sglang
from tests.bench.workloads import requests, write
from unison.cli.main import main

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def workload(tmp_path: Path) -> str:
    return str(write(tmp_path, requests({"n": 2})))


def test_the_engine_is_measured_in_this_process(workload: str, capsys: Capture) -> None:
    words = ["--model", "tiny-random", "--numerics", "fast", "--dtype", "float32", "--threads", "1", "--repeat", "2"]
    assert main(["bench", "--workload", workload, *words, "--engine.kv_tokens", "1024"]) == 0
    shown = capsys.readouterr()
    assert "model tiny-random, dtype float32, numerics fast, threads 1" in shown.out
    for figure in ("tokens/s", "tokens/CPU-s", "latency p99 s", "first token median s", "peak memory GB", "steps"):
        assert f"\n{figure} " in shown.out
    assert shown.err.count("repeat ") == 2


def test_a_server_is_measured_and_json_is_one_object(workload: str, capsys: Capture) -> None:
    with serving(sglang) as server:
        words = ["--url", server.url, "--api", "sglang", "--model", "m", "--repeat", "2", "--json"]
        assert main(["bench", "--workload", workload, *words]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["target"] == {"target": server.url, "api": "sglang", "model": "m"}
    assert data["summary"]["output_tokens"] == {"median": 8.0, "min": 8.0, "max": 8.0}
    assert data["summary"]["cpu_s"] is None and len(data["repeats"]) == 2


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_short_answers_make_the_exit_code_1(workload: str, capsys: Capture, words: list[str]) -> None:
    with serving(partial(sglang, missing=2)) as server:
        code = main(["bench", "--workload", workload, "--url", server.url, "--api", "sglang", "--model", "m", *words])
    shown = capsys.readouterr()
    assert code == 1 and "brought 4 tokens, not 8" in (shown.err if words else shown.out)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--url", "http://h", "--api", "openai", "--threads", "2"], "--threads has no effect on a server"),
        (["--url", "http://h", "--api", "openai", "--engine.kv_tokens", "2"], "--engine.kv_tokens has no effect"),
        (["--api", "openai"], "--api has an effect with --url only"),
        (["--repeat", "0"], "--repeat 0 must be at least 1"),
        (["--timeout", "nan", "--url", "http://h", "--api", "openai"], "--timeout nan must be above 0"),
        (["--engine.kv_tokens", "many"], "--engine.kv_tokens: Expected `int`, got `str`"),
        (["--engine.kv_token", "5"], "did you mean --engine.kv_tokens?"),
    ],
)
def test_what_cannot_be_meant_is_refused(workload: str, capsys: Capture, words: list[str], complaint: str) -> None:
    assert main(["bench", "--workload", workload, "--model", "tiny-random", *words]) == 2
    assert complaint in capsys.readouterr().err


def test_a_broken_workload_is_a_users_error(tmp_path: Path, capsys: Capture) -> None:
    path = write(tmp_path, requests({"max_new_tokens": 0}))
    assert main(["bench", "--workload", str(path), "--model", "tiny-random"]) == 2
    assert "requests[0].max_new_tokens" in capsys.readouterr().err
