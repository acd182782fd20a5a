"""What is said before anything is sent: endpoints that cannot be used, options that cannot work."""

import asyncio

import pytest

from router.lab.client import Sampling, Target
from router.lab.errors import OptionError, TargetError, TraceError
from router.lab.record import Request
from router.lab.replay import ReplayOptions, replay


def chat(content, **more):
    return Request(messages=({"role": "user", "content": content},), max_tokens=3, **more)


def run(endpoint, requests, target=None, **options):
    options = ReplayOptions(**({"timeout_s": 5.0} | options))
    return asyncio.run(replay(requests, target or Target(endpoint.url), options))


class TestTargets:
    @pytest.mark.parametrize(
        "status, complaint",
        [
            (401, "API key was refused"),
            (403, "API key was refused"),
            (404, "is this the base URL"),
            (500, "answered 500"),
        ],
    )
    def test_an_endpoint_that_says_no(self, endpoint, status, complaint):
        endpoint.models_status = status
        with pytest.raises(TargetError, match=complaint):
            run(endpoint, [chat("a")])
        assert endpoint.bodies == []

    def test_wrong_key(self, endpoint):
        endpoint.api_key = "secret"
        with pytest.raises(TargetError, match="API key was refused"):
            run(endpoint, [chat("a")], target=Target(endpoint.url, api_key="wrong"))

    @pytest.mark.parametrize(
        "answer", [{"data": []}, {"data": 3}, {"models": []}, [], {"data": [{"name": "x"}]}]
    )
    def test_an_endpoint_that_lists_no_models(self, endpoint, answer):
        endpoint.models = answer
        with pytest.raises(
            TargetError, match=r"lists no model|does not answer as an OpenAI-compatible endpoint"
        ):
            run(endpoint, [chat("a")])

    def test_a_named_model_needs_no_list(self, endpoint):
        endpoint.models_status = 404
        assert run(endpoint, [chat("a")], target=Target(endpoint.url, "mine")).errors == {}

    def test_nobody_listens(self, unused_tcp_port):
        with pytest.raises(TargetError, match=r"cannot reach http://127.0.0.1"):
            asyncio.run(replay([chat("a")], Target(f"http://127.0.0.1:{unused_tcp_port}")))

    @pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", ""])
    def test_no_url(self, url):
        with pytest.raises(OptionError, match="must begin with http"):
            asyncio.run(replay([chat("a")], Target(url)))

    def test_a_key_that_no_header_can_carry(self):
        with pytest.raises(OptionError, match="API key"):
            asyncio.run(replay([chat("a")], Target("http://x", api_key="käse\n")))


class TestOptions:
    @pytest.mark.parametrize(
        "options",
        [{"speed": 1.0, "concurrency": 2}, {"concurrency": 0}, {"speed": 0.0}, {"speed": float("nan")},
         {"limit": 0}, {"timeout_s": -1.0}, {"context_length": 0}, {"sampling": Sampling(max_tokens=0)}],
    )  # fmt: skip
    def test_that_cannot_work(self, options):
        with pytest.raises(OptionError):
            ReplayOptions(**options)

    def test_speed_needs_timestamps(self, endpoint):
        with pytest.raises(OptionError, match="without timestamps"):
            run(endpoint, [chat("a", timestamp_s=0.0), chat("b")], speed=1.0)

    def test_nothing_to_replay(self, endpoint):
        with pytest.raises(TraceError, match="no request"):
            run(endpoint, [])


class TestStopping:
    def test_stop_reports_what_was_sent(self, endpoint):
        endpoint.fault = lambda body, number: "hang" if number >= 2 else ""

        async def scenario():
            stop = asyncio.Event()

            def progress(ended, total, failed):
                if ended == 2:
                    stop.set()

            requests = [chat(str(n)) for n in range(20)]
            options = ReplayOptions(concurrency=1, timeout_s=30.0)
            report = await replay(requests, Target(endpoint.url), options, progress, stop)
            return report, asyncio.all_tasks()

        report, tasks = asyncio.run(scenario())
        assert report.interrupted
        assert report.requests == 2 + report.errors.get("interrupted", 0)
        assert report.prompt_tokens > 0 and report.ideal_hit_rate is not None
        assert len(tasks) == 1

    def test_stop_while_all_hang(self, endpoint):
        endpoint.fault = lambda body, number: "hang"

        async def scenario():
            stop = asyncio.Event()
            options = ReplayOptions(concurrency=3, timeout_s=30.0)
            running = asyncio.create_task(replay([chat("a")] * 9, Target(endpoint.url), options, None, stop))
            await asyncio.to_thread(endpoint.hanging.wait, 5)
            stop.set()
            return await running

        report = asyncio.run(scenario())
        assert (report.requests, report.errors, report.interrupted) == (3, {"interrupted": 3}, True)

    def test_cancelling_leaves_no_task_behind(self, endpoint):
        endpoint.fault = lambda body, number: "hang"

        async def scenario():
            running = asyncio.create_task(
                replay([chat("a")] * 9, Target(endpoint.url), ReplayOptions(concurrency=3))
            )
            await asyncio.to_thread(endpoint.hanging.wait, 5)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            return asyncio.all_tasks()

        assert len(asyncio.run(scenario())) == 1
