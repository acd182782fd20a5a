"""`warmroute models`: what can be loaded by name, fetching it, and where it lies."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from replica import pull as fetching
from replica.errors import ModelError
from replica.random_names import TINY
from replica.registry import NAMED, SMOLLM2_135M, named

models = typer.Typer(help="List, fetch and find models.", no_args_is_help=True, add_completion=False)

_Name = Annotated[str, typer.Argument(help="A name from `warmroute models list`.")]


@models.command("list")
def list_models() -> None:
    """Show the models that have a name."""
    table = Table("name", "about", "here")
    for model in NAMED.values():
        table.add_row(model.name, model.about, "yes" if model.path.exists() else "no")
    table.add_row(TINY, "small random weights, built on the spot, for tests", "yes")
    Console().print(table)
    typer.echo("Any .gguf file or Hugging Face folder works too: give its path.")


@models.command()
def pull(name: _Name = SMOLLM2_135M.name) -> None:
    """Fetch a model, continuing an interrupted download, and check its hash."""
    try:
        model = named(name)
        columns = (TextColumn(name), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(name, total=None, visible=False)  # until there is something to fetch

            def show(done: int, total: int) -> None:
                bar.update(task, completed=done, total=total, visible=True)

            path = fetching.ensure(model, show)
        fetching.verify(model)
    except ModelError as error:
        raise _failed(error) from error
    typer.echo(path)


@models.command()
def path(name: _Name = SMOLLM2_135M.name) -> None:
    """Print where a model's file lies (or will lie)."""
    try:
        typer.echo(named(name).path)
    except ModelError as error:
        raise _failed(error) from error


def _failed(error: ModelError) -> typer.Exit:
    typer.secho(f"warmroute: {error}", fg="red", err=True)
    return typer.Exit(1)
