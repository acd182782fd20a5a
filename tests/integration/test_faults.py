"""Processes killed or stopped under load: a replica by SIGKILL and by SIGSTOP, the router by SIGKILL."""

import asyncio
import json
import os
import signal
import time
import uuid
from dataclasses import dataclass, field
from functools import partial

import httpx
import pytest

MODEL = "smollm2-135m"
pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.slow]


@dataclass
class Outcome:
    """What a client saw of one streamed request."""

    replica: str = ""
    tokens: int = 0
    error: dict | None = None
    done: bool = False
    started: asyncio.Event = field(default_factory=asyncio.Event)


def pid_of(part: str) -> int:
    """The process of the Serve actor with this in its name: `#ID` of a replica, `#Router#` of the router."""
    import ray

    actors = ray.util.list_named_actors(all_namespaces=True)
    found = next(a for a in actors if part in a["name"])
    actor = ray.get_actor(found["name"], namespace=found["namespace"])
    return ray.get(actor.__ray_call__.remote(lambda _self: os.getpid()), timeout=30)


async def stream(http, prompt: str, max_tokens: int, outcome: Outcome) -> Outcome:
    request = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    async with http.stream("POST", "/v1/completions", json=request) as answer:
        assert answer.status_code == 200, await answer.aread()
        outcome.replica = answer.headers["x-warmroute-replica"]
        outcome.started.set()
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                outcome.done = True
            elif line.startswith("data: "):
                event = json.loads(line[6:])
                outcome.error = event.get("error", outcome.error)
                outcome.tokens += len(event.get("choices", []))
    return outcome


def words(count: int) -> str:
    return f"{uuid.uuid4()} " + " ".join(str(i) for i in range(count))


async def run_and_kill(endpoint) -> tuple[str, list[Outcome], list[Outcome]]:
    """Eight requests stream; six more wait for their prefill; then one replica dies."""
    loop = asyncio.get_running_loop()
    async with endpoint.async_client() as http:
        streaming = [Outcome() for _ in range(8)]
        tasks = [asyncio.create_task(stream(http, words(10), 150, o)) for o in streaming]
        await asyncio.wait_for(asyncio.gather(*(o.started.wait() for o in streaming)), 60)
        waiting = [Outcome() for _ in range(6)]
        tasks += [asyncio.create_task(stream(http, words(250), 4, o)) for o in waiting]
        await asyncio.sleep(0.4)  # placed, but two replicas cannot have prefilled six such prompts
        victim = streaming[0].replica
        os.kill(await loop.run_in_executor(None, pid_of, f"#{victim}"), signal.SIGKILL)
        gone = await loop.run_in_executor(
            None, endpoint.wait_for, lambda: victim not in endpoint.replicas(), 5, "the victim is forgotten"
        )
        assert gone < 1.5
        await asyncio.wait_for(asyncio.gather(*tasks), 200)
    return victim, streaming, waiting


def test_sigkill_is_unseen_before_the_first_token_and_clean_after_it(endpoint) -> None:
    assert len(endpoint.replicas()) == 2
    victim, streaming, waiting = asyncio.run(run_and_kill(endpoint))
    hit = [o for o in streaming if o.replica == victim]
    spared = [o for o in streaming if o.replica != victim]
    assert hit and spared
    for outcome in hit:
        assert outcome.error is not None and outcome.error["message"]
    assert all(o.done and o.error is None and o.tokens >= 1 for o in spared)
    assert all(o.done and o.error is None for o in waiting)
    endpoint.wait_for(lambda: len(endpoint.replicas()) == 2, 90, "Serve replaced the replica")
    assert victim not in endpoint.replicas()
    gauges = endpoint.metrics()
    for name in ("warmroute_replica_inflight", "warmroute_replica_queued_tokens"):
        assert set(gauges[name].values()) == {0.0}


def test_the_endpoint_serves_on_with_the_new_replica(endpoint) -> None:
    with endpoint.client() as http:
        for _ in range(4):
            request = {"model": MODEL, "prompt": words(5), "max_tokens": 2}
            assert http.post("/v1/completions", json=request).status_code == 200


async def whole(http, prompt: str, max_tokens: int) -> httpx.Response:
    request = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    return await http.post("/v1/completions", json=request)


def idle(endpoint) -> bool:
    """Nothing of this router is anywhere, and by the replicas' own reports they hold nothing of anybody."""
    gauges = endpoint.metrics()
    names = ("inflight", "queued_tokens", "running_tokens", "held_blocks")
    values = [gauges.get(f"warmroute_replica_{name}", {}) for name in names]
    return all(len(found) == 2 and not any(found.values()) for found in values)


def inflight(endpoint, replica: str | None = None) -> float:
    """Requests of this router at one replica, or at all."""
    found = endpoint.metrics()["warmroute_replica_inflight"]
    return sum(found.values()) if replica is None else found.get(replica, 0)


