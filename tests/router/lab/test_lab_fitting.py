import asyncio

import pytest

from router.lab.client import Target
from router.lab.errors import OptionError
from router.lab.fitting import fitting_workload


def fit(endpoint, context):
    endpoint.models = {"data": [{"id": "tiny", "max_model_len": context}]}
    said = []
    return len(asyncio.run(fitting_workload(Target(endpoint.url), said.append))), said


def test_the_workload_is_what_the_context_takes(endpoint):
    """The endpoint counts a token a byte, as random:tiny does."""
    assert fit(endpoint, None) == (91, [])
    assert fit(endpoint, 20_000) == (91, [])
    tiny, said = fit(endpoint, 4096)
    assert tiny == 10
    assert len(said) == 1 and said[0].startswith("91 requests of up to 9,")


def test_a_context_too_short_for_all_is_an_error(endpoint):
    with pytest.raises(OptionError, match="tiny's context is too short"):
        fit(endpoint, 16)
