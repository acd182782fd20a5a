import json
import math

import pytest
from typer.testing import CliRunner

from router.lab.errors import OptionError
from router.lab.ideal import ideal_hits
from router.lab.synth import KINDS, SynthConfig, preset, synthesize_trace
from router.lab.trace_commands import trace
from router.lab.traces import read_trace


def made(kind, **changes):
    return synthesize_trace(preset(kind, requests=300, **changes))


def read(tmp_path, rows):
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return list(read_trace(path))


def hit_rate(requests):
    prompts = [request.known_tokens() for request in requests]
    return sum(ideal_hits(prompts)) / sum(map(len, prompts))


@pytest.mark.parametrize("kind", [*KINDS, "mixed"])
class TestEveryKind:
    def test_is_read_back_as_it_was_written(self, tmp_path, kind):
        rows = made(kind)
        requests = read(tmp_path, rows)
        assert [r.num_tokens for r in requests] == [row["input_length"] for row in rows]
        assert [r.blocks.ids.tolist() for r in requests] == [row["hash_ids"] for row in rows]
        assert [r.session_id for r in requests] == [row.get("session_id") for row in rows]
        assert {r.blocks.size for r in requests} == {64}
        assert [round(r.timestamp_s * 1000, 3) for r in requests] == [row["timestamp"] for row in rows]

    def test_by_seed(self, tmp_path, kind):
        assert made(kind) == made(kind) != made(kind, seed=1)

    def test_is_in_the_order_of_time(self, tmp_path, kind):
        stamps = [row["timestamp"] for row in made(kind)]
        assert stamps == sorted(stamps) and stamps[0] == 0.0


class TestWhatIsShared:
    @pytest.mark.parametrize(
        "kind, low, high",
        [("chat", 0.8, 0.95), ("agents", 0.85, 0.95), ("documents", 0.7, 0.99), ("shared", 0.85, 0.99)],
    )
    def test_hit_rates(self, tmp_path, kind, low, high):
        assert low < hit_rate(read(tmp_path, made(kind))) < high

    def test_random_prompts_share_nothing(self, tmp_path):
        rows = made("random")
        ids = [i for row in rows for i in row["hash_ids"]]
        assert len(ids) == len(set(ids))

    def test_a_turn_continues_the_one_before_it(self, tmp_path):
        sessions = {}
        for row in made("agents", skew=0):
            session = row.get("session_id", "a call of its own")
            before = sessions.get(session) if "session_id" in row else None
            if before is not None:
                assert row["delay"] >= 0 and row["timestamp"] >= before["timestamp"] + row["delay"]
                full = before["input_length"] // 64
                assert row["hash_ids"][:full] == before["hash_ids"][:full]
                assert row["input_length"] > before["input_length"] + before["output_length"]
            sessions[session] = row
        assert len(sessions) > 10

    def test_chats_have_the_system_prompts_of_tenants(self):
        heads = {row["hash_ids"][0] for row in made("chat", tenants=3)}
        assert len(heads) == 3

    def test_partial_blocks_have_ids_of_their_own(self):
        """Else a cache that goes by ids would hit tokens that were never computed."""
        first, second = [row for row in made("chat", turns=40.0) if row.get("session_id") == "0"][:2]
        assert first["input_length"] % 64 and first["hash_ids"][-1] not in second["hash_ids"]

    def test_shares_of_kinds(self):
        config = preset("mixed", requests=4000, chat=0.0, agents=0.0, documents=0.0, random=1.0, shared=3.0)
        heads = [row["hash_ids"][0] for row in synthesize_trace(config)]
        common = max(heads.count(head) for head in set(heads))
        assert math.isclose(common / 4000, 0.75, abs_tol=0.03)


@pytest.mark.parametrize(
    "changes", [{"turns": 0.5}, {"rate": 0}, {"requests": 0}, {"skew": -1}, {"think_s": math.inf}]
)
def test_parameters_that_cannot_be(changes):
    with pytest.raises(OptionError):
        SynthConfig(**changes)


def test_a_skew_without_end_leaves_one_document():
    assert len({row["hash_ids"][0] for row in made("documents", skew=1e9)}) == 1


def test_a_session_is_not_longer_than_the_trace():
    assert max(row["input_length"] for row in made("chat", turns=1e9)) < 10**6


def test_a_workload_of_nothing():
    with pytest.raises(OptionError, match="no kind of session has a share"):
        preset("chat", chat=0.0)
    with pytest.raises(OptionError, match="no workload 'rag'; there are: chat, agents, documents"):
        preset("rag")


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
def test_command(tmp_path, name):
    out = str(tmp_path / name)
    arguments = [
        "synth",
        out,
        "--kind",
        "documents",
        "--requests",
        "50",
        "--documents",
        "2",
        "--random-share",
        "0.5",
    ]
    result = CliRunner().invoke(trace, arguments)
    assert (result.exit_code, result.stdout) == (0, f"50 requests in {out}\n")
    assert len(list(read_trace(out))) == 50
    assert (tmp_path / name).read_bytes().startswith(b"\x1f\x8b") == name.endswith(".gz")
