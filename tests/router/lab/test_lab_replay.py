import asyncio
import re

import numpy as np
import pytest

from router.lab.client import Sampling, Target, sse_data
from router.lab.errors import TargetError
from router.lab.record import Request
from router.lab.replay import ReplayOptions, replay
from router.lab.report import JSON_KEYS
from router.lab.traces import read_trace


def chat(content, **more):
    return Request(messages=({"role": "user", "content": content},), max_tokens=3, **more)


def run(endpoint, requests, progress=None, stop=None, target=None, **options):
    options = ReplayOptions(**({"timeout_s": 5.0} | options))
    return asyncio.run(replay(requests, target or Target(endpoint.url), options, progress, stop))


def run_until(ends, endpoint, requests, **options):
    """Run, and stop when so many requests have ended."""

    async def scenario():
        stop = asyncio.Event()

        def progress(ended, total, failed):
            if ended == ends:
                stop.set()

        return await replay(requests, Target(endpoint.url), ReplayOptions(**options), progress, stop)

    return asyncio.run(scenario())


class TestWhatIsSent:
    def test_bodies(self, endpoint):
        tools = ({"type": "function", "function": {"name": "f"}},)
        requests = [
            Request(messages=({"role": "user", "content": "hi"},), tools=tools),
            Request(text="once", max_tokens=2),
            Request(token_ids=np.array([65, 66], np.int32), max_tokens=2),
        ]
        report = run(endpoint, requests, concurrency=1, sampling=Sampling(4, 0.5, ignore_eos=True))
        common = {"model": "tiny", "temperature": 0.5, "stream": True, "ignore_eos": True}
        common["stream_options"] = {"include_usage": True}
        assert endpoint.paths == ["/v1/chat/completions", "/v1/completions", "/v1/completions"]
        assert endpoint.bodies == [
            common | {"max_tokens": 4, "messages": [{"role": "user", "content": "hi"}], "tools": list(tools)},
            common | {"max_tokens": 2, "prompt": "once"},
            common | {"max_tokens": 2, "prompt": [65, 66]},
        ]
        assert report.errors == {}

    def test_ignore_eos_is_not_sent_unasked(self, endpoint):
        run(endpoint, [chat("a")])
        assert "ignore_eos" not in endpoint.bodies[0]

    @pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
    def test_url_with_or_without_v1(self, endpoint, suffix):
        assert run(endpoint, [chat("a")], target=Target(endpoint.url + suffix)).errors == {}

    @pytest.mark.parametrize("key", ["secret", "gehöört"])
    def test_key_and_model(self, endpoint, key):
        endpoint.api_key = key
        report = run(endpoint, [chat("a")], target=Target(endpoint.url, "tiny", key))
        assert report.errors == {}
        assert endpoint.bodies[0]["model"] == "tiny"

    def test_a_model_that_is_not_served_is_said_before_anything_is_sent(self, endpoint):
        with pytest.raises(TargetError, match="serves tiny, not other"):
            run(endpoint, [chat("a")], target=Target(endpoint.url, "other"))
        assert endpoint.bodies == []

    def test_lone_surrogates_reach_the_endpoint_as_escapes(self, endpoint):
        endpoint.fault = lambda body, number: "400"  # what becomes of them is the endpoint's decision
        run(endpoint, [Request(text="a\ud800", max_tokens=1)])
        assert endpoint.bodies[0]["prompt"] == "a\ud800"

    def test_limit(self, endpoint):
        report = run(endpoint, (chat(str(n)) for n in range(10)), limit=3, concurrency=1)
        assert report.requests == len(endpoint.bodies) == 3


