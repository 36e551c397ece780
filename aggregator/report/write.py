"""A run in, a report out: one HTML file, or pictures."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from aggregator.history import open_history
from aggregator.report.contents import read_contents
from aggregator.report.grid import Progress
from aggregator.report.optional import required
from aggregator.report.page import page_of
from aggregator.report.pictures import pictures_of, png_bytes

__all__ = ["render_png", "write_report"]


def write_report(
    run: Path | str,
    output: Path | str,
    *,
    field: str = "rms",
    title: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write what a run's record says as one HTML file that needs no network, while the run writes or after.

    Args:
        run: the run directory.
        output: the file; its folder has to exist. It appears whole, or not at all.
        field: of ``telemetry.summary.SUMMARY_FIELDS`` or ``nonfinite``, which the first heat map shows.
        title: heading; None for the name of the run directory.
        progress: called with what is being done and which share of all is done.

    Returns:
        ``output`` as a path.

    Raises:
        ReportUnavailableError: plotly, matplotlib or Jinja is not installed.
        FieldUnknownError: there is no such field; names near ones.
        HistoryNotFoundError, HistoryDamagedError, HistoryVersionError: as of ``open_history``.
        OSError: the file cannot be written.

    Example:
        >>> write_report("runs/exp1", "report.html")                            # doctest: +SKIP
    """
    for library in ("plotly", "matplotlib", "jinja2"):
        required(library)
    path = Path(output)
    contents = read_contents(open_history(run), field, progress)
    if progress is not None:
        progress("drawing", 0.85)
    _publish(path, page_of(contents, title or f"Run {Path(run).resolve().name}").encode())
    if progress is not None:
        progress("written", 1.0)
    return path


def render_png(
    run: Path | str, folder: Path | str, *, field: str = "rms", dark: bool = False, progress: Progress | None = None
) -> list[Path]:
    """Write each chart of the report as a PNG, named after it, into a folder that is made if it is not there.

    Args:
        run, field, progress: as of :func:`write_report`.
        folder: of ``heatmap.png``, ``profile.png``, ``ridges.png``, ``ratio.png``, ``coverage.png`` and ``cost.png``,
            those that the run has data for.
        dark: draw for a dark page.

    Returns:
        The files that were written.

    Raises:
        As :func:`write_report`.
    """
    required("matplotlib")
    contents = read_contents(open_history(run), field, progress)
    Path(folder).mkdir(parents=True, exist_ok=True)
    written = []
    for name, picture in pictures_of(contents).items():
        written.append(Path(folder) / f"{name}.png")
        _publish(written[-1], png_bytes(picture.draw(dark)))
    return written


def _publish(path: Path, data: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}-", delete=False) as file:
        try:
            file.write(data)
            file.flush()
            os.chmod(file.name, 0o644)
            os.replace(file.name, path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
