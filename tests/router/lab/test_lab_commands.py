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


def test_one_failure_is_no_success(endpoint, invoke):
    endpoint.fault = lambda body, number: "503" if number == 3 else ""
    result = invoke("builtin:tiny", "--url", endpoint.url, "--json", "-")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["errors"] == {"http_503": 1}


def test_what_was_too_long_to_send_is_no_failure(endpoint, invoke, broken_trace):
    broken_trace.write_text('{"prompt": [1, 2, 3]}\n{"prompt": [1, 2, 3, 4]}')
    result = invoke(broken_trace, "--url", endpoint.url, "--context", 5, "--max-tokens", 2, "--json", "-")
    assert json.loads(result.stdout)["errors"] == {"over_context": 1}
    assert result.exit_code == 0


@pytest.fixture
def broken_trace(tmp_path):
    """Twenty lines, all broken but the first and the fifth."""
    good = '{"prompt": "hi", "max_tokens": 1}'
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join([good, "{", "[]", "{", good, *["{"] * 15]))
    return path


def test_broken_lines_are_all_named_before_anything_is_sent(endpoint, invoke, broken_trace):
    result = invoke(broken_trace, "--url", endpoint.url)
    assert isinstance(result.exception, RouterError)
    assert str(result.exception).startswith(f"{broken_trace}, line 2: not valid JSON")
    assert str(result.exception).endswith(
        "; 17 more broken (line 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, ...); --skip-bad leaves such lines out"
    )
    assert endpoint.bodies == []


def test_skipped_lines_are_counted_on_stderr_and_the_json_stays_as_it_is(endpoint, invoke, broken_trace):
    result = invoke(broken_trace, "--url", endpoint.url, "--skip-bad", "--json", "-")
    assert result.exit_code == 0
    data = json.loads(result.stdout)
    assert (set(data), data["requests"], len(endpoint.bodies)) == (EXACT_KEYS, 2, 2)
    assert result.stderr.splitlines()[-1].startswith(f"18 broken lines skipped: {broken_trace}, line 2: ")


def test_lines_beyond_the_limit_are_not_looked_at(endpoint, invoke, broken_trace):
    assert invoke(broken_trace, "--url", endpoint.url, "--limit", 1).exit_code == 0


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