class TestFigures:
    def test_builtin_workload(self, endpoint):
        """The endpoint is an infinite cache itself, so hit rate and ideal hit rate agree."""
        endpoint.models = {"data": [{"id": "tiny"}]}
        requests = list(read_trace("builtin:tiny"))
        report = run(endpoint, requests, concurrency=1, policy="p")
        assert report.requests == len(requests) == 10
        assert report.errors == {}
        assert report.hit_rate == report.ideal_hit_rate > 0.2
        assert report.cached_tokens == round(report.hit_rate * report.prompt_tokens)
        assert report.requests_per_replica == {"replica-0": 5, "replica-1": 5}
        assert (report.policy, report.interrupted) == ("p", False)
        for summary in (report.ttft_ms, report.tpot_ms, report.e2e_ms):
            assert summary.mean > 0 and 0 < summary.p50 <= summary.p90 <= summary.p99
        assert report.ttft_ms.mean < report.e2e_ms.mean < 1000 * report.duration_s
        assert tuple(report.as_json()) == JSON_KEYS

    def test_tokens_are_asked_for_after_the_timed_part_as_they_were_sent(self, endpoint):
        run(endpoint, [chat("a"), Request(text="b", max_tokens=1)], concurrency=1)
        message = {"role": "user", "content": "a"}
        assert sorted(endpoint.tokenized, key=len) == [
            {"model": "tiny", "prompt": "b"},
            {"model": "tiny", "messages": [message], "add_generation_prompt": True},
        ]

    def test_known_tokens_are_not_asked_for(self, endpoint):
        tokens = np.arange(1, 101, dtype=np.int32)
        requests = [Request(token_ids=tokens, max_tokens=1), Request(token_ids=tokens[:60], max_tokens=1)]
        report = run(endpoint, requests, concurrency=1)
        assert endpoint.tokenized == []
        assert report.ideal_hit_rate == 59 / 160 == report.hit_rate

    def test_without_tokenize_the_bytes_stand_in(self, endpoint):
        endpoint.tokenizes = False
        shared = "the same long beginning of a prompt, word for word, " * 4
        requests = [Request(text=shared + end, max_tokens=1) for end in ("one", "two", "three")]
        report = run(endpoint, requests, concurrency=1)
        assert report.ideal_hit_rate == pytest.approx(report.hit_rate, abs=1e-9)  # a token is a byte here

    def test_estimate_of_chats_is_close(self, endpoint):
        endpoint.tokenizes = False
        endpoint.models = {"data": [{"id": "tiny"}]}
        report = run(endpoint, read_trace("builtin:tiny"), concurrency=1)
        assert report.ideal_hit_rate == pytest.approx(report.hit_rate, abs=0.02)

    def test_tokenize_that_answers_nonsense_is_not_believed(self, endpoint):
        endpoint.tokens_answer = {"tokens": "many"}
        report = run(endpoint, [chat("a"), chat("a")], concurrency=1)
        assert report.ideal_hit_rate == pytest.approx(0.5, abs=0.1)

    def test_usage_that_is_missing(self, endpoint):
        endpoint.usage = False
        report = run(endpoint, [chat("a")])
        assert (report.prompt_tokens, report.cached_tokens, report.hit_rate, report.ideal_hit_rate) == (
            0, None, None, None,
        )  # fmt: skip
        assert report.tpot_ms.mean > 0

    def test_cached_tokens_that_are_never_reported(self, endpoint):
        endpoint.report_cached = False
        report = run(endpoint, [chat("a"), chat("a")], concurrency=1)
        assert report.hit_rate is None
        assert report.ideal_hit_rate == pytest.approx((report.prompt_tokens / 2 - 1) / report.prompt_tokens)

    def test_progress(self, endpoint):
        seen = []
        endpoint.fault = lambda body, number: "500" if number == 1 else ""
        run(endpoint, [chat("a")] * 3, lambda *counts: seen.append(counts), concurrency=1)
        assert seen == [(0, 3, 0), (1, 3, 0), (2, 3, 1), (3, 3, 1)]


class TestLoops:
    def test_closed_loop_keeps_exactly_so_many_in_flight(self, endpoint):
        endpoint.fault = lambda body, number: "hang" if number < 3 else ""
        report = run_until(27, endpoint, [chat(str(n)) for n in range(30)], concurrency=4)
        assert endpoint.most_in_flight == 4
        assert (report.requests, report.errors) == (30, {"interrupted": 3})

    @pytest.mark.parametrize("how", [{"concurrency": 6}, {"speed": 1000.0}])
    def test_turns_of_a_session_never_overlap(self, endpoint, how):
        current = {}

        def check(body, number):
            session, turn = re.fullmatch(r"(\w) turn (\d+)", body["messages"][0]["content"]).groups()
            before, previous = current.get(session, (-1, None))
            overlap = previous in endpoint.in_flight or int(turn) != before + 1
            current[session] = (int(turn), number)
            return "418" if overlap else ""

        endpoint.fault = check
        requests = [
            chat(f"{session} turn {turn}", session_id=session, timestamp_s=float(turn))
            for turn in range(8)
            for session in "abcde"
        ]
        report = run(endpoint, requests, **how)
        assert report.errors == {}
        assert {turn for turn, _ in current.values()} == {7}

    def test_a_failed_turn_does_not_end_its_session(self, endpoint):
        endpoint.fault = lambda body, number: "500" if number == 0 else ""
        report = run(endpoint, [chat(str(n), session_id="s") for n in range(3)], concurrency=3)
        assert (report.requests, report.errors) == (3, {"http_500": 1})

    def test_open_loop_follows_the_clock(self, endpoint):
        stamps = [0.0, 3.0, 6.0, 1.0]  # not sorted: the clock decides
        report = run(endpoint, [chat(f"at {s}", timestamp_s=s) for s in stamps], speed=30.0)
        assert [body["messages"][0]["content"] for body in endpoint.bodies] == [
            "at 0.0",
            "at 1.0",
            "at 3.0",
            "at 6.0",
        ]
        assert report.duration_s >= 6.0 / 30.0

    def test_a_turn_with_a_think_time_starts_that_long_after_the_one_before_it(self, endpoint):
        turns = [
            chat("first", timestamp_s=0.0, session_id="a"),
            chat("second", think_s=6.0, session_id="a"),  # whenever the first ends: it needs no timestamp
            chat("other", timestamp_s=1.0, session_id="b"),
        ]
        report = run(endpoint, turns, speed=30.0)
        asked = [body["messages"][0]["content"] for body in endpoint.bodies]
        assert asked == ["first", "other", "second"]
        assert report.duration_s >= 6.0 / 30.0

    def test_open_loop_waits_for_nobody(self, endpoint):
        endpoint.fault = lambda body, number: "hang" if number < 3 else ""
        report = run_until(1, endpoint, [chat(str(n), timestamp_s=n / 1000) for n in range(4)], speed=1.0)
        assert (report.requests, report.errors) == (4, {"interrupted": 3})


