"""Build the C kernel where a compiler is there, and put the files of ``cluster/`` into the wheel.

Without a compiler the package installs and reduces with torch operators.
"""

import shutil
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

KERNEL = Path("telemetry/summary/kernel")
LIMITED_API = "cp310"
CLUSTER = Path("cluster")


class BuildWithCluster(build_py):
    """Copies ``cluster/``, which is no package, to where ``launch.cluster_folder`` finds it without a checkout."""

    def run(self) -> None:
        """Build; an editable installation reads the folder of the checkout, and gets no copy."""
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib, "launch", "cluster_files")
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(CLUSTER, target, ignore=shutil.ignore_patterns("__pycache__"))


setup(
    cmdclass={"build_py": BuildWithCluster},
    ext_modules=[
        Extension(
            "telemetry.summary._kernel",
            sources=sorted(str(path) for path in KERNEL.glob("*.c")),
            depends=sorted(str(path) for path in KERNEL.glob("*.h")),
            # No contraction: a fused multiply-add rounds once where others round twice, and builds would differ.
            extra_compile_args=["-std=gnu11", "-O3", "-ffp-contract=off", "-fvisibility=hidden"],
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": LIMITED_API}},
)