async def run_and_stop(endpoint) -> tuple[str, list[Outcome], list[Outcome], list[httpx.Response]]:
    """Streams run at both replicas; one is stopped; more requests come before the router knows of that."""
    loop = asyncio.get_running_loop()
    async with endpoint.async_client() as http:
        streaming = [Outcome() for _ in range(4)]
        tasks = [asyncio.create_task(stream(http, words(10), 200, o)) for o in streaming]
        await asyncio.wait_for(asyncio.gather(*(o.started.wait() for o in streaming)), 60)
        victim = streaming[0].replica
        pid = await loop.run_in_executor(None, pid_of, f"#{victim}")
        os.kill(pid, signal.SIGSTOP)
        try:
            waiting = [Outcome() for _ in range(4)]
            tasks += [asyncio.create_task(stream(http, words(20), 4, o)) for o in waiting]
            wholes = [asyncio.create_task(whole(http, words(20), 4)) for _ in range(4)]
            running = sum(o.replica == victim for o in streaming)
            more = partial(inflight, endpoint, victim)
            await loop.run_in_executor(
                None, endpoint.wait_for, lambda: more() > running, 5, "others are placed there"
            )
            await asyncio.wait_for(asyncio.gather(*tasks, *wholes), 90)
            stopped = endpoint.replicas()
        finally:
            os.kill(pid, signal.SIGCONT)
    assert stopped == {o.replica for o in streaming} - {victim}
    return victim, streaming, waiting, [task.result() for task in wholes]


def test_a_replica_that_hangs_is_given_up_and_its_requests_go_elsewhere(endpoint) -> None:
    endpoint.wait_for(lambda: idle(endpoint), 60, "idle before the test")
    victim, streaming, waiting, wholes = asyncio.run(run_and_stop(endpoint))
    hit = [o for o in streaming if o.replica == victim]
    assert 0 < len(hit) < len(streaming)
    for outcome in hit:
        assert (outcome.error or {}).get("code") == "replica_lost"
        assert not outcome.done
    for outcome in [*waiting, *(o for o in streaming if o.replica != victim)]:
        assert outcome.done and outcome.error is None
    assert {o.replica for o in waiting} == {o.replica for o in streaming} - {victim}
    assert [answer.status_code for answer in wholes] == [200] * 4
    # It goes on, drops what was given up, and joins again; or Serve has replaced it meanwhile.
    endpoint.wait_for(lambda: idle(endpoint), 120, "two idle replicas")


def test_the_router_killed(endpoint) -> None:
    endpoint.wait_for(lambda: idle(endpoint), 60, "idle before the test")
    before, prompt = endpoint.replicas(), words(100)
    with endpoint.client() as http:
        warm = http.post("/v1/completions", json={"model": MODEL, "prompt": prompt, "max_tokens": 1})
    broken = asyncio.run(run_and_kill_the_router(endpoint))
    assert len(broken) == 6
    endpoint.wait_for(lambda: healthy(endpoint), 90, "Serve replaced the router")
    assert endpoint.replicas() == before
    # What the old one had sent ends too: cancelled or computed to its end.
    endpoint.wait_for(lambda: idle(endpoint), 60, "both replicas idle")
    # The new router knows by snapshot what the replicas hold; while one is busy, the other may be cheaper.
    with endpoint.client() as http:
        again = http.post("/v1/completions", json={"model": MODEL, "prompt": prompt, "max_tokens": 1})
    tokens = again.json()["usage"]["prompt_tokens"]
    assert int(again.headers["x-warmroute-predicted-tokens"]) >= (tokens - 1) // 16 * 16
    assert again.headers["x-warmroute-replica"] == warm.headers["x-warmroute-replica"]


async def run_and_kill_the_router(endpoint) -> list[str]:
    """What the clients of four streams and two whole answers saw when the router died."""
    loop = asyncio.get_running_loop()
    pid = await loop.run_in_executor(None, pid_of, "#Router#")
    async with endpoint.async_client() as http:
        streaming = [Outcome() for _ in range(4)]
        tasks = [asyncio.create_task(stream(http, words(10), 150, o)) for o in streaming]
        await asyncio.wait_for(asyncio.gather(*(o.started.wait() for o in streaming)), 60)
        wholes = [asyncio.create_task(whole(http, words(10), 150)) for _ in range(2)]
        await loop.run_in_executor(
            None, endpoint.wait_for, lambda: inflight(endpoint) == 6, 10, "all six are placed"
        )
        os.kill(pid, signal.SIGKILL)
        killed_at = time.monotonic()
        ended = await asyncio.wait_for(asyncio.gather(*tasks, *wholes, return_exceptions=True), 60)
        assert time.monotonic() - killed_at < 5
    assert not any(o.done for o in streaming)
    for answer in ended[4:]:
        assert isinstance(answer, httpx.HTTPError) or answer.json()["error"]["code"] == "router_lost"
    assert all(isinstance(error, httpx.HTTPError) for error in ended[:4])
    return [repr(end) for end in ended]


def healthy(endpoint) -> bool:
    try:
        return httpx.get(f"{endpoint.url}/health", timeout=5).json().get("replicas") == 2
    except (httpx.HTTPError, ValueError):
        return False
