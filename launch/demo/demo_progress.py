"""How far the training is: a bar on a terminal, plain lines elsewhere, nothing on ranks other than zero."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Show = Callable[[int, float], None]

LINE_EVERY = 10


@contextmanager
def progress(num_steps: int, *, rank: int) -> Iterator[Show]:
    """Yield ``show(steps done, loss)``, to be called after each step."""
    console = Console()
    if rank != 0:
        yield lambda done, loss: None
    elif not console.is_terminal:
        yield lambda done, loss: _print_line(done, num_steps, loss)
    else:
        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("loss {task.fields[loss]:.3f}"))
        with Progress(*columns, TimeElapsedColumn(), console=console) as bar:
            task = bar.add_task("training", total=num_steps, loss=float("nan"))
            yield lambda done, loss: bar.update(task, completed=done, loss=loss)


def _print_line(done: int, num_steps: int, loss: float) -> None:
    if done % LINE_EVERY == 0 or done == num_steps:
        print(f"step {done}/{num_steps}  loss {loss:.3f}", flush=True)
