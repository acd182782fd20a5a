"""`warmroute bench engine` on the tiny model: what it prints can be parsed and names what was asked."""

import json

import typer
from typer.testing import CliRunner

from replica.bench import engine

KEYS = [
    "model",
    "threads",
    "prompt_tokens",
    "repeats",
    "ttft_cold_ms",
    "ttft_warm_ms",
    "ttft_speedup",
    "prefill_tokens_per_s",
    "decode_tokens_per_s",
    "steps",
]


def run(*arguments):
    app = typer.Typer()
    app.command()(engine)
    return CliRunner().invoke(
        app, ["--model", "random:tiny", "--prompt-tokens", "64", "--repeats", "2", *arguments]
    )


def test_json_on_stdout_is_all_there_is_on_stdout():
    result = run("--threads", "1", "--json", "-")
    assert result.exit_code == 0
    figures = json.loads(result.stdout)
    assert list(figures) == KEYS
    assert (figures["model"], figures["threads"], figures["prompt_tokens"]) == ("random:tiny", 1, 64)
    assert list(figures["decode_tokens_per_s"]) == ["1", "8"]
    assert figures["ttft_cold_ms"] > 0 < figures["ttft_warm_ms"]
    # The longest prompt is 184 tokens here, half of it a chunk; what is cached before it are whole blocks.
    assert [tuple(step.values())[:4] for step in figures["steps"]] == [
        (5, 0, 0, 0),
        (23, 0, 0, 0),
        (92, 0, 0, 0),
        (5, 80, 0, 0),
        (23, 80, 0, 0),
        (92, 80, 0, 0),
        (0, 0, 1, 23),
        (0, 0, 8, 240),
        (0, 0, 2, 350),
    ]
    assert all(step["ms"] > 0 for step in figures["steps"])
    assert "time to first token, warm" in result.stderr


def test_json_goes_to_a_file_and_the_table_to_stdout(tmp_path):
    path = tmp_path / "figures.json"
    result = run("--json", str(path))
    assert list(json.loads(path.read_text())) == KEYS
    assert "decode, batch 8" in result.stdout


def test_drafts_are_measured_when_asked_for():
    result = run("--draft-tokens", "3", "--json", "-")
    figures = json.loads(result.stdout)
    assert list(figures) == [*KEYS, "drafts"]
    drafts = figures["drafts"]
    assert (drafts["draft_tokens"], drafts["drafted"] >= drafts["accepted"] > 0) == (3, True)
    # Three answers, twice, whose first tokens are not counted; a step draws one token beyond the accepted.
    tokens = 2 * 3 * 63
    assert round(tokens / drafts["tokens_per_step"]) + drafts["accepted"] == tokens
    assert drafts["decode_tokens_per_s"] > 0 < drafts["decode_tokens_per_s_without"]
    assert "quoting, 3 drafts" in result.stderr


def test_a_prompt_beyond_the_context_or_an_unknown_model_is_a_clear_error():
    result = run("--prompt-tokens", "5000")
    assert (result.exit_code, "5000 tokens" in result.stderr) == (1, True)
    result = run("--model", "no-such-model")
    assert (result.exit_code, "no-such-model" in result.stderr) == (1, True)
