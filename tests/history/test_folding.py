"""Folding changes where rows are, never which rows there are."""

import errno
import threading

import pytest
import torch

from aggregator.history import FoldingPolicy, HistoryWriter, open_history, verify
from aggregator.history import folding as folding_module
from aggregator.testing.packets import make_packet, make_site, make_step, make_steps
from telemetry.presence import Presence
from telemetry.summary import DEFAULT_DESCRIPTOR, summarize
from tests.history.history_processes import packet_of

SITES = [make_site(f"layers.{i}", kind) for i in range(7) for kind in ("activation", "gradient")]
NEVER = FoldingPolicy(fan_in=(10**6, 10**6))


def varied_packets(count):
    """Packets with histograms now and then, absent sites, NaN, and sites that come later."""
    generator = torch.Generator().manual_seed(3)
    for step in range(count):
        observed, unobserved = {}, {}
        for i, site in enumerate(SITES):
            values = torch.randn(20, generator=generator)
            if (i + step) % 11 == 0:
                values[0] = float("nan")
            if (i + step) % 7 == 0:
                unobserved[site] = (Presence.CAPTURE_FAILED, f"RuntimeError at {step}")
            elif i < 10 or step > 20:
                observed[site] = summarize(values, histogram=step % 5 == 0)
        yield make_packet(step, observed, unobserved=unobserved, findings=[{"code": "x", "message": str(step)}])


def written(path, folding, count=70):
    writer = HistoryWriter.create(path, {}, DEFAULT_DESCRIPTOR, folding=folding)
    for step in make_steps(varied_packets(count)):
        writer.commit(step)
        assert writer.wait_folded(50)
    writer.close()
    return open_history(path)


def everything(history):
    return [t.to_pylist() for t in (history.observations(), history.steps(), history.sites(), history.findings())]


@pytest.mark.parametrize("fan_in", [(4, 4), (3, 5), (64, 16)])
def test_a_folded_run_reads_the_same_as_one_that_never_was(tmp_path, fan_in):
    plain, folded = written(tmp_path / "plain", NEVER), written(tmp_path / "folded", FoldingPolicy(fan_in))
    names = [file.name for file in (tmp_path / "folded").rglob("*.parquet")]
    assert any(name.startswith("L1") for name in names)
    assert any(name.startswith("L2") for name in names) == (fan_in != (64, 16))
    assert everything(folded) == everything(plain)
    for site in SITES[:3]:
        for field in ("rms", "nan", "absmax", "kurtosis"):
            assert folded.series(site.name, site.kind, field).equals(plain.series(site.name, site.kind, field))
    assert folded.histogram("layers.0", "gradient", 5) == plain.histogram("layers.0", "gradient", 5)
    assert verify(tmp_path / "folded").num_rows == 0


def test_row_groups_of_a_folded_file_end_between_sites(tmp_path, monkeypatch):
    monkeypatch.setattr(folding_module, "ROWS_A_GROUP", (0, 20, 20))
    monkeypatch.setattr(folding_module, "ROWS_A_BLOCK", 50)
    folded = written(tmp_path / "folded", FoldingPolicy((4, 4)))
    plain = written(tmp_path / "plain", NEVER)
    (index,) = (view.index for view in folded._tables.views())
    starts = [entry.group_site_starts for entry in index.entries if entry.level == 2 and entry.group_site_starts]
    assert starts
    assert all(len(groups) > 5 and list(groups) == sorted(groups) for groups in starts)
    assert everything(folded) == everything(plain)


def test_folded_files_are_removed_after_the_grace_period_and_a_reader_in_between_plans_again(tmp_path):
    writer = HistoryWriter.create(tmp_path, {}, DEFAULT_DESCRIPTOR, folding=FoldingPolicy((4, 4), grace_s=0.0))
    history = open_history(tmp_path)
    for step in range(3):
        writer.commit(make_step(packet_of(step)))
    batches = history.observation_batches("layers.0", columns=["step", "max"])
    first = batches.read_next_batch()
    for step in range(3, 9):
        writer.commit(make_step(packet_of(step)))
        assert writer.wait_folded(50)
    assert not (tmp_path / "seg-00000" / "c" / "00000001.arrow").exists()
    rest = [row for batch in batches for row in batch.to_pylist()]
    assert [row["step"] for row in (*first.to_pylist(), *rest)] == [0, 1, 2]


def test_a_fold_that_fails_is_told_in_the_findings_and_commits_go_on(tmp_path, monkeypatch):
    def full_disk(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(folding_module, "write_parquet", full_disk)
    writer = HistoryWriter.create(tmp_path, {}, DEFAULT_DESCRIPTOR, folding=FoldingPolicy((4, 4)))
    for step in range(9):
        writer.commit(make_step(packet_of(step)))
        assert writer.wait_folded(50)
    writer.close()
    history = open_history(tmp_path)
    assert history.steps()["step"].to_pylist() == list(range(9))
    assert isinstance(writer.folding_failure, OSError)
    assert history.findings().select(["step", "code"]).to_pylist() == [{"step": 4, "code": "folding_failed"}]


def test_a_damaged_input_is_never_folded(tmp_path):
    writer = HistoryWriter.create(tmp_path, {}, DEFAULT_DESCRIPTOR, folding=FoldingPolicy((4, 4)))
    for step in range(3):
        writer.commit(make_step(packet_of(step)))
    chunk = tmp_path / "seg-00000" / "c" / "00000001.arrow"
    data = bytearray(chunk.read_bytes())
    data[len(data) // 2] ^= 1
    chunk.write_bytes(data)
    writer.commit(make_step(packet_of(3)))
    assert writer.wait_folded(50)
    writer.commit(make_step(packet_of(4)))
    writer.close()
    assert "00000001.arrow" in str(writer.folding_failure)
    assert not list(tmp_path.rglob("*.parquet"))
    others = open_history(tmp_path).observations(steps=range(2, 5), columns=["step"])
    assert others["step"].unique().to_pylist() == [2, 3, 4]


def test_a_commit_waits_for_folding_only_so_long(tmp_path, monkeypatch):
    go_on = threading.Event()
    real = folding_module.write_parquet

    def slow(*arguments):
        assert go_on.wait(50)
        return real(*arguments)

    monkeypatch.setattr(folding_module, "write_parquet", slow)
    policy = FoldingPolicy((2, 100), max_unfolded=4, max_wait_s=0.2)
    writer = HistoryWriter.create(tmp_path, {}, DEFAULT_DESCRIPTOR, folding=policy)
    for step in range(6):
        writer.commit(make_step(packet_of(step)))
    assert open_history(tmp_path).steps().num_rows == 6
    go_on.set()
    assert writer.wait_folded(50)
    writer.close()
    assert open_history(tmp_path).steps().num_rows == 6
