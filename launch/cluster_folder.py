"""Where the files of ``cluster/`` are: beside the packages in a checkout, inside of ``launch`` where a wheel is."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from telemetry.errors import ClusterFilesMissingError

__all__ = ["cluster_folder"]

_LAUNCH: Final = Path(__file__).resolve().parent
_PLACES: Final = (_LAUNCH / "cluster_files", _LAUNCH.parent / "cluster")
# A folder of this name in site-packages may be somebody else's.
_OURS: Final = "slurm/train.sbatch.j2"


def cluster_folder() -> Path:
    """Return the folder that holds ``slurm/``, ``kubernetes/``, ``images/`` and whatever else ``cluster/`` has.

    Raises:
        ClusterFilesMissingError: neither place has it; the installation is damaged.
    """
    for place in _PLACES:
        if (place / _OURS).is_file():
            return place
    raise ClusterFilesMissingError(
        f"the templates are neither in {_PLACES[0]} nor in {_PLACES[1]}",
        remedy="pip install --force-reinstall --no-deps rankfold",
    )
