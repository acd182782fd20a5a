"""One Ray, one deployment of the real model, shared by all integration tests."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import httpx
import pytest

MODEL = "smollm2-135m"
NUM_BLOCKS = 1024
KEYS = {"key-of-a": "tenant-a", "key-of-b": "tenant-b"}
SAMPLE = re.compile(r"^(?P<name>[a-z_0-9]+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)$")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass
class Endpoint:
    """The running endpoint, and what its /metrics say."""

    url: str
    key: str = "key-of-a"
    num_blocks: int = NUM_BLOCKS
    headers: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self.headers = {"authorization": f"Bearer {self.key}"}

    def client(self, **options) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers=self.headers, timeout=120, **options)

    def async_client(self, **options) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, headers=self.headers, timeout=240, **options)

    def metrics(self) -> dict[str, dict[str, float]]:
        """Gauges with a `replica` label: name -> replica -> value."""
        found: dict[str, dict[str, float]] = {}
        for line in httpx.get(f"{self.url}/metrics", headers=self.headers).text.splitlines():
            if match := SAMPLE.match(line):
                labels = dict(LABEL.findall(match["labels"] or ""))
                if "replica" in labels:
                    found.setdefault(match["name"], {})[labels["replica"]] = float(match["value"])
        return found

    wait_for = staticmethod(lambda condition, timeout_s, what: wait_for(condition, timeout_s, what))

    def replicas(self) -> set[str]:
        return set(self.metrics().get("warmroute_replica_inflight", {}))


def wait_for(condition: Callable[[], object], timeout_s: float, what: str) -> float:
    """Poll until the condition holds; returns the seconds it took."""
    started = time.monotonic()
    while time.monotonic() - started < timeout_s:
        if condition():
            return time.monotonic() - started
        time.sleep(0.05)
    raise AssertionError(f"not within {timeout_s} s: {what}")


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    from router.cli.cluster import local_ray

    with local_ray(cpus=4):
        yield


@pytest.fixture(scope="session")
def endpoint(ray_cluster: None) -> Iterator[Endpoint]:
    """Two replicas of SmolLM2-135M behind one router, with two tenants."""
    import hashlib

    from router.cli.cluster import deployed, free_port
    from router.config import AppConfig

    config = AppConfig(
        model=MODEL,
        replicas=2,
        api_keys={hashlib.sha256(key.encode()).hexdigest(): tenant for key, tenant in KEYS.items()},
        admin_key=hashlib.sha256(b"key-of-the-operator").hexdigest(),
        engine={"num_blocks": NUM_BLOCKS, "threads": 1},
    )
    with deployed(config, "127.0.0.1", free_port()) as url:
        endpoint = Endpoint(url)
        wait_for(lambda: len(endpoint.replicas()) == 2, 60, "both replicas known to the router")
        yield endpoint


@pytest.fixture(scope="session")
def warmroute() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the installed command as a user would."""
    script = os.path.join(os.path.dirname(sys.executable), "warmroute")

    def run(*args: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        return subprocess.run([script, *args], capture_output=True, text=True, timeout=timeout)

    return run
