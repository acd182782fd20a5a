import gzip
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from router.lab.errors import OptionError, TraceError
from router.lab.ideal import ideal_hits
from router.lab.rows import TraceOptions
from router.lab.traces import read_trace
from router.lab.workload import TINY, builtin_workload

CHAT = {"messages": [{"role": "user", "content": "hello"}]}
PUBLIC = Path(__file__).parents[4] / "shared" / "traces"


@pytest.fixture
def trace(tmp_path):
    def write(*rows, name="a.trace", pack=False):
        text = "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows)
        path = tmp_path / name
        path.write_bytes(gzip.compress(text.encode()) if pack else text.encode())
        return path

    return write


def rows_of(path, **options):
    return list(read_trace(path, TraceOptions(**options)))


def public(name):
    path = PUBLIC / name
    if not path.exists():
        pytest.skip("the public traces are not there")
    return path


def mooncake(timestamp, length, ids, **more):
    return {"timestamp": timestamp, "input_length": length, "output_length": 20, "hash_ids": ids, **more}


class TestOpenAIChat:
    def test_fields(self, trace):
        tools = [{"type": "function", "function": {"name": "f"}}]
        row = CHAT | {"timestamp": 5.5, "max_tokens": 7, "session_id": "s", "tools": tools}
        later = CHAT | {"timestamp": 7}
        first, second = rows_of(trace(row, "", later))
        assert first.messages == tuple(CHAT["messages"])
        assert (first.timestamp_s, first.max_tokens, first.session_id) == (0.0, 7, "s")
        assert first.tools == tuple(tools)
        assert (second.timestamp_s, second.max_tokens, second.session_id, second.tools) == (
            1.5,
            None,
            None,
            None,
        )

    def test_batch_file(self, trace):
        body = CHAT | {"model": "gpt", "max_completion_tokens": 9, "max_tokens": 3}
        row = {
            "custom_id": "1",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": body,
            "timestamp": 1,
        }
        (request,) = rows_of(trace(row))
        assert (request.messages, request.max_tokens) == (tuple(CHAT["messages"]), 9)
        assert request.timestamp_s == 0.0

    def test_prompts_of_text_and_tokens(self, trace):
        text, tokens = rows_of(trace({"prompt": "once upon"}, {"prompt": [3, 1, 4]}))
        assert text.text == "once upon"
        assert tokens.token_ids.tolist() == [3, 1, 4] and tokens.token_ids.dtype == np.int32

    def test_null_counts_as_absent(self, trace):
        (request,) = rows_of(
            trace(CHAT | {"timestamp": None, "tools": None, "max_tokens": None, "body": None})
        )
        assert (request.timestamp_s, request.tools, request.max_tokens) == (None, None, None)

    @pytest.mark.parametrize("pack", [False, True])
    def test_gzip_is_told_by_content_not_by_name(self, trace, pack):
        path = trace(CHAT, name="plain.jsonl" if pack else "packed.jsonl.gz", pack=pack)
        assert len(rows_of(path)) == 1

    def test_is_read_line_by_line(self, trace):
        requests = read_trace(trace(CHAT, "{broken"))
        assert next(requests).messages is not None
        with pytest.raises(TraceError):
            next(requests)


