"""A replica's process killed with SIGKILL under load."""

import asyncio
import json
import os
import signal
import uuid
from dataclasses import dataclass, field

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


def pid_of(replica_id: str) -> int:
    import ray

    actors = ray.util.list_named_actors(all_namespaces=True)
    found = next(a for a in actors if a["name"].endswith(f"#{replica_id}"))
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
        os.kill(await loop.run_in_executor(None, pid_of, victim), signal.SIGKILL)
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
