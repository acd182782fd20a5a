import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from router.lab.blocks import Blocks
from router.lab.errors import OptionError
from router.lab.record import Request
from router.lab.reuse import Reuse
from router.lab.stats import trace_stats
from router.lab.trace_commands import trace
from router.lab.traces import read_trace
from router.lab.uses import Uses

PUBLIC = Path(__file__).parents[4] / "shared" / "traces"


def ask(ids, at=None, session=None, tokens=None, size=10):
    blocks = Blocks.of(ids, size, len(ids) * size if tokens is None else tokens, own=1)
    return Request(blocks=blocks, timestamp_s=at, session_id=session, max_tokens=4)


def prompts(seed):
    """Prompts of a random tree, so that ids are chained as they are in traces."""
    rng = np.random.default_rng(seed)
    for _ in range(int(rng.integers(1, 40))):
        node, ids = 1, []
        for _ in range(int(rng.integers(1, 9))):
            node = 3 * node + int(rng.integers(0, 2))
            ids.append(node)
        yield ask(ids, session=str(rng.integers(0, 3)))


def naive_lru(requests, capacity):
    """Leading cached blocks of each prompt; heads are used last, so tails go first."""
    order, depths = [], []
    for ids in (request.blocks.ids.tolist() for request in requests):
        cached = order[-capacity:]
        depths.append(next((i for i, block in enumerate(ids) if block not in cached), len(ids)))
        order = [block for block in order if block not in ids] + ids[::-1]
    return depths


class TestUses:
    def test_numbers_blocks_by_their_prefix_in_the_order_of_time(self):
        uses = Uses.of([ask([1, 9], at=5.0), ask([2, 9], at=1.0), ask([1, 9, 3], at=9.0, tokens=25)])
        assert uses.blocks.tolist() == [2, 3, 0, 1, 0, 1, 4]
        assert uses.begins.tolist() == [0, 2, 4, 7]
        assert (uses.lengths.tolist(), uses.times.tolist()) == ([20, 20, 25], [1.0, 5.0, 9.0])
        assert (uses.size, uses.distinct, uses.estimated) == (10, 5, False)

    def test_many_blocks(self):
        requests = [ask(range(n * 1000, n * 1000 + 1000)) for n in range(200)] * 2
        uses = Uses.of(requests)
        assert uses.distinct == 200_000
        assert (uses.blocks[:200_000] == np.arange(200_000)).all()
        assert (uses.blocks[:200_000] == uses.blocks[200_000:]).all()

    def test_text_counts_four_bytes_a_token_and_full_blocks(self):
        uses = Uses.of([Request(text="x" * 130), Request(token_ids=np.arange(32, dtype=np.int32))])
        assert (uses.lengths.tolist(), np.diff(uses.begins).tolist()) == ([33, 32], [2, 2])
        assert (uses.size, uses.estimated, uses.answers.tolist()) == (16, True, [-1, -1])

    def test_what_cannot_be_counted(self):
        with pytest.raises(OptionError, match="no requests"):
            Uses.of([])
        with pytest.raises(OptionError, match="blocks of 10 and of 20 tokens"):
            Uses.of([ask([1]), ask([1], size=20)])


class TestReuse:
    @settings(deadline=None, max_examples=50)
    @given(st.integers(0, 10_000))
    def test_equals_an_lru_cache_of_each_size(self, seed):
        requests = list(prompts(seed))
        capacities = np.array([1, 2, 3, 5, 8, 13, 1000])
        reuse = Reuse.of(Uses.of(requests), capacities)
        for column, capacity in enumerate(capacities):
            hits = [
                min(10 * n, r.num_tokens - 1)
                for n, r in zip(naive_lru(requests, capacity), requests, strict=True)
            ]
            assert reuse.lru[:, column].tolist() == hits
        assert reuse.ideal.tolist() == reuse.lru[:, -1].tolist()

    @settings(deadline=None, max_examples=30)
    @given(st.integers(0, 10_000))
    def test_within_is_a_cache_for_each_session(self, seed):
        requests = list(prompts(seed))
        within = Reuse.of(Uses.of(requests), np.array([1])).within
        for session in "012":
            places = [i for i, r in enumerate(requests) if r.session_id == session]
            own = [requests[i] for i in places]
            hits = [min(10 * n, r.num_tokens - 1) for n, r in zip(naive_lru(own, 10**6), own, strict=True)]
            assert within[places].tolist() == hits

    def test_distances_are_counted_by_powers_of_two(self):
        ids = [[1], [1], [2], [3], [1], [4], [5], [6], [7], [2]]
        distances = Reuse.of(Uses.of([ask(i) for i in ids]), np.array([1])).distances
        assert distances[:5].tolist() == [1, 0, 1, 1, 0]  # 1 after itself, after 3 blocks; 2 after 7


