"""Stored rows as people ask for them: names and words for numbers, derived statistics, null where there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from aggregator.estimates import NOT_ESTIMATED
from aggregator.history.schema import OBSERVATIONS, PRESENCE_LABELS, REPLICA_LABELS
from aggregator.history.series import SeriesCatalogue
from aggregator.history.values import float_values, needed_columns, packed_rows, steps_behind
from telemetry.presence import Presence
from telemetry.summary import DERIVED_FIELDS, FLOAT_FIELDS

__all__ = [
    "COLUMNS",
    "DEFAULT_COLUMNS",
    "GRADIENT_KINDS",
    "OF_STEP",
    "StepFacts",
    "present",
    "represented",
    "stored_columns",
]

DEFAULT_COLUMNS: Final = ("step", "segment", "site", "kind", "series", "estimated", *OBSERVATIONS.names[2:])
OF_STEP: Final = ("mode", "grad_scale")
COLUMNS: Final = (*DEFAULT_COLUMNS, "superseded", *OF_STEP, *DERIVED_FIELDS)
GRADIENT_KINDS: Final = ("gradient", "activation_grad")

_FLOATS: Final = frozenset((*FLOAT_FIELDS, *DERIVED_FIELDS))
_OF_SITE: Final = frozenset({"site", "kind", "series", "estimated"})
_PRESENCE: Final = pa.array(PRESENCE_LABELS, pa.string())
_REPLICAS: Final = pa.array(REPLICA_LABELS, pa.string())

# Column of ``OF_STEP`` → (segment, step) → value.
StepFacts = Mapping[str, Mapping[tuple[int, int], Any]]


def stored_columns(columns: Sequence[str]) -> list[str]:
    """Return the stored columns that are needed to present ``columns``."""
    needed = {"step", "site", "presence", *(name for name in columns if name in OBSERVATIONS.names)}
    for name in _FLOATS.intersection(columns):
        needed.update(needed_columns(name))
    return [name for name in OBSERVATIONS.names if name in needed]


def present(stored: pa.Table, catalogue: SeriesCatalogue, columns: Sequence[str], facts: StepFacts) -> pa.Table:
    """Return ``columns`` of stored rows, in their order.

    Args:
        stored: at least :func:`stored_columns`, with ``segment`` and ``superseded``.
        catalogue: has every site of the rows.
        columns: names of ``COLUMNS``.
        facts: of the steps, for each column of ``OF_STEP`` that is asked for.
    """
    places = catalogue.places(stored["site"].to_numpy(), stored["segment"].to_numpy(), stored["step"].to_numpy())
    observed = stored["presence"].to_numpy() == Presence.OBSERVED
    packed = packed_rows(stored) if _FLOATS.intersection(columns) else None
    numel = represented(catalogue, places, steps_behind(stored)[2])

    def column(name: str) -> Any:
        if name in _OF_SITE:
            return _of_site(catalogue.table[name].combine_chunks(), places)
        if name == "presence":
            return _labelled(stored[name], _PRESENCE)
        if name == "replicas":
            return _labelled(stored[name], _REPLICAS)
        if name == "mode":
            return pa.array(_of_steps(stored, facts[name]), pa.string()).dictionary_encode()
        if name == "grad_scale":
            return _grad_scales(stored, catalogue, places, facts[name])
        if name in _FLOATS:
            assert packed is not None
            return float_values(name, *packed, observed, numel)
        return stored[name]

    return pa.table({name: column(name) for name in columns})


def represented(
    catalogue: SeriesCatalogue, places: NDArray[np.intp], num_steps: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return the elements that a sampled row stands for, see :func:`aggregator.estimates.scale_estimates`.

    A sample of several steps stands for as many times the whole.
    """
    estimated = catalogue.table["estimated"].to_numpy()[places]
    numel = catalogue.table["numel"].cast(pa.float64()).to_numpy()[places]
    return np.where(estimated, numel * num_steps, NOT_ESTIMATED).astype(np.float64)


def _of_site(values: pa.Array, places: NDArray[np.intp]) -> pa.Array:
    # Several series may have one name, and a dictionary each word once: pandas refuses others.
    return (values.dictionary_encode() if pa.types.is_string(values.type) else values).take(pa.array(places))


def _labelled(codes: pa.ChunkedArray, labels: pa.Array) -> pa.Array:
    return pa.DictionaryArray.from_arrays(codes.cast(pa.int32()).combine_chunks(), labels)


def _of_steps(stored: pa.Table, values: Mapping[tuple[int, int], Any]) -> list[Any]:
    """Return for each row the value of its step, None where the step is not told of."""
    keys = zip(stored["segment"].to_pylist(), stored["step"].to_pylist(), strict=True)
    return [values.get(key) for key in keys]


def _grad_scales(
    stored: pa.Table, catalogue: SeriesCatalogue, places: NDArray[np.intp], scales: Mapping[tuple[int, int], Any]
) -> pa.Array:
    of_gradient = np.isin(catalogue.table["kind"].to_pylist(), GRADIENT_KINDS)[places]
    return pa.array(_of_steps(stored, scales), pa.float64(), mask=~of_gradient)
