"""Everything after the packet: merge, history, sinks, report.

Training code needs nothing from here but ``aggregator.sinks`` and, to read a run, ``aggregator.open_history``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import telemetry

if TYPE_CHECKING:
    from aggregator.history import History

__all__ = ["open_history"]


def _require_sibling() -> None:
    """Refuse to run against somebody else's ``telemetry``: the import names are generic, and scripts shadow them."""
    ours = Path(__file__).resolve().parent.parent / "telemetry"
    # A folder without __init__.py has no file, and shadows too where our packages are installed as editable.
    found = Path(telemetry.__file__ or next(iter(telemetry.__path__))).resolve()
    if ours not in (found, found.parent):
        raise ImportError(
            f"[import_shadowed] Rankfold's package 'telemetry' is shadowed: expected {ours}, imported {found}. "
            "Rename that file or folder, or start the script from another folder."
        )


_require_sibling()


def open_history(path: Path | str) -> History:
    """Open the record of a run for reading; see :func:`aggregator.history.open_history`.

    Only this call imports pyarrow: ranks that name a sink from this package need none of it.
    """
    from aggregator.history import open_history as open_run

    return open_run(path)
