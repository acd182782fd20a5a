"""`warmroute bench kvcore`: its streams, what it measures, and what it prints."""

import json
import sys
from itertools import islice, pairwise

import numpy as np
import typer
from typer.testing import CliRunner

from replica.bench_cache import kvcore, measure, run, traced_bytes
from replica.bench_peers import Warmroute
from replica.bench_streams import mixed, multi_turn

KEYS = [
    "cycle_us",
    "bytes_per_block",
    "cycle_us_multiturn",
    "cycle_us_2048",
    "exponent",
    "traced_bytes_per_block",
]


def command(*arguments):
    app = typer.Typer()
    app.command()(kvcore)
    small = ["--num-blocks", "2048", "--requests", "5", "--longest", "2048", "--no-peers"]
    return CliRunner().invoke(app, [*small, *arguments])


def common(a, b):
    different = np.flatnonzero(a[: len(b)] != b[: len(a)])
    return int(different[0]) if len(different) else min(len(a), len(b))


def test_mixed_prompts_share_what_their_kind_says_with_one_of_the_latest():
    asks = list(islice(mixed(64, residents=100, seed=1), 101))
    shared = {"0% shared": 0, "25% shared": 16, "50% shared": 32, "75% shared": 48, "100% shared": 64}
    for number in range(60, 101):
        ask = asks[number]
        longest = max(common(ask.tokens, before.tokens) for before in asks[:number])
        assert (len(ask.tokens), longest) == (64, shared[ask.kind])
    assert {ask.kind for ask in asks} == set(shared)


def test_the_same_seed_gives_the_same_stream():
    for stream in (mixed, multi_turn):
        arguments = (64, 4) if stream is mixed else (4, 10, 40)
        pairs = zip(islice(stream(*arguments), 30), islice(stream(*arguments), 30), strict=True)
        assert all(np.array_equal(a.tokens, b.tokens) and a.kind == b.kind for a, b in pairs)


def test_a_chat_grows_by_one_turn_until_it_is_full_and_starts_anew():
    lengths = [len(ask.tokens) for ask in islice(multi_turn(sessions=1, turn=10, full=40), 9)]
    first = lengths[0]
    assert lengths == [10 * ((first // 10 - 1 + i) % 4 + 1) for i in range(9)]
    asks = list(islice(multi_turn(sessions=1, turn=10, full=40), 9))
    for before, after in pairwise(asks):
        grown = len(after.tokens) > len(before.tokens)
        assert common(before.tokens, after.tokens) == (len(before.tokens) if grown else 0)


def test_subjects_see_the_whole_stream_and_only_what_follows_the_warm_up_is_timed():
    subject = Warmroute(64, 16)
    times = run([subject], mixed(64, residents=4), warm_up=32, requests=48)["cycle"]
    assert (len(times.hits), sum(len(kind) for kind in times.by_kind.values())) == (48, 48)
    # A hit ends with the last token but one; blocks are 16 tokens, as the quarters are.
    assert set(times.hits) == {0, 16, 32, 48, 63}
    assert subject.cache.stats().evictions > 0
    assert subject.drain() == 0
    subject.cache.check()


def test_the_traced_memory_holds_at_least_the_arrays():
    assert traced_bytes(2048, 2048) >= Warmroute(2048, 16).cache.nbytes


def test_json_on_stdout_is_all_there_is_on_stdout():
    result = command("--json", "-")
    assert result.exit_code == 0
    figures = json.loads(result.stdout)
    assert list(figures) == KEYS
    assert all(value > 0 for key, value in figures.items() if key != "exponent")
    assert [word in result.stderr for word in ("warmroute", "100% shared", "multi-turn")] == [True] * 3


def test_json_goes_to_a_file_and_the_table_to_stdout(tmp_path):
    path = tmp_path / "figures.json"
    result = command("--json", str(path))
    assert list(json.loads(path.read_text())) == KEYS
    assert "multi-turn" in result.stdout
    assert command("--json", str(tmp_path / "no" / "file")).exit_code == 2


def test_a_peer_that_cannot_be_imported_is_left_out_and_said_so(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "sglang", None)
    monkeypatch.setitem(sys.modules, "vllm", None)
    figures, _ = measure(2048, 5, 2048, peers=True)
    assert list(figures) == KEYS
    left_out = ["SGLang", "SGLang with events", "vLLM"] * 2
    assert [record.message.split(" is not measured")[0] for record in caplog.records] == left_out


def test_what_cannot_be_measured_or_kept_is_refused_before_the_measurement(tmp_path):
    for arguments, complaint in (
        (("--longest", "32769"), "does not fit"),
        (("--json", str(tmp_path)), "is a folder"),
        (("--json", str(tmp_path / "no" / "x.json")), "no such folder"),
        (("--num-blocks", str(1 << 30)), "--num-blocks"),
    ):
        result = command(*arguments)
        assert result.exit_code == 2 and complaint in " ".join(result.stderr.replace("│", "").split())
