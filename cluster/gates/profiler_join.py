"""Traces of the profiler joined to steps of the record; declared, and not run before there is something to run."""

from __future__ import annotations

from collections.abc import Mapping

from launch.gates import Gate, Limit, Needs, NotRunError, Trial

GATE = Gate(
    name="profiler-join",
    purpose="every kernel in a profiler trace is joined to the step and the site of the record that it worked for",
    procedure="A job is traced by the profiler of PyTorch while it is watched; traces are joined to the record.",
    needs=Needs(gpus_per_node=1),
    limits=(Limit("kernels of a logged step that are joined to no step", "equal to", 0),),
    rehearsal="nothing: there are no kernels without a GPU",
    pending="joining traces of the profiler to steps of the record is not built yet",
)


def run(trial: Trial) -> Mapping[str, object]:
    """Refuse, as long as the gate is pending.

    Raises:
        NotRunError: always.
    """
    raise NotRunError(GATE.pending)
