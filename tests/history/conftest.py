"""Tests end processes, not machines, and what a process wrote outlives it without any sync: so they skip the wait."""

import errno
import os

import pytest


@pytest.fixture(autouse=True)
def no_disk_sync(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def refuse_link(*_, **__):
    raise OSError(errno.EPERM, "Operation not permitted")


@pytest.fixture
def file_system(request, monkeypatch):
    """A file system with hard links, or one without."""
    if request.param == "without links":
        monkeypatch.setattr(os, "link", refuse_link)
    return request.param


def pytest_generate_tests(metafunc):
    if "file_system" in metafunc.fixturenames:
        metafunc.parametrize("file_system", ["with links", "without links"], indirect=True)
