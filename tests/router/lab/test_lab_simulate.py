"""`warmroute simulate` from the outside: bounds are bounds, the table is whole, nonsense is refused."""

import json

import pytest
import typer
from typer.testing import CliRunner

from router.errors import RouterError
from router.lab.simulate import simulate


@pytest.fixture
def invoke(tmp_path):
    """Runs the command; returns its result and the JSON."""
    app = typer.Typer()
    app.command()(simulate)

    def run(trace, *options):
        out = tmp_path / "out.json"
        arguments = [trace, "--json", out, "--policy", "cache_aware", *options]
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        return result, json.loads(out.read_text()) if result.exit_code == 0 else None

    return run


@pytest.fixture
def trace(tmp_path):
    """Writes rows of (seconds, hash ids, answer tokens) with blocks of 512 tokens."""

    def write(*rows):
        file = tmp_path / "trace.jsonl"
        lines = [
            {"timestamp": 1000 * at, "hash_ids": ids, "input_length": 512 * len(ids), "output_length": answer}
            for at, ids, answer in rows
        ]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return file

    return write


def test_what_no_replica_can_hold_is_in_no_bound(trace, invoke):
    file = trace((0, [1, 2], 1), (10, list(range(10, 30)), 1), (20, [1, 2], 1))
    result, found = invoke(file, "--blocks", 4, "--replicas", 1)
    (run,) = found["runs"]
    assert (run["requests"], run["refused"]) == (2, 1)
    assert (run["hit_rate"], found["bounds"]["infinite"]) == (1023 / 2048, 0.5), "the last token is computed"
    assert run["ttft_ms"]["mean"] == pytest.approx(found["bounds"]["ttft_ms"]["mean"])
    assert "cache_aware, speed 1: 1 requests refused" in result.stdout


def test_a_fleet_that_can_hold_nothing(trace, invoke):
    with pytest.raises(RouterError, match=r"no request fits into a replica: .* are 512 tokens"):
        raise invoke(trace((0, [1, 2], 1)), "--blocks", 1)[0].exception


def test_the_bound_of_ttft_is_of_the_fastest_replica(trace, invoke):
    file = trace((0, [1, 2], 1), (10, [3, 4], 1))
    _, plain = invoke(file, "--replicas", 2)
    _, mixed = invoke(file, "--replicas", 2, "--replica-speed", "0.5,4,9")
    assert mixed["bounds"]["ttft_ms"]["mean"] == pytest.approx(plain["bounds"]["ttft_ms"]["mean"] / 4)
    assert plain["runs"][0]["ttft_ms"] == pytest.approx(plain["bounds"]["ttft_ms"])
    _, joined = invoke(file, "--replicas", 2, "--replica-speed", "0.5,4,8", "--change", "join@1")
    assert joined["bounds"]["ttft_ms"]["mean"] == pytest.approx(plain["bounds"]["ttft_ms"]["mean"] / 8)


def test_replicas_that_join_bring_blocks_to_the_pool(trace, invoke):
    file = trace((0, [1, 2, 3], 1), (10, [4, 5, 6], 1), (20, [1, 2, 3], 1), (30, [4, 5, 6], 1))
    _, found = invoke(file, "--replicas", 1, "--blocks", 4, "--change", "join@5")
    assert found["bounds"]["pooled_lru"] == found["bounds"]["pooled_opt"] == 0.5
    assert found["bounds"]["infinite"] == 0.5


def test_hits_within_a_block_are_in_the_bound(tmp_path, invoke):
    file = tmp_path / "chats.jsonl"
    prompts = [[*range(600)], [*range(300), *range(1000, 1300)], [*range(300)]]
    file.write_text(
        "".join(json.dumps({"prompt": ids, "timestamp": 9 * i}) + "\n" for i, ids in enumerate(prompts))
    )
    _, found = invoke(file, "--replicas", 1)
    assert found["runs"][0]["hit_rate"] == (300 + 299) / 1500
    assert found["bounds"]["infinite"] == (300 + 300) / 1500


def test_an_empty_prompt_is_a_token(tmp_path, invoke):
    file = tmp_path / "chats.jsonl"
    file.write_text('{"prompt": ""}\n{"prompt": ""}\n')
    _, found = invoke(file)
    assert found["runs"][0]["requests"] == 2


def test_a_trace_of_broken_lines_alone_says_what_is_broken(tmp_path, invoke):
    file = tmp_path / "broken.jsonl"
    file.write_text('{"prompt": \n{"prompt": \n')
    with pytest.raises(
        RouterError, match=r"line 1: not valid JSON .*; 1 more broken [(]line 2[)]; the trace is empty"
    ):
        raise invoke(file, "--skip-bad")[0].exception


def test_blocks_of_the_trace_and_of_the_caches(tmp_path, invoke):
    file = tmp_path / "trace.jsonl"
    row = {"timestamp": 0, "hash_ids": [1, 2, 3, 4, 5, 6, 7], "input_length": 7 * 48, "output_length": 1}
    file.write_text((json.dumps(row) + "\n") * 2)
    with pytest.raises(RouterError, match="or --trace-block-size of simulate"):
        raise invoke(file, "--block-size", 48)[0].exception
    _, found = invoke(file, "--block-size", 16, "--trace-block-size", 48)
    assert found["bounds"]["infinite"] == 0.5


def test_large_figures_are_not_cut_off(trace, invoke):
    rows = [(0, list(range(400 * i, 400 * i + 400)), 1) for i in range(40)]
    result, found = invoke(trace(*rows), "--replicas", 1, "--speed", "1e9", "--replica-speed", "0.01")
    assert "…" not in result.stdout
    assert f"{found['runs'][0]['e2e_ms']['mean'] / 1000:,.1f}" in result.stdout


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--pooled", "--speed", "1,4"], "--pooled takes one --speed, not '1,4'"),
        (["--pooled", "--change", "fail:0@5"], "--change is about fleets: it cannot be had with --pooled"),
        (["--round-up"], "--round-up is about one pool: it goes with --pooled"),
        (["--pooled", "--replica-speed", "1,0.5"], "--replica-speed is about fleets"),
        (["--timing", "nowhere.json"], "cannot read nowhere.json: No such file or directory"),
        (["--speed", "1e-320"], "--speed takes positive numbers up to 1e[+]09, not '1e-320'"),
        (["--replica-speed", "1e99"], "--replica-speed takes positive numbers up to"),
        (["--scale", "1e99"], "the scale must be a positive number up to 1e[+]06, not 1e[+]99"),
        (["--timing", "h100-8b-tp0"], "unknown timing 'h100-8b-tp0'"),
        (["--timing", "h100-8b-tp²"], "perhaps with -tpN, or a .json file"),
        (["--block-size", "99999999999"], "there is not enough memory|[Uu]nable to allocate|block"),
        (["--change", "fail:0@5", "--change", "fail:0@9"], "no replica 0 is there at 9 s to fail"),
    ],
)
def test_options_that_mean_nothing(trace, invoke, options, complaint):
    with pytest.raises(RouterError, match=complaint):
        raise invoke(trace((0, [1, 2], 1)), *options)[0].exception


def test_one_file_for_two(trace, invoke, tmp_path):
    with pytest.raises(RouterError, match="--json and --report cannot both write"):
        raise invoke(trace((0, [1, 2], 1)), "--report", tmp_path / "out.json")[0].exception
