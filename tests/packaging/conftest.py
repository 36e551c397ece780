"""A wheel of this tree, built once, and environments to put it into."""

import sys
import sysconfig
import venv

import pytest

from tests.packaging.environments import copy_sources, run, site_packages_of


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """Build from a copy: a build in the tree would take up what earlier ones left there."""
    source = tmp_path_factory.mktemp("source")
    copy_sources(source)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", source / "dist", ".", cwd=source)
    (built,) = (source / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="session")
def wheel_python(wheel, tmp_path_factory):
    """The interpreter of a fresh environment that has our wheel, and borrows what we depend on from this one."""
    folder = tmp_path_factory.mktemp("wheel-env")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    # A path line is not searched for further .pth files, so that our own editable install stays outside.
    (site_packages_of(folder) / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    return python