class TestStats:
    @pytest.fixture
    def found(self):
        requests = [
            ask([1, 2], at=0.0, session="a"),
            ask([1, 3], at=1.0, session="b"),
            ask([1, 2, 4], at=3.0, session="a"),
            ask([1, 3], at=4.0, session="b"),
        ]
        return trace_stats("t", Uses.of(requests))

    def test_lengths_and_sessions(self, found):
        assert found["requests"] == 4 and found["tokens_estimated"] is False
        assert found["prompt_tokens"] == {
            "total": 90, "mean": 22.5, "p50": 20.0, "p90": 27.0, "p99": pytest.approx(29.7), "max": 30,
        }  # fmt: skip
        assert found["answer_tokens"]["total"] == 16
        assert found["sessions"] == {"count": 2, "turns_mean": 2.0, "turns_max": 2}

    def test_arrivals(self, found):
        assert found["arrivals"] == {
            "duration_s": 4.0,
            "requests_per_s": 1.0,
            "prompt_tokens_per_s": 22.5,
            "gap_cv": pytest.approx(np.std([1, 2, 1]) / (4 / 3)),
            "peak_to_mean_second": 1.0,
            "peak_to_mean_minute": None,
        }

    def test_hits(self, found):
        assert found["ideal_hit"] == {
            "all": (0 + 10 + 20 + 19) / 90,
            "within_sessions": (20 + 19) / 90,
            "across_sessions": pytest.approx(10 / 90),
        }
        assert found["pooled_lru_hit"] == {"1/8": 30 / 90, "1/4": 30 / 90, "1/2": 30 / 90, "1": 49 / 90}
        assert found["reuse_distance"] == [
            {"up_to_blocks": 1, "uses": 3},
            {"up_to_blocks": 2, "uses": 0},
            {"up_to_blocks": 4, "uses": 2},
        ]

    def test_working_set_and_prefixes(self, found):
        assert (found["working_set"]["blocks"], found["working_set"]["tokens"]) == (4, 40)
        windows = found["working_set"]["over_time"]
        assert [w["blocks_so_far"] for w in windows] == [2, 2, 3, 3, 3, 3, 3, 4, 4, 4]
        assert [w["blocks_within"] for w in windows] == [2, 0, 2, 0, 0, 0, 0, 3, 0, 2]
        assert [(p["tokens"], p["requests"]) for p in found["hottest_prefixes"]] == [
            (10, 4),
            (20, 2),
            (20, 2),
        ]

    def test_without_clock_or_sessions(self):
        found = trace_stats("t", Uses.of([ask([1]), ask([2])]))
        assert (found["arrivals"], found["sessions"]) == (None, None)
        assert found["ideal_hit"] == {"all": 0.0, "within_sessions": None, "across_sessions": None}
        assert found["hottest_prefixes"] == found["reuse_distance"] == []
        assert found["working_set"]["unit"] == "requests"


class TestCommand:
    def write(self, path, *rows):
        path.write_text("\n".join(json.dumps(row) for row in rows))
        return str(path)

    def rows(self, *stamps):
        return [{"timestamp": at, "input_length": 512, "output_length": 9, "hash_ids": [1]} for at in stamps]

    def test_json_and_modifiers(self, tmp_path):
        path = self.write(tmp_path / "a", *self.rows(0, 10_000, 20_000), "broken")
        other = self.write(tmp_path / "b", *self.rows(0, 5_000, 40_000))
        arguments = [
            "stats",
            path,
            "--skip-bad",
            "--speed",
            "2",
            "--scale",
            "0.5",
            "--arrivals",
            other,
            "--json",
            "-",
        ]
        result = CliRunner().invoke(trace, arguments)
        assert result.exit_code == 0, result.output
        found = json.loads(result.stdout)
        assert (found["trace"], found["requests"]) == (path, 3)
        assert found["arrivals"]["duration_s"] == 20.0
        assert found["prompt_tokens"]["max"] == 256
        assert found["ideal_hit"]["all"] == (255 + 255) / 768

    def test_table(self, tmp_path):
        result = CliRunner().invoke(trace, ["stats", self.write(tmp_path / "a", *self.rows(0, 4000, 9000))])
        assert "66.5%" in result.stdout and "no clock" not in result.stdout

    def test_a_limit_is_of_requests(self, tmp_path):
        path = self.write(tmp_path / "a", *self.rows(0, 4000, 9000))
        result = CliRunner().invoke(trace, ["stats", path, "--limit", "-1"])
        assert result.exit_code == 2 and "--limit" in result.stderr

    def test_sessions_without_a_clock(self, tmp_path):
        said = [{"from": "human", "value": "x" * 400}, {"from": "gpt", "value": "y"}] * 2
        rows = [{"id": str(n), "conversations": said} for n in range(5)]
        path = self.write(tmp_path / "a", *rows)
        arguments = ["stats", path, "--json", "-"]
        assert json.loads(CliRunner().invoke(trace, arguments).stdout)["arrivals"] is None
        found = json.loads(CliRunner().invoke(trace, [*arguments, "--session-gap", "3"]).stdout)
        assert found["arrivals"]["duration_s"] > 0


@pytest.mark.parametrize(
    "name, requests, ideal, quarter",
    [
        ("mooncake_conversation.jsonl.gz", 12_031, 0.374, 0.360),
        ("agent_sessions.jsonl.gz", 9_796, 0.943, 0.939),
        ("taubench_airline.json.gz", 2_454, 0.936, 0.936),
    ],
)
def test_public_traces(name, requests, ideal, quarter):
    if not (PUBLIC / name).exists():
        pytest.skip("the public traces are not there")
    found = trace_stats(name, Uses.of(read_trace(PUBLIC / name)))
    assert found["requests"] == requests
    assert (round(found["ideal_hit"]["all"], 3), round(found["pooled_lru_hit"]["1/4"], 3)) == (ideal, quarter)


def test_the_pooled_lru_of_the_conversation_trace():
    path = PUBLIC / "mooncake_conversation.jsonl.gz"
    if not path.exists():
        pytest.skip("the public traces are not there")
    uses = Uses.of(read_trace(path))
    hits = Reuse.of(uses, np.array([16_000])).lru.sum()
    assert round(hits / uses.lengths.sum(), 3) == 0.268
