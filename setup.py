"""Build the C kernel where a compiler is there; without one the package installs and reduces with torch operators."""

from pathlib import Path

from setuptools import Extension, setup

KERNEL = Path("telemetry/summary/kernel")
LIMITED_API = "cp310"

setup(
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
