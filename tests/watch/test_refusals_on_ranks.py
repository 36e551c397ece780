"""What one rank refuses, all ranks refuse together, with the same typed error and before any step."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

import telemetry
from telemetry import errors
from tests.ranks import run_ranks
from tests.watch.jobs import DEADLINES, train_and_read


def attach(
    rank: int, world_size: int, to: Path, by_rank: dict[int, dict], common: dict, after: Path
) -> errors.RankfoldError | None:
    model = nn.Sequential(nn.Linear(2, 2))
    options = {"to": to, "deadlines": DEADLINES, **common, **by_rank.get(rank, {})}
    try:
        telemetry.watch(model, **options).close()
    except errors.RankfoldError as error:
        # A refused model is free again.
        telemetry.watch(model, **{**options, **FINE, "to": after}).close()
        return error
    return None


FINE = {"signals": telemetry.SIGNALS, "select": "*", "every": 1, "layout": None, "optimizer": None}


@pytest.mark.parametrize(
    ("by_rank", "common", "error"),
    [
        ({1: {"signals": ("loss",)}}, {}, errors.SignalUnknownError),
        ({1: {"select": "nothing.*"}}, {}, errors.NothingSelectedError),
        ({0: {"every": 0}}, {}, errors.ConfigurationError),
        ({1: {"optimizer": "adam"}}, {}, errors.ConfigurationError),
        ({}, {"layout": telemetry.ParallelLayout.from_sizes({"dp": 3})}, errors.LayoutMismatchError),
        ({1: {"layout": telemetry.ParallelLayout.from_sizes({"dp": 3})}}, {}, errors.LayoutMismatchError),
    ],
)
def test_a_bad_argument_on_one_rank_is_refused_on_all(by_rank, common, error, tmp_path):
    found = run_ranks(attach, 2, tmp_path / "run", by_rank, common, tmp_path / "after")
    assert [type(e) for e in found] == [error, error]
    culprit = min(by_rank, default=0)
    assert {e.rank for e in found} == {culprit}
    assert not (tmp_path / "run").exists()


def test_a_directory_that_holds_a_run_is_refused_by_name_and_left_alone(tmp_path):
    to = tmp_path / "run"
    run_ranks(train_and_read, 2, to)
    before = sorted((p, p.stat().st_mtime_ns) for p in to.rglob("*"))
    found = run_ranks(attach, 2, to, {}, {}, tmp_path / "after")
    assert [type(e) for e in found] == [errors.RunDirectoryInUseError] * 2
    assert all(str(to) in str(e) for e in found)
    assert sorted((p, p.stat().st_mtime_ns) for p in to.rglob("*")) == before


def test_a_foreign_and_an_impossible_directory_are_refused_on_all_ranks(tmp_path):
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.txt").write_text("mine")
    found = run_ranks(attach, 2, tmp_path / "foreign", {}, {}, tmp_path / "after")
    assert [type(e) for e in found] == [errors.RunDirectoryForeignError] * 2
    (tmp_path / "file").write_text("a file")
    found = run_ranks(attach, 2, tmp_path / "file" / "run", {}, {}, tmp_path / "after-the-file")
    assert [type(e) for e in found] == [errors.RunDirectoryUnwritableError] * 2
    assert os.listdir(tmp_path / "foreign") == ["thesis.txt"]


def alone(rank: int, world_size: int, to: Path) -> errors.RankfoldError | None:
    if rank == 1:
        # What this rank does instead of watching is its own affair, and telemetry must not answer to it.
        torch.distributed.barrier()
        return None
    short = telemetry.Deadlines(attach_s=3, merge_s=3, close_s=3)
    try:
        telemetry.watch(nn.Sequential(nn.Linear(2, 2)), to=to, deadlines=short).close()
    except errors.RankfoldError as error:
        return error
    finally:
        torch.distributed.barrier()
    return None


def test_a_rank_that_does_not_watch_is_named_within_the_deadline(tmp_path):
    error = run_ranks(alone, 2, tmp_path / "run")[0]
    assert isinstance(error, errors.AttachTimeoutError)
    assert "1" in str(error)
