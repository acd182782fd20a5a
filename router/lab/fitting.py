"""Choosing a workload that a served model can take."""

from collections.abc import Callable

from router.lab.client import Client, Target
from router.lab.errors import OptionError
from router.lab.record import Request
from router.lab.workload import TINY, builtin_workload

_TIMEOUT_S = 60.0


async def fitting_workload(target: Target, say: Callable[[str], None]) -> list[Request]:
    """The built-in workload, or its tiny version where the model's context is too short for its prompts.

    `say` is told of every workload that does not fit. Raises OptionError if none does, TargetError if the
    endpoint cannot be used.
    """
    async with Client(target, _TIMEOUT_S) as client:
        model = await client.served_model()
        for workload in (builtin_workload(), builtin_workload(TINY)):
            prompt = await client.tokenize(max(workload, key=_characters), model.name)
            answer = max(request.max_tokens or 0 for request in workload)
            needed = answer if prompt is None else len(prompt) + answer
            if model.context_length is None or needed <= model.context_length:
                return workload
            say(
                f"{len(workload)} requests of up to {needed:,} tokens do not fit the "
                f"{model.context_length:,} of {model.name}'s context"
            )
    raise OptionError(f"{model.name}'s context is too short for every built-in workload")


def _characters(request: Request) -> int:
    return sum(len(message["content"]) for message in request.messages or ())
