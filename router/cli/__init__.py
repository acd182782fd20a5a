"""The `warmroute` command.

Commands of other packages (`models`, the benches) register as entry points in pyproject.toml and are imported
when they are called, so that `warmroute --help` needs neither torch nor Ray.
"""

import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points, version
from typing import Annotated, Any

import typer

from router.cli.interrupt import leave_calmly
from router.errors import RouterError

app = typer.Typer(
    name="warmroute",
    help="A multi-replica LLM router with cache-aware load balancing, on Ray.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Benchmarks; each takes --json FILE (or - for stdout).", no_args_is_help=True)

_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
_HELP = {
    "models": "List, fetch and find model weights.",
    "engine": "One engine: time to first token cold and warm, prefill and decode rates.",
    "kvcore": "The prefix cache: one request cycle, beside SGLang and vLLM where they are installed.",
    "route": "The router: hash, match, rank and reserve, per decision.",
}


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version("warmroute"))
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Root of all commands."""


def _lazy(entry: EntryPoint) -> Callable[[typer.Context], None]:
    def run(ctx: typer.Context) -> None:
        target: Any = entry.load()
        if not isinstance(target, typer.Typer):
            single = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
            single.command()(target)
            target = single
        target(args=ctx.args, prog_name=ctx.command_path)

    return run


def _add_plugins(group: str, parent: typer.Typer) -> None:
    for entry in sorted(entry_points(group=group), key=lambda e: e.name):
        parent.command(entry.name, context_settings=_PASS_ON, help=_HELP.get(entry.name))(_lazy(entry))


def _register() -> None:
    from router.cli.demo import demo
    from router.cli.serve import serve
    from router.lab.commands import replay
    from router.lab.simulate import simulate
    from router.lab.trace_commands import trace

    app.command()(serve)
    app.command()(demo)
    app.command()(replay)
    app.command()(simulate)
    app.add_typer(trace, name="trace")
    app.add_typer(bench, name="bench")
    _add_plugins("warmroute.commands", app)
    _add_plugins("warmroute.bench", bench)


def main() -> None:
    """Entry point of the `warmroute` script. Expected failures end with one line and exit status 1,
    Ctrl-C with one and 130."""
    leave_calmly()
    _register()  # here, since its imports take a second in which Ctrl-C is no error
    try:
        app()
    except RouterError as error:
        typer.secho(f"warmroute: {error}", fg="red", err=True)
        sys.exit(1)
