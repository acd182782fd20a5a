"""The formats that `test_lab_traces` does not cover: told by content, read exactly, broken rows named."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from router.lab.errors import TraceError
from router.lab.rows import TraceOptions
from router.lab.traces import read_trace

PUBLIC = Path(__file__).parents[4] / "shared" / "traces"


@pytest.fixture
def file(tmp_path):
    def write(text, pack=False):
        path = tmp_path / "trace"
        path.write_bytes(gzip.compress(text.encode()) if pack else text.encode())
        return path

    return write


def lines(*rows):
    return "\n".join(map(json.dumps, rows))


def read(path, bad=None, **options):
    return list(read_trace(path, TraceOptions(**options), **({} if bad is None else {"bad": bad.append})))


def public(name):
    path = PUBLIC / name
    if not path.exists():
        pytest.skip("the public traces are not there")
    return path


def ideal(requests):
    """Hits of a cache of blocks that never forgets, over prompt tokens."""
    seen, hits, total = set(), 0, 0
    for blocks in (request.blocks for request in requests):
        keys = blocks.keys().tolist()
        known = next((i for i, key in enumerate(keys) if key not in seen), len(keys))
        hits += min(known * blocks.size, blocks.num_tokens - 1)
        total += blocks.num_tokens
        seen.update(keys)
    return hits / total


class TestMooncakeSessions:
    def test_a_delay_counts_from_the_end_of_the_turn_before(self, file):
        first = {"session_id": "a", "timestamp": 5000, "input_length": 10, "hash_ids": [1]}
        second = {"session_id": "a", "delay": 2500, "input_length": 20, "hash_ids": [1]}
        a, b = read(file(lines(first, second)), block_size=512)
        assert (a.timestamp_s, a.think_s, a.session_id) == (0.0, None, "a")
        assert (b.timestamp_s, b.think_s, b.session_id) == (2.5, 2.5, "a")

    def test_a_delay_without_a_turn_before_is_named(self, file):
        rows = [{"timestamp": 0, "input_length": 9}, {"session_id": "b", "delay": 5, "input_length": 9}]
        with pytest.raises(TraceError, match=r"line 2: no `timestamp`"):
            read(file(lines(*rows)))


class TestBailian:
    ROWS = (
        {"chat_id": 7, "parent_chat_id": -1, "timestamp": 61.5, "input_length": 40, "output_length": 9,
         "type": "text", "turn": 1, "hash_ids": [1, 2, 3]},
        {"chat_id": 8, "parent_chat_id": 3, "timestamp": 62.0, "input_length": 16, "output_length": 0,
         "type": "text", "turn": 4, "hash_ids": [9]},
        {"chat_id": 9, "parent_chat_id": 7, "timestamp": 63.0, "input_length": 50, "output_length": 2,
         "type": "text", "turn": 2, "hash_ids": [1, 2, 3, 4]},
        {"chat_id": 10, "parent_chat_id": 9, "timestamp": 64.25, "input_length": 64, "output_length": 2,
         "type": "text", "turn": 3, "hash_ids": [1, 2, 3, 4]},
    )  # fmt: skip

    def test_chats_become_sessions(self, file):
        requests = read(file(lines(*self.ROWS)))
        assert [r.session_id for r in requests] == ["7", "8", "7", "7"]
        assert [r.timestamp_s for r in requests] == [0.0, 0.5, 1.5, 2.75]
        assert [r.max_tokens for r in requests] == [9, 1, 2, 2]
        assert [r.num_tokens for r in requests] == [40, 16, 50, 64]
        assert {r.blocks.size for r in requests} == {16}
        assert requests[2].blocks.ids.tolist() == [1, 2, 3, 4]

    def test_a_wrong_row_is_named(self, file):
        bad = []
        rows = [self.ROWS[0], self.ROWS[1] | {"hash_ids": [1, 2, 3]}, self.ROWS[2] | {"timestamp": None}]
        assert len(read(file(lines(*rows)), bad)) == 1
        assert [(e.line, e.what[:31]) for e in bad] == [
            (2, "3 hash_ids do not fit input_len"),
            (3, "no `timestamp` (seconds)"),
        ]


def weka_request(t, length, ids, **more):
    return {
        "t": t,
        "type": "s",
        "in": length,
        "out": 5,
        "hash_ids": ids,
        "think_time": 1.5,
        "api_time": 2.0,
        **more,
    }


def weka_session(name, *requests, scope="global"):
    return {"id": name, "block_size": 64, "hash_id_scope": scope, "requests": list(requests)}


class TestWekaSessions:
    def test_agents_are_sessions_and_think_times_close_their_loops(self, file):
        helper = {
            "type": "subagent", "t": 9.0, "agent_id": "helper",
            "requests": [weka_request(0.0, 64, [1]), weka_request(4.0, 128, [1, 7])],
        }  # fmt: skip
        session = weka_session("s", weka_request(0.0, 130, [1, 2]), weka_request(7.0, 192, [1, 2, 3]), helper)
        requests = read(file(json.dumps(session)))
        assert [(r.session_id, r.timestamp_s, r.think_s) for r in requests] == [
            ("s", 0.0, None), ("s", 7.0, 1.5), ("s/helper", 9.0, None), ("s/helper", 13.0, 1.5),
        ]  # fmt: skip
        assert [r.num_tokens for r in requests] == [130, 192, 64, 128]
        assert requests[3].blocks.ids.tolist() == [1, 7]

    def test_times_of_a_sub_agent_may_be_those_of_the_session(self, file):
        helper = {"type": "subagent", "t": 9.0, "agent_id": "h", "requests": [weka_request(9.5, 64, [1])]}
        session = weka_session("s", weka_request(0.0, 64, [1]), weka_request(7.0, 64, [1]), helper)
        assert [r.timestamp_s for r in read(file(json.dumps(session)))] == [0.0, 7.0, 9.5]

    @pytest.mark.parametrize("indent, pack", [(None, False), (2, False), (2, True)])
    def test_pretty_printed_or_not(self, file, indent, pack):
        sessions = [weka_session(name, weka_request(0.0, 64, [1])) for name in "ab"]
        text = "\n".join(json.dumps(session, indent=indent) for session in sessions)
        assert [r.session_id for r in read(file(text, pack))] == ["a", "b"]

    def test_ids_are_shared_across_sessions_if_their_scope_is_global(self, file):
        for scope, hits in (("global", 0.5), ("local", 0.0)):
            sessions = [
                weka_session(name, weka_request(0.0, 6400, list(range(100))), scope=scope) for name in "ab"
            ]
            requests = read(file(lines(*sessions)))
            assert round(ideal(requests), 3) == hits

    def test_sessions_start_by_seed_and_requests_come_in_the_order_of_time(self, file):
        sessions = [
            weka_session(name, weka_request(0.0, 64, [1]), weka_request(9e5, 64, [1])) for name in "abc"
        ]
        path = file(lines(*sessions))
        requests = read(path)
        times = [r.timestamp_s for r in requests]
        assert [r.session_id for r in requests] == ["a", "b", "c", "a", "b", "c"]
        assert times == sorted(times) and times[0] == 0.0
        assert times == [r.timestamp_s for r in read(path)]
        assert times != [r.timestamp_s for r in read(path, seed=1)]
        assert [r.timestamp_s for r in read(path, session_gap_s=0.0)] == [0.0] * 3 + [9e5] * 3

    def test_a_broken_request_is_left_out_of_its_session(self, file):
        bad = []
        session = weka_session(
            "s", weka_request(0.0, 64, [1]), weka_request(None, 64, [1]), weka_request(3.0, 60, [1, 2])
        )
        assert len(read(file(lines(session, {"id": "t", "requests": [3]})), bad)) == 1
        assert [(e.line, e.what.split(",")[0]) for e in bad] == [
            (1, "no `t` (seconds)"),
            (1, "2 hash ids do not fit in 60 by blocks of 64 (--block-size"),
            (2, "`requests` must be a list of JSON objects that is not empty"),
        ]


class TestWekaRequests:
    def row(self, t, agent="main", session="s", **more):
        return {"session_id": session, "agent": agent, "t": t, "input_length": 200, "output_length": 3,
                "hash_ranges": [[1, 2], [50, 1]], "think_time": 2.0, "api_time": 10.0, **more}  # fmt: skip

    def test_runs_of_ids(self, file):
        (request,) = read(file(lines(self.row(0.0))))
        *shared, own = request.blocks.ids.tolist()
        assert shared == [1, 2, 50] and own < 0
        assert (request.num_tokens, len(request.known_tokens()), request.max_tokens) == (200, 200, 3)

    def test_a_sub_agent_starts_when_the_request_before_it_ended(self, file):
        rows = [
            self.row(0.0),
            self.row(30.0),
            self.row(0.0, "helper"),
            self.row(5.0, "helper"),
            self.row(60.0),
        ]
        requests = read(file(lines(*rows)))
        assert [(r.session_id, r.timestamp_s, r.think_s) for r in requests] == [
            ("s", 0.0, None), ("s", 30.0, 2.0),
            ("s/helper", 40.0, None), ("s/helper", 45.0, 2.0), ("s", 60.0, 2.0),
        ]  # fmt: skip

    def test_a_wrong_row_is_named(self, file):
        bad = []
        path = file(lines(self.row(0.0), self.row(1.0, hash_ranges=[[1]]), self.row(1.0, input_length=100)))
        assert len(read(path, bad)) == 1
        assert [(e.line, e.what[:20]) for e in bad] == [
            (2, "`hash_ranges` must b"),
            (3, "3 hash ids do not fi"),
        ]


class TestLengths:
    def test_azure(self, file):
        header = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        rows = "2023-11-16 18:17:03.9799600,48,10\n2023-11-16 18:17:04.2299600,70,8\n"
        a, b = read(file(header + rows))
        assert (a.timestamp_s, a.num_tokens, a.max_tokens) == (0.0, 48, 10)
        assert (round(b.timestamp_s, 6), b.num_tokens, b.max_tokens) == (0.25, 70, 8)
        assert not set(a.blocks.ids.tolist()) & set(b.blocks.ids.tolist())
        assert (a.known_tokens()[:48] == b.known_tokens()[:48]).mean() < 0.1

    def test_azure_with_time_zones(self, file):
        rows = "2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 02:00:01+02:00,2399,6\n"
        times = [r.timestamp_s for r in read(file("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows))]
        assert [round(t, 5) for t in times] == [0.0, 0.99007]

    def test_burstgpt_columns_are_found_by_name(self, file):
        text = (
            "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
            "5,s1,1.5,ChatGPT,472,18,490,Conversation log\n"
            "45.5,s1,2,GPT-4,1087,0,1087,Conversation log\n"
        )
        a, b = read(file(text, pack=True))
        assert (a.timestamp_s, a.num_tokens, a.max_tokens, a.session_id) == (0.0, 472, 18, "s1")
        assert (b.timestamp_s, b.num_tokens, b.max_tokens, b.session_id) == (40.5, 1087, 1, "s1")

    def test_wrong_rows_are_named(self, file):
        bad = []
        text = (
            "Timestamp,Request tokens,Response tokens\n1,2,3\n1,2\nnow,2,3\n1,,3\n,2,3\n1,0,3\n"
            + "x" * 200_000
        )
        assert len(read(file(text), bad)) == 1
        assert [(e.line, e.what) for e in bad] == [
            (3, "2 values under 3 column names"),
            (4, "`timestamp` is neither seconds nor a date with time: now"),
            (5, "no value under `request tokens`"),
            (6, "no value under `timestamp`"),
            (7, "`request tokens` must be a whole number of at least 1, not 0"),
            (8, "not CSV (field larger than field limit (131072))"),
        ]


class TestShareGPT:
    def conversation(self, name="x", **more):
        said = [("system", "s"), ("human", "hi"), ("gpt", "12345"), ("human", "more"), ("gpt", "ok")]
        return {"id": name, "conversations": [{"from": who, "value": what} for who, what in said], **more}

    @pytest.mark.parametrize("indent", [None, 1])
    def test_a_request_for_each_answer(self, file, indent):
        text = json.dumps([self.conversation(), self.conversation("y")], indent=indent)
        requests = read(file(text))
        assert [r.session_id for r in requests] == ["x#0", "x#0", "y#1", "y#1"]
        assert [r.max_tokens for r in requests] == [2, 1, 2, 1]
        assert [m["role"] for m in requests[1].messages] == ["system", "user", "assistant", "user"]
        assert requests[0].messages == ({"role": "system", "content": "s"}, {"role": "user", "content": "hi"})
        assert requests[0].timestamp_s is None

    def test_a_broken_conversation_is_named_by_its_line(self, file):
        bad = []
        odd = {"id": "z", "conversations": [{"from": "cat", "value": "miaow"}]}
        path = file(json.dumps([self.conversation(), odd, self.conversation()], indent=1))
        assert len(read(path, bad)) == 4
        assert [(e.line, e.what) for e in bad] == [
            (27, "a part of `conversations` has no `value`, or no `from` that is known")
        ]

    def test_tokens(self, file):
        rows = [
            {"input_toks": 3, "output_toks": 2, "arrival_time_ns": 5_000_000_000, "input_tok_ids": [3, 1, 4]},
            {"input_toks": 1, "output_toks": 7, "arrival_time_ns": 6_500_000_000, "input_tok_ids": [5]},
        ]
        a, b = read(file(lines(*rows)))
        assert (a.token_ids.tolist(), a.max_tokens, a.timestamp_s) == ([3, 1, 4], 2, 0.0)
        assert (b.token_ids.tolist(), b.max_tokens, b.timestamp_s) == ([5], 7, 1.5)


class TestTranscripts:
    def test_calls(self, file):
        rows = [
            {"input": "do it", "output": "12345678", "session_id": "a", "timestamp_ms": 100.0},
            {"input": "do it\nmore", "output": "", "session_id": "a", "timestamp_ms": 2600.0},
        ]
        a, b = read(file(lines(*rows)))
        assert (a.text, a.max_tokens, a.timestamp_s, a.session_id) == ("do it", 2, 0.0, "a")
        assert (b.text, b.max_tokens, b.timestamp_s) == ("do it\nmore", 1, 2.5)
        assert b.tokens()[:1].tolist() == a.tokens()[:1].tolist() == np.frombuffer(b"do i", "<i4").tolist()

    def test_each_call_of_a_run_is_a_request(self, file):
        roles = ["system", "user", "assistant", "tool", "assistant", "user"]
        run = {"task_id": 4, "trial": 1, "reward": 0.0, "traj": [{"role": r, "content": r} for r in roles]}
        requests = read(file(json.dumps([run, run], indent=2)))
        assert [len(r.messages) for r in requests] == [2, 4, 2, 4]
        assert [r.session_id for r in requests] == ["4-1#0", "4-1#0", "4-1#1", "4-1#1"]
        assert requests[0].max_tokens == 3


class TestElements:
    """JSON that is not one object a line."""

    def test_are_read_one_by_one(self, tmp_path):
        packed = gzip.compress(json.dumps([{"prompt": "a"}] * 500_000).encode())
        (tmp_path / "t").write_bytes(packed[:-20])
        requests = read_trace(tmp_path / "t")
        assert next(requests).text == "a"
        with pytest.raises(TraceError, match="damaged gzip file"):
            list(requests)

    def test_a_broken_element_does_not_take_the_others_with_it(self, file):
        bad = []
        text = '[\n{"prompt": "a [ b"},\n{"prompt": oops},\n{"prompt": "\\"]}"}, 3,\n{"prompt": "c"}\n]\n'
        assert [r.text for r in read(file(text), bad)] == ["a [ b", '"]}', "c"]
        assert [(e.line, e.what[:16]) for e in bad] == [(3, "not valid JSON ("), (4, "a JSON object is")]

    def test_a_file_that_ends_early(self, file):
        bad = []
        assert [r.text for r in read(file('[{"prompt": "a"},\n{"prompt": "b'), bad)] == ["a"]
        assert [(e.line, e.what) for e in bad] == [(2, "not valid JSON (the file ends within this value)")]

    def test_long_ones_that_cross_the_chunks_of_reading(self, file, monkeypatch):
        monkeypatch.setattr("router.lab.source._CHUNK", 7)
        prompts = ["]" * n + '"\\{' for n in range(30)]
        assert [r.text for r in read(file(json.dumps([{"prompt": p} for p in prompts])))] == prompts

    def test_not_utf8(self, tmp_path):
        (tmp_path / "t").write_bytes(b'[{"prompt": "a"},\n{"prompt": "\xff"}]')
        with pytest.raises(TraceError, match="not UTF-8 text"):
            read(tmp_path / "t")


class TestPublic:
    @pytest.mark.parametrize(
        "name, requests, tokens",
        [
            ("azure_code.csv.gz", 8_819, 18_059_974),
            ("agent_sessions.jsonl.gz", 9_796, 905_698_145),
        ],
    )
    def test_lengths(self, name, requests, tokens):
        found = read(public(name))
        assert (len(found), sum(r.num_tokens for r in found)) == (requests, tokens)

    def test_agent_sessions(self):
        found = read(public("agent_sessions.jsonl.gz"))
        assert len({r.session_id.partition("/")[0] for r in found}) == 123
        times = [r.timestamp_s for r in found]
        assert times == sorted(times)

    def test_text(self):
        calls, runs = read(public("miniswe_calls.jsonl.gz")), read(public("taubench_airline.json.gz"))
        assert (len(calls), len({r.session_id for r in calls})) == (402, 20)
        assert (len(runs), len({r.session_id for r in runs})) == (2_454, 200)

    def test_tokens(self):
        found = read(public("sharegpt_tokens.jsonl.gz"))
        assert (len(found), sum(r.num_tokens for r in found)) == (300, 257_239)
