"""Three machines made of namespaces, and what a user of `ray up cluster.yaml` does with them."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import yaml

from replica.registry import SMOLLM2_135M
from router.cli.cluster import free_port

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("namespaces.sh")
HEAD, *WORKERS = (f"198.18.77.1{number}" for number in (1, 2, 3))
TOOLS = ("ip", "sshd", "ssh", "rsync", "unshare")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _why_not()
    for item in items:
        if Path(item.path).parent == Path(__file__).parent:
            item.add_marker(pytest.mark.cluster)
            item.add_marker(pytest.mark.timeout(1800))
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


def _why_not() -> str:
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if os.environ.get("WARMROUTE_CLUSTER_TEST") != "1":
        return "takes ten minutes; run it with WARMROUTE_CLUSTER_TEST=1"
    if os.geteuid() != 0:
        return "making network namespaces takes root"
    return f"not installed: {', '.join(missing)}" if missing else ""


@dataclass(frozen=True)
class Cluster:
    """The machine from which `ray up` is run: a checkout with cluster.yaml, and the hosts' key."""

    folder: Path
    head = HEAD
    workers = WORKERS

    @property
    def checkout(self) -> Path:
        return self.folder / "checkout"

    def ray(self, *arguments: str) -> str:
        """A `ray` command of the user's own machine, as docs/deploy.md has it for machines of one's own."""
        mine = {"RAY_UP_enable_autoscaler_v2": "0", "RAY_USAGE_STATS_ENABLED": "0"}
        scratch = self.folder / "ray"  # what the commands remember of a cluster
        scratch.mkdir(exist_ok=True)
        mine |= {"RAY_TMPDIR": str(scratch), "TMPDIR": str(scratch)}
        command = [Path(sys.executable).with_name("ray"), *arguments]
        ended = subprocess.run(
            command, cwd=self.checkout, env=os.environ | mine, capture_output=True, text=True, timeout=900
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    def on(self, host: str, command: str) -> str:
        """What a command says in a login shell of a host."""
        return subprocess.run(
            [*self.ssh(host), f"bash --login -c 'source ~/.bashrc; {command}'"],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        ).stdout

    def ssh(self, host: str, *options: str) -> list[str]:
        quiet = ["StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR"]
        flags = [flag for option in quiet for flag in ("-o", option)]
        return ["ssh", "-i", str(self.folder / "key"), *flags, *options, f"root@{host}"]

    def processes(self, host: str) -> list[str]:
        """The command lines of everything of Ray's that runs on a host."""
        lines = self.on(host, "ps ax -o args=").splitlines()
        return [line for line in lines if line.startswith("ray::") or "warmroute-env" in line]

    def replicas(self, host: str) -> int:
        return self.processes(host).count("ray::ServeReplica:warmroute:Replica")

    def application(self) -> dict:
        """What Serve says of the application; empty until it knows it."""
        with contextlib.suppress(subprocess.CalledProcessError):
            return yaml.safe_load(self.on(HEAD, "serve status"))["applications"].get("warmroute", {})
        return {}

    def running(self) -> bool:
        """Whether the application runs with both replicas."""
        states = self.application().get("deployments", {}).get("Replica", {}).get("replica_states", {})
        return states == {"RUNNING": 2}

    @contextlib.contextmanager
    def endpoint(self) -> Iterator[str]:
        """The head's endpoint, forwarded to a port here as `ray attach -p` does."""
        port = free_port()
        with subprocess.Popen(self.ssh(HEAD, "-N", "-L", f"{port}:127.0.0.1:8000")) as tunnel:
            url = f"http://127.0.0.1:{port}"
            try:
                wait_for(lambda: _healthy(url), 60, "the endpoint")
                yield url
            finally:
                tunnel.terminate()

    @staticmethod
    def replay(url: str, *arguments: str) -> tuple[int, dict]:
        """`warmroute replay` against the endpoint: its exit status and its report."""
        warmroute = Path(sys.executable).with_name("warmroute")
        command = [warmroute, "replay", *arguments, "--url", url, "--json", "-"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert ended.stdout, ended.stderr
        return ended.returncode, json.loads(ended.stdout)

    @staticmethod
    def wait_for(condition: Callable[[], object], timeout_s: float, what: str) -> None:
        """Poll until the condition holds."""
        wait_for(condition, timeout_s, what)


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.HTTPError:
        return False


def wait_for(condition: Callable[[], object], timeout_s: float, what: str) -> None:
    """Poll until the condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s for {what}"
        time.sleep(0.5)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A head and two workers after `ray up`, each with an installation of its own; all gone afterwards.

    WARMROUTE_CLUSTER_DIR names a folder to keep: the next run finds the hosts' disks as they were.
    """
    kept = os.environ.get("WARMROUTE_CLUSTER_DIR")
    folder = Path(kept or tempfile.mkdtemp(prefix="warmroute-", dir="/var/tmp"))  # hosts have their own /tmp
    cluster = Cluster(folder)
    try:
        _check_out(cluster)
        _download_wheels(folder / "wheels", cluster.checkout)
        subprocess.run([SCRIPT, "up", folder, "3"], check=True, timeout=120)
        for number in (1, 2, 3):
            settings = folder / str(number) / "home/.config/pip/pip.conf"
            settings.parent.mkdir(parents=True, exist_ok=True)
            settings.write_text(f"[global]\nno-index = true\nfind-links = {folder / 'wheels'}\n")
        cluster.ray("up", "-y", "cluster.yaml")
        wait_for(cluster.running, 900, f"both replicas; Serve said {cluster.application()}")
        yield cluster
    finally:
        subprocess.run([SCRIPT, "down", folder], check=True, timeout=120)
        if not kept:
            shutil.rmtree(folder)


def _check_out(cluster: Cluster) -> None:
    """A copy of this checkout, for machines of one's own as the comments in its two files say."""
    kept_out = [f"--exclude=/{name}" for name in (".git", ".venv", "shared")]
    subprocess.run(["rsync", "-a", *kept_out, f"{ROOT}/", f"{cluster.checkout}/"], check=True)
    file = cluster.checkout / "cluster.yaml"
    config = yaml.safe_load(file.read_text())
    config["provider"] = {"type": "local", "head_ip": HEAD, "worker_ips": WORKERS}
    config["auth"] = {"ssh_user": "root", "ssh_private_key": str(cluster.folder / "key")}
    for name in ("available_node_types", "head_node_type", "max_workers"):
        del config[name]
    file.write_text(yaml.safe_dump(config, sort_keys=False))
    file = cluster.checkout / "serve.yaml"
    text = file.read_text()
    for commented in ("- name: Replica\n", "  max_replicas_per_node: 1\n"):
        assert f"      # {commented}" in text
        text = text.replace(f"      # {commented}", f"      {commented}")
    file.write_text(text)


def _download_wheels(wheels: Path, checkout: Path) -> None:
    """The hosts reach no index, so pip on them finds its files here."""
    if wheels.is_dir():
        return
    download = [sys.executable, "-m", "pip", "download", "-q", "-d", wheels]
    needed = ["-c", checkout / "constraints.txt", checkout, "setuptools>=77"]
    subprocess.run([*download, *needed], check=True, timeout=900)
    model = f"{SMOLLM2_135M.project}=={SMOLLM2_135M.version}"
    subprocess.run([*download, "--no-deps", model], check=True, timeout=300)