class TestBrokenTraces:
    @pytest.mark.parametrize(
        "line, complaint",
        [
            ("{broken", "not valid JSON"),
            ("[1, 2]", "a JSON object is expected, not [1, 2]"),
            ('{"messages": []}', "`messages` must be a list of JSON objects that is not empty, not []"),
            ('{"messages": "hi"}', '`messages` must be a list of JSON objects that is not empty, not "hi"'),
            ('{"messages": [{"content": "x"}]}', "`messages[0]` has no `role`"),
            ('{"model": "m"}', "no `messages` and no `prompt`"),
            ('{"prompt": 3}', "`prompt` must be a string, not 3"),
            ('{"prompt": [1, -1]}', "`prompt` must be a list of token ids that is not empty, not [1, -1]"),
            ('{"prompt": [true]}', "`prompt` must be a list of token ids that is not empty, not [true]"),
            ('{"prompt": "x", "max_tokens": 0}', "`max_tokens` must be a whole number of at least 1, not 0"),
            (
                '{"prompt": "x", "max_tokens": 1.5}',
                "`max_tokens` must be a whole number of at least 1, not 1.5",
            ),
            (
                '{"prompt": "x", "timestamp": "now"}',
                '`timestamp` must be a number that is not negative, not "now"',
            ),
            ('{"prompt": "x", "timestamp": NaN}', "not valid JSON (NaN is not a JSON value)"),
            ('{"prompt": "x", "timestamp": 1e999}', "`timestamp` must be a number that is not negative"),
            ('{"body": 3}', "`body` must be a JSON object, not 3"),
            ("[" * 100_000, "not valid JSON (nested too deeply)"),
        ],
    )
    def test_a_wrong_line_is_named(self, trace, line, complaint):
        path = trace(CHAT, "", line)
        with pytest.raises(TraceError) as error:
            rows_of(path)
        assert str(error.value).startswith(f"{path}, line 3: {complaint}")
        assert (error.value.path, error.value.line) == (str(path), 3)

    def test_a_broken_first_line_says_what_is_broken(self, trace):
        with pytest.raises(TraceError, match="line 1: not valid JSON"):
            rows_of(trace('{"messages": [', CHAT))

    def test_unknown_format_lists_the_known_ones(self, trace):
        with pytest.raises(
            TraceError, match=r"line 1: not .* known formats: Bailian JSONL, .*, OpenAI chat JSONL"
        ):
            rows_of(trace({"model": "m"}))
        with pytest.raises(TraceError, match=r"line 2: not .* known formats: Bailian JSONL"):
            rows_of(trace("time,size", "1,2"))

    def test_neither_json_nor_csv(self, trace):
        with pytest.raises(TraceError, match='line 2: neither JSON nor CSV: "once upon a time"'):
            rows_of(trace("", "once upon a time"))

    def test_empty(self, trace):
        with pytest.raises(TraceError, match="the trace is empty"):
            read_trace(trace("", "  ", ""))

    def test_missing(self, tmp_path):
        with pytest.raises(TraceError, match="nowhere: no such file"):
            read_trace(tmp_path / "nowhere")

    def test_a_folder(self, tmp_path):
        with pytest.raises(TraceError, match="cannot be read"):
            read_trace(tmp_path)

    def test_truncated_gzip(self, tmp_path):
        packed = gzip.compress(b"".join(json.dumps(CHAT).encode() + b"\n" for _ in range(5000)))
        (tmp_path / "t").write_bytes(packed[: len(packed) // 2])
        with pytest.raises(TraceError, match="damaged gzip file"):
            rows_of(tmp_path / "t")

    def test_corrupted_gzip(self, tmp_path):
        (tmp_path / "t").write_bytes(b"\x1f\x8b" + b"nothing that was ever packed")
        with pytest.raises(TraceError, match="damaged gzip file"):
            rows_of(tmp_path / "t")

    def test_not_utf8(self, tmp_path):
        (tmp_path / "t").write_bytes(json.dumps(CHAT).encode() + b'\n{"prompt": "\xff"}')
        with pytest.raises(TraceError, match="line 2: not UTF-8 text"):
            rows_of(tmp_path / "t")


class TestMooncake:
    def test_equal_blocks_are_equal_tokens_and_others_are_not(self, trace):
        a, b = rows_of(trace(mooncake(0, 1200, [7, 8, 9]), mooncake(1, 1100, [7, 8, 10])))
        assert (len(a.known_tokens()), len(b.known_tokens())) == (1200, 1100)
        assert ideal_hits([a.known_tokens(), b.known_tokens()]) == [0, 1024]

    def test_tokens_are_the_same_on_every_machine(self, trace):
        (request,) = rows_of(trace(mooncake(0, 512, [7])))
        assert request.known_tokens()[:6].tolist() == [12591, 14855, 5725, 23208, 8875, 2517]
        assert request.known_tokens().min() >= 1000 and request.known_tokens().max() < 30_000

    def test_seed_and_vocab_change_them(self, trace):
        path = trace(mooncake(0, 512, [7]))
        one, other = rows_of(path)[0].known_tokens(), rows_of(path, seed=1)[0].known_tokens()
        assert (one != other).mean() > 0.99
        small = rows_of(path, vocab=(10, 20))[0].known_tokens()
        assert set(small.tolist()) == set(range(10, 20))

    def test_scale_shrinks_blocks_prompts_and_answers_alike(self, trace):
        path = trace(mooncake(0, 1200, [7, 8, 9]), mooncake(1, 1100, [7, 8, 10]))
        a, b = rows_of(path, scale=1 / 16)
        assert (len(a.known_tokens()), len(b.known_tokens())) == (75, 69)
        assert ideal_hits([a.known_tokens(), b.known_tokens()]) == [0, 64]
        assert a.max_tokens == 1  # 20 / 16

    def test_tail_that_no_hash_covers_is_shared_with_nothing(self, trace):
        a, b = rows_of(trace(mooncake(0, 1200, [7, 8]), mooncake(1, 1200, [7, 8])))
        assert len(a.known_tokens()) == 1200
        assert ideal_hits([a.known_tokens(), b.known_tokens()]) == [0, 1024]

    def test_block_size_is_inferred_or_given(self, trace):
        small = trace(mooncake(0, 100, list(range(7))), mooncake(1, 33, [0, 1, 9]))
        a, b = rows_of(small)
        assert ideal_hits([a.known_tokens(), b.known_tokens()]) == [0, 32]
        given = trace(mooncake(0, 100, [0, 1, 2]), mooncake(1, 90, [0, 1, 9]))
        a, b = rows_of(given, block_size=40)
        assert ideal_hits([a.known_tokens(), b.known_tokens()]) == [0, 80]

    def test_ticks_are_spread(self, trace):
        stamps = [10_000, 10_000, 10_000, 13_000, 13_000, 20_000, 20_000]
        requests = rows_of(trace(*(mooncake(stamp, 5, [1]) for stamp in stamps)))
        assert [r.timestamp_s for r in requests] == [0, 1, 2, 3, 4.5, 10, 11.5]

    def test_rows_with_text_or_messages(self, trace):
        a, b = rows_of(
            trace({"timestamp": 0, "text_input": "hi", "output_length": 3}, {"timestamp": 9} | CHAT)
        )
        assert (a.text, a.max_tokens) == ("hi", 3)
        assert (b.messages, b.timestamp_s) == (tuple(CHAT["messages"]), 0.009)

    @pytest.mark.parametrize(
        "row, complaint",
        [
            (mooncake(0, 5000, [1, 2]), "2 hash_ids do not fit input_length 5000 by blocks of 512"),
            (mooncake(0, 0, []), "`input_length` must be a whole number of at least 1, not 0"),
            (mooncake(0, 2**31, []), "`input_length` must be below 2^31, not 2147483648"),
            (mooncake(0, 2**70, [1]), "`input_length` must be below 2^31"),
            (mooncake(0, 5, ["a"]), "`hash_ids` must be a list of whole numbers"),
            (mooncake(0, 5, {}), "`hash_ids` must be a list of whole numbers"),
            ({"timestamp": 0, "hash_ids": [1]}, "no `input_length`"),
            ({"input_length": 5, "hash_ids": [1]}, "no `timestamp`"),
        ],
    )
    def test_a_wrong_line_is_named(self, trace, row, complaint):
        with pytest.raises(TraceError, match="line 3: ") as error:
            rows_of(trace(mooncake(0, 512, [1]), mooncake(0, 600, [1, 2]), row))
        assert error.value.what.startswith(complaint)

    def test_lengths_that_fit_no_block_size(self, trace):
        with pytest.raises(TraceError, match="fit no usual block size; give it with --block-size"):
            rows_of(trace(mooncake(0, 100, list(range(50)))))


class TestBrokenLinesLeftOut:
    def test_of_chats(self, trace):
        bad = []
        path = trace("{broken", CHAT, '{"messages": []}', {"prompt": "x"})
        assert [r.text for r in read_trace(path, bad=bad.append)] == [None, "x"]
        assert [(error.path, error.line) for error in bad] == [(str(path), 1), (str(path), 3)]

    def test_of_mooncake_rows(self, trace):
        bad = []
        rows = [mooncake(0, 512, [1]), "{", mooncake(9, 512, ["a"]), mooncake(9, 5000, [1])]
        path = trace(*rows, mooncake(9, -1, [1]), mooncake(3000, 600, [1, 2]))
        requests = list(read_trace(path, bad=bad.append))
        assert [(len(r.known_tokens()), r.timestamp_s) for r in requests] == [(512, 0.0), (600, 3.0)]
        assert sorted(error.line for error in bad) == [2, 3, 4, 5]

    def test_that_are_not_text(self, tmp_path):
        bad = []
        (tmp_path / "t").write_bytes(b'\xff\n{"prompt": "x"}\n\xff')
        assert [r.text for r in read_trace(tmp_path / "t", bad=bad.append)] == ["x"]
        assert [(error.line, error.what[:14]) for error in bad] == [
            (1, "not UTF-8 text"),
            (3, "not UTF-8 text"),
        ]

    def test_may_not_be_all(self, trace):
        with pytest.raises(TraceError, match="the trace is empty"):
            read_trace(trace("{", "{"), bad=lambda error: None)


class TestPublicTraces:
    def test_mooncake_conversation(self):
        requests = rows_of(public("mooncake_conversation.jsonl.gz"), scale=1 / 64)
        prompts = [request.known_tokens() for request in requests]
        assert len(requests) == 12_031
        assert round(sum(ideal_hits(prompts)) / sum(map(len, prompts)), 3) == 0.374
        times = [request.timestamp_s for request in requests]
        assert times == sorted(times) and times[1] == pytest.approx(0.3)

    def test_mooncake_lengths_are_exact(self):
        path = public("mooncake_conversation.jsonl.gz")
        first = list(itertools.islice(read_trace(path), 3))
        assert [len(r.known_tokens()) for r in first] == [6758, 7322, 7236]
        assert ideal_hits([r.known_tokens() for r in first]) == [0, 512, 512]


def test_builtin():
    assert len(list(read_trace("builtin"))) == 91
    assert [r.messages for r in read_trace("builtin:tiny")] == [r.messages for r in builtin_workload(TINY)]


def test_an_unknown_builtin_names_the_known_ones():
    with pytest.raises(TraceError, match=r"builtin:huge: no such .*; there are: builtin, builtin:tiny$"):
        read_trace("builtin:huge")


def test_a_file_named_builtin_is_reached_by_path(trace, monkeypatch):
    path = trace(CHAT, name="builtin")
    monkeypatch.chdir(path.parent)
    assert len(list(read_trace("./builtin"))) == 1


@pytest.mark.parametrize(
    "options",
    [{"scale": 0}, {"scale": -1}, {"scale": float("nan")}, {"scale": float("inf")}, {"block_size": 0},
     {"vocab": (5, 5)}, {"vocab": (-1, 5)}, {"vocab": (0, 2**32)}],
)  # fmt: skip
def test_options_that_cannot_work(options):
    with pytest.raises(OptionError):
        TraceOptions(**options)