class TestFaults:
    @pytest.mark.parametrize(
        "fault, kind, detail",
        [
            ("500", "http_500", "answered 500"),
            ("429", "http_429", "answered 429"),
            ("hang", "timeout", "no end within 1 s"),
            ("break", "disconnected", "the stream ended before the answer did"),
            ("error_event", "stream_error", "the replica died"),
            ("garbage", "protocol", "an event that is not JSON"),
        ],
    )
    def test_each_is_counted_under_its_kind(self, endpoint, fault, kind, detail):
        endpoint.fault = lambda body, number: fault if number == 1 else ""
        report = run(endpoint, [chat(str(n)) for n in range(3)], concurrency=1, timeout_s=1.0)
        assert (report.requests, report.errors) == (3, {kind: 1})
        assert (
            len(report.notes) == 1 and report.notes[0].startswith(f"{kind}: ") and detail in report.notes[0]
        )
        assert not report.failed_entirely

    def test_all_failed(self, endpoint):
        endpoint.fault = lambda body, number: "503"
        report = run(endpoint, [chat("a")] * 4)
        assert report.failed_entirely
        assert report.errors == {"http_503": 4}

    def test_what_no_client_foresaw_fails_its_request_only(self, endpoint, caplog):
        odd = Request(text="odd", max_tokens=float("nan"))
        report = run(endpoint, [chat("a"), odd, chat("b")], concurrency=1)
        assert (report.requests, report.errors) == (3, {"unexpected": 1})
        assert report.notes[0].startswith("unexpected: ValueError(")
        assert "request 1: unexpected error" in caplog.text

    def test_an_endpoint_that_goes_away_leaves_a_report(self):
        """After the first answer nobody listens any more."""
        models = b'{"data": [{"id": "m"}]}'
        end = b'{"choices": [{"text": "x", "finish_reason": "stop"}], "usage": {"prompt_tokens": 9}}'

        async def answer(reader, writer):
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"POST"):
                server.close()
            body = models if head.startswith(b"GET") else b"data: %s\n\ndata: [DONE]\n\n" % end
            writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + body)
            await writer.drain()
            writer.close()

        async def scenario():
            nonlocal server
            server = await asyncio.start_server(answer, "127.0.0.1", 0)
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            return await replay([chat(str(n)) for n in range(3)], Target(url), ReplayOptions(concurrency=1))

        server = None
        report = asyncio.run(scenario())
        assert (report.requests, report.errors, report.prompt_tokens) == (3, {"connect": 2}, 9)

    def test_a_connection_cut_in_the_middle(self, endpoint):
        """Headers promise more than the server sends before it closes the socket."""

        async def cut(reader, writer):
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"GET"):
                body = b'{"data": [{"id": "m"}]}'
                writer.write(
                    b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body
                )
            else:
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\ndata: {}\n\n")
            await writer.drain()
            writer.close()

        async def scenario():
            async with await asyncio.start_server(cut, "127.0.0.1", 0) as server:
                url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
                return await replay([chat("a")], Target(url), ReplayOptions(timeout_s=5.0))

        assert asyncio.run(scenario()).errors == {"disconnected": 1}

    def test_prompts_over_the_context_are_counted_not_sent(self, endpoint):
        prompts = [Request(token_ids=np.arange(n, dtype=np.int32), max_tokens=3) for n in (997, 998)]
        report = run(endpoint, prompts)
        assert (report.requests, report.errors, len(endpoint.bodies)) == (2, {"over_context": 1}, 1)
        report = run(endpoint, prompts, context_length=100)
        assert (report.requests, report.errors, report.failed_entirely) == (2, {"over_context": 2}, True)
        assert report.duration_s == 0.0


class TestEvents:
    @staticmethod
    def parse(*chunks):
        async def scenario():
            async def source():
                for chunk in chunks:
                    yield chunk

            return [data async for data in sse_data(source())]

        return asyncio.run(scenario())

    def test_events(self):
        stream = b": a comment\r\ndata: one\r\n\r\nevent: x\ndata:two\ndata: lines\n\n\n\ndata: cut off"
        assert self.parse(stream) == ["one", "two\nlines"]
        assert self.parse(*(bytes([byte]) for byte in stream)) == ["one", "two\nlines"]

    def test_line_separators_of_unicode_are_text(self):
        assert self.parse("data: a\u2028b\x85c\n\n".encode()) == ["a\u2028b\x85c"]
