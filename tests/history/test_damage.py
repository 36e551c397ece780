"""No damaged byte is ever read as a number: it is refused by name, and told by verify; what is left can be salvaged."""

import random
import shutil

import pytest

from aggregator.history import FoldingPolicy, HistoryWriter, open_history, verify
from aggregator.testing.packets import make_steps
from telemetry.errors import HistoryDamagedError
from telemetry.summary import DEFAULT_DESCRIPTOR
from tests.history.history_processes import packet_of

# Commits 0 to 7 are folded to level 2, 8 to 11 to level 1, 12 and 13 are as committed; then a second attempt.
NUM_STEPS, RESUME_STEP = 14, 12
FOLDING = FoldingPolicy((4, 2), grace_s=0.0)


def write(path, resume_step, steps):
    writer = HistoryWriter.create(path, {"name": "run"}, DEFAULT_DESCRIPTOR, resume_step, folding=FOLDING)
    for step in make_steps(packet_of(step) for step in steps):
        writer.commit(step)
        assert writer.wait_folded(50)
    writer.close()


def everything(path, **options):
    """All that a reader can get out of a run."""
    history = open_history(path, **options)
    rows, steps = (read(include_superseded=True) for read in (history.observations, history.steps))
    calls = (history.observations, history.steps, history.sites, history.findings, history.segments)
    return history.manifest, *(table.to_pylist() for table in (rows, steps, *(call() for call in calls)))


@pytest.fixture(scope="module")
def intact_run(tmp_path_factory):
    path = tmp_path_factory.mktemp("damage") / "run"
    write(path, None, range(NUM_STEPS))
    write(path, RESUME_STEP, range(RESUME_STEP, RESUME_STEP + 6))
    return path, everything(path)


@pytest.fixture
def run(intact_run, tmp_path):
    return shutil.copytree(intact_run[0], tmp_path / "run")


@pytest.fixture
def intact(intact_run):
    return intact_run[1]


def files_of(run):
    return sorted(file for file in run.rglob("*") if file.is_file())


def is_of_the_newest_snapshot(file):
    return not file.name.startswith("index-") or file == max(file.parent.glob("index-*"))


def is_refused(run, file, damaged, intact):
    """Verify tells the damage; a reader does too, or reads what was there: then nothing depends on those bytes."""
    file.write_bytes(damaged)
    assert str(file) in verify(run)["file"].to_pylist()
    try:
        found = everything(run)
    except HistoryDamagedError as error:
        found = str(error)
    refused = isinstance(found, str)
    assert str(file) in found if refused else found == intact
    return refused


def test_the_run_under_test_has_files_of_every_level(run):
    names = {file.name[:3] for file in files_of(run)}
    assert {"L1-", "L2-", "000", "ind", "seg", "man"} <= names
    assert verify(run).num_rows == 0


@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_flips", [34, pytest.param(400, marks=pytest.mark.full)])
def test_a_flipped_bit_in_any_file_is_refused_by_name_and_found_by_verify(run, intact, num_flips):
    chance, files = random.Random(5), files_of(run)
    for i in range(num_flips):
        file = files[i % len(files)]
        original = file.read_bytes()
        damaged = bytearray(original)
        place = chance.randrange(len(damaged))
        damaged[place] ^= 1 << chance.randrange(8)
        refused = is_refused(run, file, bytes(damaged), intact)
        # Nobody reads the generation before the newest, nor the magic word at the beginning of a Parquet file.
        assert refused or not is_of_the_newest_snapshot(file) or place < 4
        file.write_bytes(original)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_cuts", [17, pytest.param(100, marks=pytest.mark.full)])
