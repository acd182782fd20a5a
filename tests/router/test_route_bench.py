"""`warmroute bench route` on a small fleet: its keys, its files, and the truth of its fleet."""

import json

import numpy as np
from typer import Typer
from typer.testing import CliRunner

from router.bench import RouteBench, _Fleet, route

KEYS = {
    "replicas", "tokens", "blocks", "hash_us", "match_us", "place_us", "decide_us", "decide_p99_us",
    "bytes_per_block", "overestimate_blocks", "apply_blocks_per_s",
}  # fmt: skip
SMALL = ["--replicas", "5", "--tokens", "512", "--blocks", "2000", "--decisions", "20"]


def run(*args):
    app = Typer()
    app.command()(route)
    return CliRunner().invoke(app, [*SMALL, *args])


def test_json_on_stdout_alone_and_the_table_elsewhere():
    result = run("--json", "-")
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert set(figures) == KEYS
    assert (figures["replicas"], figures["tokens"], figures["blocks"]) == (5, 512, 2000)
    assert figures["bytes_per_block"] == 8 * 16384 / (5 * 2000)
    assert all(value >= 0 for value in figures.values())
    assert "decide_us" in result.stderr


def test_json_into_a_file_and_last_on_stdout_without_one(tmp_path):
    path = tmp_path / "route.json"
    assert run("--json", str(path)).exit_code == 0
    assert set(json.loads(path.read_text())) == KEYS
    assert set(json.loads(run().stdout.splitlines()[-1])) == KEYS


def test_a_file_that_cannot_be_written_is_refused_before_the_measurement(tmp_path):
    for path, complaint in ((tmp_path, "is a folder"), (tmp_path / "no" / "x.json", "no such folder")):
        result = run("--json", str(path))
        assert result.exit_code == 2 and complaint in " ".join(result.stderr.replace("│", "").split())


def test_the_benchmark_knows_what_its_replicas_hold():
    fleet = _Fleet(RouteBench(replicas=7, tokens=640, blocks=3000, decisions=1))
    match = fleet.placement.fingerprints.match
    found = np.array([match(fleet.hashes(i))[:7] for i in range(len(fleet.prompts))])
    over = found - fleet.true_depths
    assert over.min() >= 0
    assert over.mean() < 0.5
    assert len(fleet.placement.ledger.in_flight) == 14
