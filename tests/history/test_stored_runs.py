"""Runs that earlier versions wrote read as they were, by our reader and by one written from the reference alone."""

import hashlib
import io
import json
import zlib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from aggregator.history import open_history, verify

DATA = Path(__file__).resolve().parents[1] / "data"
STORED = sorted(DATA.glob("history-v*"))


def test_there_is_a_stored_run_of_every_version():
    assert [path.name for path in STORED] == ["history-v1"]


@pytest.mark.parametrize("stored", STORED, ids=lambda path: path.name)
def test_a_stored_run_reads_as_it_was_written(stored):
    expected = json.loads((stored / "expected.json").read_text())
    history = open_history(stored / "run")
    columns = list(expected["observations"][0])
    assert history.observations(columns=columns, include_superseded=True).to_pylist() == expected["observations"]
    assert history.steps()["step"].to_pylist() == expected["steps"]
    assert history.sites().select(list(expected["sites"][0])).to_pylist() == expected["sites"]
    assert history.findings().select(list(expected["findings"][0])).to_pylist() == expected["findings"]
    counts = history.histogram("layers.0", "activation", 8).counts
    assert counts.nonzero()[0].tolist() == expected["histogram_bins"]
    assert history.run_id == expected["run_id"]
    assert verify(stored / "run").num_rows == 0


# What follows uses nothing of ours: it is docs/reference/history-v1.md in code.


def read_document(path):
    data = path.read_bytes()
    body = json.loads(data)["body"]
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    assert data == f'{{"body": {text},\n"sha256": "{hashlib.sha256(text.encode()).hexdigest()}"}}\n'.encode()
    return body


def read_index(segment):
    data = max(segment.glob("index-*.arrow")).read_bytes()
    assert hashlib.sha256(data[:-32]).digest() == data[-32:]
    table = pa.ipc.open_stream(data[:-32]).read_all()
    return json.loads(table.schema.metadata[b"rankfold.index"]), table.to_pylist()


def read_range(segment, row):
    data = (segment / row["file"]).read_bytes()[row["offset"] :][: row["size_bytes"]]
    assert hashlib.sha256(data).digest() == row["sha256"]
    return data


def read_observations(segment, row, rows):
    if row["level"] == 0:
        return pa.ipc.open_stream(read_range(segment, row)).read_all()
    read_range(segment, row)
    (checks,) = (other for other in rows if other["table"] == "checksums" and other["seq_lo"] == row["seq_lo"])
    data = (segment / row["file"]).read_bytes()
    for check in pa.ipc.open_stream(read_range(segment, checks)).read_all().to_pylist():
        assert zlib.crc32(data[check["offset"] :][: check["size_bytes"]]) == check["crc32"]
    return pq.read_table(io.BytesIO(data))


def test_a_reader_written_from_the_reference_alone_finds_the_same_rows():
    run = DATA / "history-v1" / "run"
    manifest = read_document(run / "manifest.json")
    assert (manifest["format"], manifest["min_reader"], manifest["features"]) == ("history.v1", 1, [])
    found, end_step = [], None
    for segment in sorted(run.glob("seg-*"), reverse=True):
        resume_step = read_document(segment / "segment.json")["resume_step"]
        _, rows = read_index(segment)
        for row in rows:
            if row["table"] == "observations":
                stored = read_observations(segment, row, rows).to_pylist()
                shown = (one for one in stored if end_step is None or one["step"] < end_step)
                found += [(one["step"], one["site"], one["sum_sq"]) for one in shown]
        end_step = resume_step if end_step is None else min(end_step, resume_step or 0)
    site_id = int.from_bytes(hashlib.blake2b(b"gradient\0layers.0", digest_size=8).digest(), "little")
    ours = open_history(run).observations("layers.0", "gradient", columns=["step", "sum_sq"]).to_pylist()
    assert sorted((step, value) for step, site, value in found if site == site_id) == [
        (row["step"], row["sum_sq"]) for row in ours
    ]
    assert len(found) == open_history(run).observations().num_rows == 30
