"""What the application refuses before Serve starts anything, and what it asks of Ray."""

import pytest

from router.app import build, check, resources
from router.config import AppConfig
from router.errors import ConfigError


def config(ranks=None, **settings):
    engine = {} if ranks is None else {"tensor_parallel": ranks}
    engine |= {name: settings.pop(name) for name in settings.keys() - AppConfig.model_fields.keys()}
    return AppConfig(model="random:tiny", engine=engine, **settings)


def test_a_replica_of_one_process_is_one_actor():
    assert resources(config(replica_cpus=3, replica_gpus=1)) == {
        "ray_actor_options": {"num_cpus": 3, "num_gpus": 1}
    }


def test_ranks_share_what_the_replica_has_on_one_node():
    assert resources(config(2, replica_cpus=4, replica_gpus=2)) == {
        "ray_actor_options": {"num_cpus": 2, "num_gpus": 1},
        "placement_group_bundles": [{"CPU": 2, "GPU": 1}] * 2,
        "placement_group_strategy": "STRICT_PACK",
    }
    assert resources(config(4, replica_cpus=2))["placement_group_bundles"] == [{"CPU": 0.5}] * 4
    assert resources(config(4, replica_cpus=0, replica_gpus=4))["placement_group_bundles"] == [{"GPU": 1}] * 4


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"ranks": 3}, "tensor_parallel 3 does not divide the model's 4 attention heads"),
        ({"ranks": 0}, "tensor_parallel must be at least 1, not 0"),
        ({"ranks": "2"}, "tensor_parallel must be a whole number, not '2'"),
        ({"ranks": -1}, "tensor_parallel must be at least 1, not -1"),
        ({"ranks": 2, "replica_gpus": 1}, "replica_gpus 1 with tensor_parallel 2: .* say replica_gpus: 2"),
        ({"ranks": 2, "replica_gpus": 4}, "replica_gpus 4 with tensor_parallel 2: .* say replica_gpus: 2"),
        ({"ranks": 2, "replica_cpus": 0}, "tensor_parallel 2 needs replica_cpus or replica_gpus above 0"),
        ({"replica_gpus": 2}, "replica_gpus 2 without tensor_parallel: a replica would use one of them"),
        ({"replica_gpus": 0.5}, "replica_gpus 0.5: replicas that share a GPU .*; say num_blocks"),
        ({"device": "cuda"}, "device 'cuda' with replica_gpus 0, which means cpu"),
        ({"device": "cpu", "replica_gpus": 1}, "device 'cpu' with replica_gpus 1, which means cuda"),
        ({"device": "mps"}, "device 'mps' with replica_gpus 0"),
        ({"dtype": "int8"}, "dtype 'int8' is none of auto, float16"),
        ({"eviction": "random"}, "eviction 'random' is none of lru, "),
        ({"cuda_graphs": True}, "cuda_graphs need replica_gpus above 0"),
        ({"memory_share": "much"}, "memory_share must be a number, not .much."),
        ({"block_size": 1, "num_blocks": 1}, "has no room for a prompt and an answer"),
    ],
)
def test_settings_that_cannot_work_together(settings, message):
    with pytest.raises(ConfigError, match=message):
        check(config(**settings))


@pytest.mark.parametrize(
    "settings, device",
    [
        ({}, "cpu"),
        ({"device": "auto"}, "cpu"),
        ({"replica_gpus": 1}, "cuda"),
        ({"replica_gpus": 1, "device": "auto"}, "cuda"),
        ({"replica_gpus": 0.5, "num_blocks": 64}, "cuda"),
    ],
)
def test_replicas_run_on_what_is_reserved_for_them(settings, device):
    """A GPU that Ray does not hide from a replica without one is somebody else's."""
    assert replica_of(build(config(**settings))).init_args[1]["device"] == device


def replica_of(application):
    return application._bound_deployment.init_args[2]._bound_deployment


def test_the_deployment_has_them():
    application = build(config(2, replica_cpus=2, replicas=1))
    replica = replica_of(application)
    options = replica._replica_config
    assert options.placement_group_bundles == [{"CPU": 1.0}, {"CPU": 1.0}]
    assert options.placement_group_strategy == "STRICT_PACK"
    assert options.ray_actor_options["num_cpus"] == 1
    model, engine, _ = replica.init_args
    assert (model, engine) == ("random:tiny", {"threads": 1, "tensor_parallel": 2, "device": "cpu"})
