"""A record that is wrong by one element, one placement or one dropped site does not pass the exactness gates."""

from __future__ import annotations

import pytest
import torch

from launch.gates.discover import gates_named
from launch.gates.verdict import judge
from tests.ranks import run_ranks


def measured_by(rank: int, world_size: int, name: str, to, sabotage) -> dict:
    """Run the part of a gate that its ranks run, with something done to it before."""
    found = gates_named([name])[0]
    with pytest.MonkeyPatch.context() as patch:
        if sabotage is not None:
            sabotage(rank, patch, found.run.__globals__)
        measure = found.run.__globals__["measure"]
        return dict(measure(torch.device("cpu"), to))


def drop_an_element(rank, patch, module) -> None:
    """Let rank one's kernel see one element less of whatever has more than ten."""
    from telemetry import staging

    reduce_into = staging.reduce_into

    def shortened(tensor, *args, **kwargs):
        return reduce_into(tensor.reshape(-1)[1:] if tensor.numel() > 10 else tensor, *args, **kwargs)

    if rank == 1:
        patch.setattr(staging, "reduce_into", shortened)


def scale_a_little(rank, patch, module) -> None:
    """Let rank one's kernel see values that are a hundred thousandth larger."""
    from telemetry import staging

    reduce_into = staging.reduce_into
    if rank == 1:
        patch.setattr(staging, "reduce_into", lambda t, *args, **kw: reduce_into(t.double() * (1 + 1e-5), *args, **kw))


def declare_nothing(rank, patch, module) -> None:
    """Leave out where the outputs of the split modules lie."""
    patch.setitem(module, "placements", dict)


def leave_a_site_out(rank, patch, module) -> None:
    """Watch all modules but one."""
    import functools

    patch.setitem(module, "train_and_compare", functools.partial(module["train_and_compare"], exclude="*.up"))


def forget_that_the_logits_are_split(rank, patch, module) -> None:
    """Show the logits as if every rank of tp had all of them."""
    import telemetry

    observe = telemetry.observe_tensor

    def undeclared(*args, tp_shard_dim=None, **dims):
        observe(*args, **dims)

    patch.setattr(telemetry, "observe_tensor", undeclared)


def verdict(name: str, to, sabotage) -> tuple[str, str]:
    measured = run_ranks(measured_by, 2, name, to, sabotage, deadline_s=100)[0]
    names = {limit.name for limit in gates_named([name])[0].gate.limits}
    values = {key: value for key, value in measured.items() if key in names}
    state, reason, _ = judge(gates_named([name])[0].gate, values, is_rehearsal=True)
    return state, reason


@pytest.mark.parametrize(
    ("name", "sabotage", "names"),
    [
        ("exact-merge-ddp", None, []),
        ("exact-merge-ddp", drop_an_element, ["integer fields that differ", "histogram bins that differ"]),
        ("exact-merge-ddp", scale_a_little, ["largest relative difference of a float is"]),
        ("exact-merge-fsdp2", leave_a_site_out, ["observations missing or not in the reference"]),
        ("exact-merge-tp", declare_nothing, ["integer fields that differ", "histogram bins that differ", "findings"]),
        pytest.param(
            "megatron-call-sites",
            forget_that_the_logits_are_split,
            ["integer fields that differ", "histogram bins that differ"],
            marks=pytest.mark.full,
        ),
        pytest.param("exact-merge-tp", None, [], marks=pytest.mark.full),
        pytest.param("exact-merge-fsdp2", None, [], marks=pytest.mark.full),
        pytest.param("exact-merge-fsdp2", drop_an_element, ["integer fields that differ"], marks=pytest.mark.full),
        pytest.param("exact-merge-tp", drop_an_element, ["integer fields that differ"], marks=pytest.mark.full),
    ],
)
def test_the_verdict_on_a_wrong_record_is_failed_and_names_the_quantity(name, sabotage, names, tmp_path):
    if name == "megatron-call-sites":
        pytest.importorskip("megatron.core", reason="pip install --no-deps megatron-core")
    state, reason = verdict(name, tmp_path / "run", sabotage)
    assert state == ("failed" if names else "passed"), reason
    for part in names:
        assert part in reason
