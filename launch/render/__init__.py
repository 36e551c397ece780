"""From one ``LaunchSpec`` to the file that starts the job on a cluster.

The templates are files of ``cluster/``, for whoever runs a cluster to read and to change.
"""

from launch.render.spec import LaunchSpec
from launch.render.targets import Target, render

__all__ = ["LaunchSpec", "Target", "render"]
