"""What a report says of findings, ranks, replicas, presence and cost."""

from aggregator.report.account import read_account, read_cost, read_coverage
from aggregator.report.evidence import read_findings
from aggregator.report.identity import coverage_line, run_facts, segment_rows


def test_a_finding_stands_once_with_its_steps_and_the_numbers_of_its_site(history_of):
    nonfinite, differs = read_findings(history_of("troubled"))
    assert (nonfinite.code, nonfinite.site, nonfinite.steps) == ("nonfinite_values", "layers.0.attention.qkv", (20, 25))
    assert nonfinite.details["nan"] == nonfinite.observed["nan"] == 3
    assert (nonfinite.observed["finite"], nonfinite.observed["absmax_rank"]) == (60, 0)
    assert dict(nonfinite.series)[25] is None
    assert (differs.code, differs.kind, differs.steps) == ("replica_disagreement", "parameter", (30, 35, 40))
    assert differs.details["ranks"] == [3]
    assert differs.observed["replicas"] == "disagree"


def test_who_was_missing_is_told_by_rank_and_step_with_the_reason(history_of):
    seen = read_coverage(history_of("troubled"))
    gone = [
        (seen.ranks[row], int(seen.steps[column])) for row, column in zip(*(seen.state == 3).nonzero(), strict=True)
    ]
    assert gone == [(3, 35), (3, 40)]
    assert (seen.state != 3).sum() == 4 * 12 - 2
    assert seen.reasons == (("peer_lost: no answer for 30 s", 2),)
    assert coverage_line(history_of("troubled").steps()) == "rank 3 missing, in 2 of 12 steps"
    assert coverage_line(history_of("healthy").steps()) == "every rank is in each of the 12 steps"
    assert coverage_line(history_of("without_steps").steps()) == "no step was committed"


def test_every_observation_is_in_the_account(history_of):
    history = history_of("troubled")
    account = read_account(history)
    assert sum(count for *_, count in account.presence) == history.observations(columns=["step"]).num_rows
    assert ("activation", "capture_failed", "<b>RuntimeError</b>: out of memory & more", 1) in account.presence
    assert ("parameter", 7, 3, 74) in account.replicas
    assert account.disagreeing == (("head", "parameter", 30, 3),)


def test_cost_is_what_the_steps_say(history_of):
    cost, steps = read_cost(history_of("healthy")), history_of("healthy").steps()
    assert cost.self_s.tolist() == steps["self_s"].to_pylist()
    assert cost.share.tolist() == [100 * own / 0.5 for own in cost.self_s.tolist()]


def test_the_facts_of_the_run_are_those_of_its_record(history_of):
    facts = run_facts(history_of("troubled"))
    assert facts["layout"] == "pp=2 × dp=2"
    assert facts["cadence"] == "every 5 steps; histograms every 10"
    assert facts["steps"] == "12 recorded, from 0 to 55"
    assert facts["segments"] == "2; continued at step 10"
    assert [row["superseded"] for row in segment_rows(history_of("troubled"))] == ["from step 10", "no"]
    assert "model" not in run_facts(history_of("call_sites_only"))