def test_a_truncated_file_is_refused_by_name_and_found_by_verify(run, intact, num_cuts):
    chance, files = random.Random(6), files_of(run)
    for i in range(num_cuts):
        file = files[i % len(files)]
        original = file.read_bytes()
        lengths = (0, 1, len(original) // 2, len(original) - 1, chance.randrange(len(original)))
        refused = is_refused(run, file, original[: lengths[chance.randrange(5)]], intact)
        assert refused or not is_of_the_newest_snapshot(file)
        file.write_bytes(original)


def chunk_with(run, name):
    return next(file for file in files_of(run) if file.name == name)


def test_a_damaged_chunk_names_its_steps_and_leaves_the_others_readable(run):
    chunk = chunk_with(run, "00000012.arrow")
    chunk.write_bytes(bytes(chunk.stat().st_size))
    with pytest.raises(HistoryDamagedError, match=r"00000012\.arrow.*steps 12 to 12") as refused:
        open_history(run).observations(include_superseded=True)
    assert refused.value.step == 12
    others = open_history(run).observations(steps=range(12), columns=["step"])
    assert others["step"].unique().to_pylist() == list(range(12))


def test_a_damaged_folded_file_names_the_steps_that_were_in_it(run):
    chunk = chunk_with(run, "L2-00000000-00000007.parquet")
    data = bytearray(chunk.read_bytes())
    data[100] ^= 1
    chunk.write_bytes(data)
    with pytest.raises(HistoryDamagedError, match=r"L2-00000000-00000007\.parquet.*steps 0 to 7"):
        open_history(run).observations()


def test_a_chunk_that_is_gone_is_refused_by_name(run):
    chunk_with(run, "00000013.arrow").unlink()
    with pytest.raises(HistoryDamagedError, match=r"00000013\.arrow.*missing"):
        open_history(run).steps(include_superseded=True)
    assert verify(run)["problem"].unique().to_pylist() == ["the file is missing"]


def test_a_segment_without_its_document_is_refused(run):
    (run / "seg-00000" / "segment.json").unlink()
    with pytest.raises(HistoryDamagedError, match=r"segment\.json is missing.*steps 0 to 13"):
        open_history(run).steps()


def test_a_segment_that_was_sealed_and_has_no_index_is_refused(run):
    for index in (run / "seg-00000").glob("index-*"):
        index.unlink()
    with pytest.raises(HistoryDamagedError, match="seg-00000 has lost the index"):
        open_history(run).steps()


def salvaged_steps(run):
    history = open_history(run, salvage=True)
    rows = history.observations(columns=["step", "site", "max"])
    return history, sorted(set(rows["step"].to_pylist()))


def test_salvage_reads_all_but_the_damaged_chunk_and_says_which_steps_it_lacks(run):
    chunk = chunk_with(run, "L1-00000008-00000011.parquet")
    chunk.write_bytes(chunk.read_bytes()[:-40])
    history, steps = salvaged_steps(run)
    assert steps == [*range(8), *range(12, 18)]
    lost = history.losses().to_pylist()
    assert [(row["file"], row["table"], row["step_lo"], row["step_hi"]) for row in lost] == [
        (str(chunk), "observations", 8, 11)
    ]


def test_salvage_falls_back_to_the_generation_before_a_damaged_index(run):
    index = max((run / "seg-00001").glob("index-*"))
    index.write_bytes(b"x")
    history, steps = salvaged_steps(run)
    assert steps == list(range(18))
    assert history.losses()["file"].to_pylist() == [str(index)]


def test_salvage_reads_a_segment_whose_document_is_damaged_and_still_lets_it_supersede(run, intact):
    document = run / "seg-00001" / "segment.json"
    document.write_bytes(document.read_bytes()[:20])
    history, steps = salvaged_steps(run)
    assert steps == list(range(18))
    assert history.steps().num_rows == 18
    assert str(document) in history.losses()["file"].to_pylist()


def test_salvage_reads_the_other_segments_where_one_has_lost_every_index(run):
    for index in (run / "seg-00000").glob("index-*"):
        index.write_bytes(b"")
    history, steps = salvaged_steps(run)
    assert steps == list(range(12, 18))
    assert set(history.losses()["segment"].to_pylist()) == {0}


def test_salvage_does_without_a_manifest_and_without_definitions(run):
    (run / "manifest.json").write_text("{}")
    first = chunk_with(run, "L2-00000000-00000007.arrow")
    first.write_bytes(bytes(first.stat().st_size))
    second = max((run / "seg-00001" / "c").glob("L*-00000000-*.arrow"))
    second.write_bytes(bytes(second.stat().st_size))
    history = open_history(run, salvage=True)
    sites = set(history.observations(columns=["site"])["site"].to_pylist())
    assert all(site.startswith("site-") for site in sites)
    assert history.descriptor == DEFAULT_DESCRIPTOR
    assert {"sites", "steps", "checksums"} & set(history.losses()["table"].to_pylist())
