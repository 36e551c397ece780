"""Lines that any JSON parser reads, whole steps only, and files that are continued and never overwritten."""

import json
import math
import os

import pytest
import torch

from aggregator.sinks import JsonlSink, RunInfo
from aggregator.sinks.jsonl import read_lines
from aggregator.testing import make_packet, make_site, make_step
from telemetry.errors import SinkUnavailableError
from telemetry.presence import Presence
from telemetry.summary import DEFAULT_DESCRIPTOR, summarize

SITE, BROKEN = make_site("layers.0"), make_site("broken", "gradient")


def opened(path, segment=0, resume_step=None):
    sink = JsonlSink(path)
    sink.open(RunInfo("run", segment, resume_step, 1, DEFAULT_DESCRIPTOR, {"lr": math.nan}))
    return sink


def step(number, values=(1.0, math.nan)):
    summary = summarize(torch.tensor(values), histogram=True)
    packet = make_packet(
        number,
        {SITE: summary},
        unobserved={BROKEN: (Presence.CAPTURE_FAILED, "boom")},
        findings=[{"code": "c", "message": "m", "value": math.inf}],
    )
    return make_step(packet)


def test_a_file_is_a_header_whole_steps_and_a_footer_in_strict_json(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = opened(path)
    sink.emit(step(7))
    sink.close()

    def refuse(word):
        raise AssertionError(word)

    lines = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert [line["type"] for line in lines] == ["header", "observation", "observation", "finding", "step", "footer"]
    assert (lines[0]["run_id"], lines[0]["run"]) == ("run", {"lr": None})
    rows = {line["site"]: line for line in lines[1:3]}
    assert (rows["layers.0"]["mean"], rows["layers.0"]["nan"], rows["layers.0"]["skewness"]) == (1.0, 1, None)
    assert sum(rows["layers.0"]["histogram"]["counts"]) == 2
    assert (rows["broken"]["presence"], rows["broken"]["reason"]) == ("capture_failed", "boom")
    assert rows["broken"]["total"] is None
    assert lines[-1] == {"type": "footer", "num_steps": 1, "last_step": 7}


def test_a_new_segment_is_a_section_of_its_own(tmp_path):
    path = tmp_path / "m.jsonl"
    sink = opened(path)
    sink.emit(step(1))
    sink.emit(step(2))
    sink.begin_segment(RunInfo("run", 1, 2, 1, DEFAULT_DESCRIPTOR, {}))
    sink.emit(step(2))
    sink.close()
    lines = [line for line in read_lines(path) if line["type"] in ("header", "footer", "step")]
    assert [line["type"] for line in lines] == ["header", "step", "step", "footer", "header", "step", "footer"]
    assert [line["segment"] for line in lines if line["type"] == "header"] == [0, 1]
    assert [line["num_steps"] for line in lines if line["type"] == "footer"] == [2, 1]


def test_a_step_is_in_the_file_when_emit_returns(tmp_path):
    sink = opened(tmp_path / "m.jsonl")
    sink.emit(step(1))
    assert read_lines(tmp_path / "m.jsonl")[-1]["step"] == 1
    sink.close()


@pytest.mark.parametrize("cut", [1, 5, 200, 70000])
def test_a_torn_last_line_is_cut_off_on_reopen(tmp_path, cut):
    path = tmp_path / "m.jsonl"
    sink = opened(path)
    sink.emit(step(1))
    whole = path.read_bytes()
    os.close(sink._file)
    path.write_bytes(whole + b'{"type":"observation' + b"x" * cut)
    opened(path, 1, 2).close()
    assert path.read_bytes().startswith(whole)
    assert [line["type"] for line in read_lines(path)[-3:]] == ["step", "header", "footer"]


def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"loss": 1}\n')
    with pytest.raises(SinkUnavailableError):
        opened(path)
    assert path.read_text() == '{"loss": 1}\n'


def test_a_step_that_cannot_be_written_leaves_no_line_and_no_footer(tmp_path, monkeypatch):
    path = tmp_path / "m.jsonl"
    sink = opened(path)
    sink.emit(step(1))
    before = path.read_bytes()
    write, calls = os.write, []

    def full_disk(file, data):
        calls.append(file)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return write(file, data[:100])

    monkeypatch.setattr(os, "write", full_disk)
    with pytest.raises(OSError, match="No space"):
        sink.emit(step(2))
    monkeypatch.undo()
    sink.close()
    assert path.read_bytes() == before
