"""A progress bar on stderr that stays silent where nobody looks at it."""

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from router.lab.replay import Progress as Callback


@contextlib.contextmanager
def progress_bar(label: str) -> Iterator[Callback]:
    """The callback for `replay` that drives a bar; stdout is never touched, and a pipe sees nothing."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[failed]}"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=None, failed="")

        def update(ended: int, total: int, failed: int) -> None:
            bar.update(task, completed=ended, total=total, failed=f"{failed} failed" if failed else "")

        yield update
