"""No damaged byte is ever read as a number: it is refused by name, or nothing that is read depends on it."""

import random

import pytest

from aggregator.history import HistoryWriter, open_history
from aggregator.testing.packets import make_steps
from telemetry.errors import HistoryDamagedError
from telemetry.summary import DEFAULT_DESCRIPTOR
from tests.history.history_processes import packet_of

NUM_STEPS = 34


def written(path):
    writer = HistoryWriter.create(path, {"name": "run"}, DEFAULT_DESCRIPTOR)
    for step in make_steps(packet_of(step) for step in range(NUM_STEPS)):
        writer.commit(step)
    writer.close()


def everything(path):
    """All that a reader can get out of a run."""
    history = open_history(path)
    tables = (history.observations(), history.steps(), history.sites(), history.findings(), history.segments())
    return history.manifest, *(table.to_pylist() for table in tables)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("damage") / "run"
    written(path)
    return path


@pytest.fixture(scope="module")
def intact(run):
    return everything(run)


def files_of(run):
    return sorted(file for file in run.rglob("*") if file.is_file())


def test_a_flipped_bit_in_any_file_is_refused_by_name_or_changes_nothing(run, intact):
    chance = random.Random(5)
    refused = 0
    for file in files_of(run):
        original = file.read_bytes()
        for _ in range(12):
            damaged = bytearray(original)
            damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
            refused += refuses_or_reads_the_same(run, file, bytes(damaged), intact)
        file.write_bytes(original)
    # The generation before the newest and JSON's white space are all that may be damaged unseen.
    assert refused >= 12 * (len(files_of(run)) - 1) - 4


def test_a_truncated_file_is_refused_by_name_or_changes_nothing(run, intact):
    chance = random.Random(6)
    for file in files_of(run):
        original = file.read_bytes()
        for length in (0, 1, len(original) // 2, len(original) - 1, chance.randrange(len(original))):
            refuses_or_reads_the_same(run, file, original[:length], intact)
        file.write_bytes(original)


def refuses_or_reads_the_same(run, file, damaged, intact):
    file.write_bytes(damaged)
    try:
        found = everything(run)
    except HistoryDamagedError as error:
        found = str(error)
    refused = isinstance(found, str)
    assert str(file) in found if refused else found == intact
    return refused


def test_a_damaged_chunk_names_its_steps_and_leaves_the_others_readable(run):
    chunk = next(file for file in files_of(run) if file.name == "00000032.arrow")
    original = chunk.read_bytes()
    chunk.write_bytes(bytes(len(original)))
    with pytest.raises(HistoryDamagedError, match=r"00000032\.arrow.*steps 32 to 32") as refused:
        open_history(run).observations()
    assert refused.value.step == 32
    others = open_history(run).observations(steps=range(32), columns=["step"])
    chunk.write_bytes(original)
    assert others["step"].unique().to_pylist() == list(range(32))


def test_a_chunk_that_is_gone_is_refused_by_name(run):
    chunk = next(file for file in files_of(run) if file.name == "00000032.arrow")
    original = chunk.read_bytes()
    chunk.unlink()
    with pytest.raises(HistoryDamagedError, match=r"00000032\.arrow.*missing"):
        open_history(run).steps()
    chunk.write_bytes(original)


def test_a_segment_without_its_document_is_refused(run):
    document = run / "seg-00000" / "segment.json"
    original = document.read_bytes()
    document.unlink()
    with pytest.raises(HistoryDamagedError, match=r"segment\.json is missing"):
        open_history(run).steps()
    document.write_bytes(original)
