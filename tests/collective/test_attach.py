"""Attach: one refusal is everybody's, and nobody waits longer than the deadline."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from aggregator.collective import CollectiveAggregator
from telemetry.errors import (
    AttachTimeoutError,
    CatalogueConflictError,
    ConfigurationError,
    LayoutMismatchError,
    NothingSelectedError,
    ProcessGroupMissingError,
    RankfoldError,
    RunDirectoryInUseError,
    SignalUnknownError,
    SketchDescriptorMismatchError,
)
from telemetry.protocol import Deadlines
from telemetry.summary import HistogramDescriptor
from tests.collective.worlds import IMPATIENT, MemoryRecorder, attach, offer
from tests.packets import make_site
from tests.ranks import run_ranks


def _refused(rank, world_size, changes=None, **common):
    """Attach with the changes of this rank; return the error, what rank zero's recorder saw, and the report."""
    recorder = MemoryRecorder(refusal=common.pop("refusal", None))
    aggregator = CollectiveAggregator(lambda: recorder, fan_in=2)
    with pytest.raises(RankfoldError) as caught:
        aggregator.attach(offer(rank, world_size, **common, **(changes or {}).get(rank, {})))
    assert aggregator.failure is caught.value
    assert aggregator.close().failure is caught.value
    return caught.value, recorder.offer


def _two_ranks_refuse(rank, world_size):
    failures = {
        2: {"failure": NothingSelectedError("select matched nothing", remedy="look at session.plan")},
        5: {"failure": SignalUnknownError("signals has 'loss'")},
    }
    return _refused(rank, world_size, failures)


def test_a_refusal_of_some_ranks_is_raised_on_all_with_every_reason():
    for error, claimed in run_ranks(_two_ranks_refuse, 8):
        assert type(error) is NothingSelectedError
        assert error.failures == {2: "select matched nothing", 5: "signals has 'loss'"}
        assert (error.rank, error.remedy) == (2, "look at session.plan")
        assert claimed is None


def _another_grid(rank, world_size):
    return _refused(rank, world_size, {1: {"descriptor": HistogramDescriptor(bins_per_octave=8)}})


def test_another_histogram_grid_is_refused_by_name_before_any_payload():
    for error, _ in run_ranks(_another_grid, 4):
        assert type(error) is SketchDescriptorMismatchError
        assert "rank 1:" in str(error)
        assert "ranks 0, 2, 3:" in str(error)


def _conflicting_sites(rank, world_size):
    site = make_site("layer.0", dtype="bfloat16" if rank == 3 else "float32", shape=(rank + 1,))
    return _refused(rank, world_size, sites=(site, make_site("fine")))


def test_a_site_defined_in_two_ways_is_refused_with_its_name_and_ranks():
    for error, _ in run_ranks(_conflicting_sites, 4):
        assert type(error) is CatalogueConflictError
        assert error.site == "layer.0"
        assert set(error.failures) == {0, 1, 2, 3}
        assert "rank 3 define activation layer.0 differently: dtype" in str(error)


def _different_resume_steps(rank, world_size):
    return _refused(rank, world_size, {1: {"resume_step": 100}})


def test_ranks_that_resume_at_different_steps_are_refused():
    for error, _ in run_ranks(_different_resume_steps, 2):
        assert type(error) is ConfigurationError
        assert "resume_step" in str(error)


def _different_worlds(rank, world_size):
    return _refused(rank, world_size + (rank == 1))


def test_ranks_that_believe_in_different_worlds_are_refused():
    for error, _ in run_ranks(_different_worlds, 2):
        assert type(error) is LayoutMismatchError
        assert "world_size" in str(error)


def _directory_in_use(rank, world_size):
    refusal = RunDirectoryInUseError("runs/exp1 holds a run", remedy="pass resume_step")
    return _refused(rank, world_size, refusal=refusal)


def test_a_refusal_of_the_recorder_on_rank_zero_is_raised_on_all():
    for error, _ in run_ranks(_directory_in_use, 4):
        assert type(error) is RunDirectoryInUseError
        assert error.remedy == "pass resume_step"


def _recorder_breaks(rank, world_size):
    def broken():
        raise ImportError("no such module")

    aggregator = CollectiveAggregator(broken, fan_in=2)
    with pytest.raises(RankfoldError, match="no such module") as caught:
        aggregator.attach(offer(rank, world_size))
    return caught.value.rank


def test_a_recorder_that_cannot_be_made_is_an_error_on_all():
    assert run_ranks(_recorder_breaks, 2) == [0, 0]


def _rank_two_never_comes(rank, world_size):
    if rank == 2:
        dist.distributed_c10d._get_default_store().wait(["refused"])
        return None
    aggregator = CollectiveAggregator(MemoryRecorder, fan_in=2)
    begun = time.monotonic()
    with pytest.raises(AttachTimeoutError) as caught:
        aggregator.attach(offer(rank, world_size, Deadlines(attach_s=2, merge_s=2, close_s=2)))
    waited_s = time.monotonic() - begun
    if rank == 0:
        dist.distributed_c10d._get_default_store().set("refused", "1")
    return caught.value, waited_s


def test_a_rank_that_never_comes_is_named_on_all_that_came():
    results = run_ranks(_rank_two_never_comes, 8, deadline_s=50)
    for rank, result in enumerate(results):
        if rank != 2:
            error, waited_s = result
            assert set(error.failures) == {2}, rank
            assert "attach_s" in error.remedy
            assert waited_s < 15


def _restart_on_the_same_store(rank, world_size):
    base = dist.distributed_c10d._get_default_store()
    # What a dead attempt may leave behind: its arrivals, with addresses nobody listens at.
    for name in ("rankfold/arrivals/0", "rankfold/arrivals/1"):
        base.set(name, "1.0")
    committed = []
    for _ in range(3):
        aggregator, _ = attach(rank, world_size, IMPATIENT)
        committed.append(aggregator.close().failure)
    return committed


def test_later_attempts_on_the_same_store_find_each_other():
    assert run_ranks(_restart_on_the_same_store, 2) == [[None] * 3] * 2


def test_several_ranks_without_a_process_group_are_refused_with_the_remedy():
    aggregator = CollectiveAggregator(MemoryRecorder)
    with pytest.raises(ProcessGroupMissingError, match="init_process_group"):
        aggregator.attach(offer(0, 2))


def _random_state_is_untouched(rank, world_size):
    torch.manual_seed(7)
    before = torch.get_rng_state()
    aggregator, _ = attach(rank, world_size)
    aggregator.close()
    return bool(torch.equal(before, torch.get_rng_state()))


def test_attach_draws_no_random_number_of_the_training():
    assert run_ranks(_random_state_is_untouched, 2) == [True, True]
