"""`ray up cluster.yaml` on three hosts, from installation to `ray down`. The tests go on from each other."""

import subprocess
from concurrent.futures import ThreadPoolExecutor

import httpx

ROUTER = "ray::ServeReplica:warmroute:Router"


def ask(url: str) -> httpx.Response:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"model": "smollm2-135m", "max_tokens": 8, "temperature": 0, "messages": messages}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)


def test_the_router_is_on_the_head_and_a_replica_on_each_worker(cluster) -> None:
    assert [cluster.replicas(host) for host in (cluster.head, *cluster.workers)] == [0, 1, 1]
    assert [cluster.processes(host).count(ROUTER) for host in (cluster.head, *cluster.workers)] == [1, 0, 0]
    assert any("haproxy -dS" in line for line in cluster.processes(cluster.head))


def test_the_endpoint_listens_on_loopback_only(cluster) -> None:
    listening = {line.split()[3] for line in cluster.on(cluster.head, "ss -Hltn").splitlines()}
    assert {"127.0.0.1:8000", "127.0.0.1:30000", "127.0.0.1:8265"} <= listening


def test_a_chat(cluster) -> None:
    with cluster.endpoint() as url:
        answer = ask(url)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == "The capital of France is Paris."


def test_a_replay_reaches_both_workers(cluster) -> None:
    with cluster.endpoint() as url:
        status, report = cluster.replay(url, "builtin:tiny", "--concurrency", "4")
    assert (status, report["errors"], report["requests"]) == (0, {}, 10)
    assert len(report["requests_per_replica"]) == 2


def test_requests_go_on_when_a_worker_dies_and_it_comes_back(cluster) -> None:
    lost, survivor = cluster.workers[1], cluster.workers[0]
    with cluster.endpoint() as url, ThreadPoolExecutor() as pool:
        running = pool.submit(cluster.replay, url, "builtin", "--limit", "30", "--concurrency", "4")
        cluster.wait_for(lambda: _inflight(url) == 4, 60, "requests in flight")
        cluster.on(lost, "ray stop --force")
        answers = [ask(url) for _ in range(3)]
        _, report = running.result()
    assert [answer.status_code for answer in answers] == [200] * 3
    assert len({answer.headers["x-warmroute-replica"] for answer in answers}) == 1
    assert report["requests"] == 30
    # Streams that had begun there end with an error; nothing else does.
    assert set(report["errors"]) <= {"stream_error"} and sum(report["errors"].values()) <= 4
    assert cluster.replicas(survivor) == 1
    cluster.wait_for(lambda: cluster.replicas(lost) == 1, 300, "Ray's autoscaler to start the worker again")


def _inflight(url: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("warmroute_replica_inflight{"))


def test_ray_down_ends_everything(cluster) -> None:
    cluster.ray("down", "-y", "cluster.yaml")
    cluster.wait_for(lambda: cluster.processes(cluster.head) == [], 60, "the head to end")
    for worker in cluster.workers:  # `ray down` of the local provider reaches the head only
        subprocess.run([*cluster.ssh(worker), "warmroute-env/bin/ray", "stop"], check=True, timeout=60)
        assert cluster.processes(worker) == []
