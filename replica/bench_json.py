"""The `--json` option of the benchmarks: figures as one line, in a file or on stdout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer


def check_json(json_file: str | None) -> None:
    """Complain before the measurement, not after it, about figures that could not be kept."""
    if json_file in (None, "-"):
        return
    path = Path(str(json_file)).absolute()
    if path.is_dir() or not path.parent.is_dir():
        what = "is a folder" if path.is_dir() else "no such folder"
        raise typer.BadParameter(f"{json_file}: {what}", param_hint="--json")


def deliver_json(figures: dict[str, Any], json_file: str | None) -> None:
    """The figures in their file, or on stdout for "-"."""
    line = json.dumps(figures)
    if json_file == "-":
        print(line, flush=True)
    elif json_file is not None:
        Path(json_file).write_text(line + "\n", encoding="utf-8")
