import json
import os
import signal
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from router.errors import RouterError
from router.lab.commands import replay

EXACT_KEYS = {
    "requests", "errors", "prompt_tokens", "cached_tokens", "hit_rate", "ideal_hit_rate",
    "ttft_ms", "tpot_ms", "e2e_ms", "requests_per_replica", "duration_s", "policy",
}  # fmt: skip
ALONE = "import typer; from router.lab.commands import replay; typer.run(replay)"


@pytest.fixture
def invoke():
    app = typer.Typer()
    app.command()(replay)
    return lambda *arguments: CliRunner().invoke(app, [str(a) for a in arguments])


def test_table_and_json_file(endpoint, invoke, tmp_path):
    file = tmp_path / "report.json"
    result = invoke(
        "builtin:tiny", "--url", endpoint.url, "--json", file, "--policy", "mine", "--concurrency", 2
    )
    assert result.exit_code == 0, result.output
    data = json.loads(file.read_text())
    assert set(data) == EXACT_KEYS
    assert (data["requests"], data["errors"], data["policy"]) == (10, {}, "mine")
    assert "mine" in result.stdout and "TTFT" in result.stdout
    assert result.stderr == ""


def test_json_on_stdout_is_alone_there(endpoint, invoke):
    result = invoke("builtin:tiny", "--url", endpoint.url, "--json", "-", "--limit", 2)
    assert json.loads(result.stdout)["requests"] == 2
    assert "TTFT" in result.stderr


def test_mooncake_scaled_to_a_small_model(endpoint, invoke, tmp_path):
    rows = [
        {"timestamp": 0, "input_length": length, "output_length": 4, "hash_ids": ids}
        for length, ids in ((600, [1, 2]), (1500, [1, 2, 3]))
    ]
    (tmp_path / "t").write_text("\n".join(map(json.dumps, rows)))
    arguments = ("--url", endpoint.url, "--scale", 1 / 64, "--vocab", 100, "--speed", 1000, "--json", "-")
    result = invoke(tmp_path / "t", *arguments)
    assert json.loads(result.stdout)["prompt_tokens"] == round(600 / 64) + round(1500 / 64)
    assert all(25 <= token < 100 for body in endpoint.bodies for token in body["prompt"])


def test_exit_status_when_all_failed(endpoint, invoke):
    endpoint.fault = lambda body, number: "500"
    result = invoke("builtin:tiny", "--url", endpoint.url)
    assert result.exit_code == 1
    assert "10 x http_500" in result.stderr and "answered 500" in result.stderr


def test_key_from_the_environment(endpoint, invoke, monkeypatch):
    endpoint.api_key = "secret"
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert invoke("builtin:tiny", "--url", endpoint.url).exit_code == 0


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (("nowhere.jsonl",), "nowhere.jsonl: no such file"),
        (("builtin", "--speed", "2", "--concurrency", "3"), "give one of them"),
        (("builtin", "--scale", "0"), "scale must be a positive number"),
        (("builtin", "--vocab", "0"), "no token ids between"),
        (("builtin", "--limit", "0"), "limit must be a positive number"),
        (("builtin", "--json", "/no/such/folder/x.json"), "/no/such/folder/x.json: no such folder"),
        (("builtin", "--json", "."), "cannot write .: a folder"),
    ],
)
def test_errors_are_of_our_tree(endpoint, invoke, arguments, complaint):
    """`warmroute` prints these as one line and exits with status 1."""
    result = invoke(*arguments, "--url", endpoint.url)
    assert isinstance(result.exception, RouterError)
    assert complaint in str(result.exception)
    assert endpoint.bodies == []


def test_ctrl_c_ends_with_the_partial_report(endpoint):
    endpoint.fault = lambda body, number: "hang" if number >= 3 else ""
    command = [
        sys.executable,
        "-c",
        ALONE,
        "builtin:tiny",
        "--url",
        endpoint.url,
        "--concurrency",
        "1",
        "--json",
        "-",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert endpoint.hanging.wait(20)
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=20)
    assert process.returncode == 130, err
    data = json.loads(out)
    assert set(data) == EXACT_KEYS
    assert (data["requests"], data["errors"]) == (4, {"interrupted": 1})
    assert data["ideal_hit_rate"] is not None
    assert "Traceback" not in err
