"""What the application refuses before Serve starts anything, and what it asks of Ray."""

import pytest

from router.app import build, check, resources
from router.config import AppConfig
from router.errors import ConfigError


def config(ranks=None, **settings):
    engine = {} if ranks is None else {"tensor_parallel": ranks}
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
        ({"ranks": 2, "replica_gpus": 1}, "replica_gpus 1 with tensor_parallel 2: .* say replica_gpus: 2"),
        ({"ranks": 2, "replica_gpus": 4}, "replica_gpus 4 with tensor_parallel 2: .* say replica_gpus: 2"),
        ({"ranks": 2, "replica_cpus": 0}, "tensor_parallel 2 needs replica_cpus or replica_gpus above 0"),
    ],
)
def test_settings_that_cannot_work_together(settings, message):
    with pytest.raises(ConfigError, match=message):
        check(config(**settings))


def test_the_deployment_has_them():
    application = build(config(2, replica_cpus=2, replicas=1))
    replica = application._bound_deployment.init_args[2]._bound_deployment
    options = replica._replica_config
    assert options.placement_group_bundles == [{"CPU": 1.0}, {"CPU": 1.0}]
    assert options.placement_group_strategy == "STRICT_PACK"
    assert options.ray_actor_options["num_cpus"] == 1
    model, engine, _ = replica.init_args
    assert (model, engine) == ("random:tiny", {"device": "cpu", "threads": 1, "tensor_parallel": 2})


def test_replicas_use_gpus_only_where_they_have_reserved_some():
    def device(**settings):
        application = build(config(replicas=1, **settings))
        return application._bound_deployment.init_args[2]._bound_deployment.init_args[1]["device"]

    assert (device(), device(replica_gpus=1)) == ("cpu", "cuda")
    with pytest.raises(ConfigError, match="cuda_graphs need a GPU: say how many"):
        check(AppConfig(model="random:tiny", engine={"cuda_graphs": True}))
