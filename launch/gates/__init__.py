"""Acceptance gates: what a cluster team runs before it trusts an installation.

A gate is one file in ``cluster/gates``. It says what it proves, what it needs, how it goes about it and which limits
hold, and it has a function ``run(trial)`` that returns what was measured. Whether that is enough is judged here, so
that no gate can pass by itself.
"""

from launch.gates.spec import Gate, Limit, Needs, NotRunError
from launch.gates.trial import Trial
from launch.gates.verdict import Verdict

__all__ = ["Gate", "Limit", "Needs", "NotRunError", "Trial", "Verdict"]
