"""From a tensor on one rank to a finding in the record of all."""

import torch
from torch import nn

import telemetry
from aggregator import open_history
from aggregator.health import Thresholds
from tests.ranks import run_ranks
from tests.watch.jobs import DEADLINES


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.zeros = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 1)
        nn.init.constant_(self.zeros.weight, 0.0)
        nn.init.constant_(self.zeros.bias, 0.0)

    def forward(self, values, poison):
        out = values + self.zeros(values)
        for i, block in enumerate(self.blocks):
            out = block(out * float("nan") if poison and i == 1 else out)
        return self.head(out)


def poisoned(rank, world_size, to, health):
    torch.manual_seed(0)
    model = Chain()
    with telemetry.watch(
        model, to=to, every=1, signals=("activations",), health=health, deadlines=DEADLINES
    ) as session:
        for step in range(1, 5):
            with session.step(step), torch.no_grad():
                model(torch.ones(2, 4), poison=rank == 1 and step >= 3)
    return [finding["code"] for finding in session.report.merge.findings]


def test_the_rank_the_layer_and_the_step_of_the_first_nan_are_in_everybodys_report(tmp_path):
    reports = run_ranks(poisoned, 2, tmp_path / "run", True)
    assert reports == [["units_dead", "nonfinite_values"]] * 2
    dead, broken = open_history(tmp_path / "run").findings().to_pylist()
    assert (dead["step"], dead["site"]) == (2, "zeros")
    assert (broken["step"], broken["site"], broken["rank"]) == (3, "blocks.1", 1)


def test_a_threshold_of_the_argument_is_in_force_on_real_ranks(tmp_path):
    limits = Thresholds(confirm_observations=4)
    assert run_ranks(poisoned, 2, tmp_path / "run", limits) == [["nonfinite_values", "units_dead"]] * 2
