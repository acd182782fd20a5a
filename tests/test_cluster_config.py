"""cluster.yaml and serve.yaml against Ray's own validators, and against what our application accepts."""

from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def cluster() -> dict:
    return yaml.safe_load((ROOT / "cluster.yaml").read_text())


def test_cluster_yaml_passes_rays_schema(cluster: dict) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(cluster))


def test_cluster_yaml_for_ones_own_machines_passes_rays_schema(cluster: dict) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    cluster["provider"] = {"type": "local", "head_ip": "10.0.0.1", "worker_ips": ["10.0.0.2"]}
    for key in ("available_node_types", "head_node_type", "max_workers"):
        del cluster[key]
    validate_config(prepare_config(cluster))


def test_cluster_yaml_has_gpu_workers_and_deploys(cluster: dict) -> None:
    types = cluster["available_node_types"]
    head = types.pop(cluster["head_node_type"])
    assert head["resources"] == {"CPU": 0}
    assert [t["resources"]["GPU"] for t in types.values()] == [1]
    assert any("serve deploy serve.yaml" in c for c in cluster["head_start_ray_commands"])
    for commands in ("head_start_ray_commands", "worker_start_ray_commands"):
        start = next(c for c in cluster[commands] if "ray start" in c)
        assert "RAY_SERVE_ENABLE_HA_PROXY=1" in start
        assert "RAY_SERVE_THROUGHPUT_OPTIMIZED=1" in start
        assert ("--num-cpus=0" in start) == (commands == "head_start_ray_commands")


def test_serve_yaml_passes_serves_schema_and_ours() -> None:
    from ray.serve.schema import ServeDeploySchema

    from router.config import AppConfig

    schema = ServeDeploySchema.model_validate(yaml.safe_load((ROOT / "serve.yaml").read_text()))
    assert [app.name for app in schema.applications] == ["warmroute"]
    module, name = schema.applications[0].import_path.split(":")
    assert (module, name) == ("router.app", "build")
    config = AppConfig.model_validate(schema.applications[0].args)
    assert (config.model, config.policy, config.replicas) == ("smollm2-135m", "cache_aware", 2)


def test_serve_yaml_keeps_routers_beside_the_endpoint_on_loopback() -> None:
    """HAProxy would look for a router on another node at an address where nobody listens."""
    config = yaml.safe_load((ROOT / "serve.yaml").read_text())
    assert (config["proxy_location"], config["http_options"]["host"]) == ("HeadOnly", "127.0.0.1")
    (router,) = config["applications"][0]["deployments"]
    assert router["name"] == "Router"
    assert router["ray_actor_options"] == {"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}}


def test_serve_yaml_is_what_the_cli_reads() -> None:
    from router.cli.serve import load_config

    config = load_config(ROOT / "serve.yaml", {"replicas": 5, "policy": None, "engine": {"threads": 3}})
    assert config.replicas == 5
    assert config.policy == "cache_aware"
    # No num_blocks: what a GPU has room for is measured.
    assert config.engine == {"block_size": 16, "threads": 3}
