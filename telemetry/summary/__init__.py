"""Tensor to summary, and summary to summary: the exact statistics that everything else carries around."""

from telemetry.summary.backend import available_backends, backend_name, using_backend
from telemetry.summary.derive import DERIVED_FIELDS, SUMMARY_FIELDS, derive
from telemetry.summary.fields import FLOAT_FIELDS, INT_FIELDS
from telemetry.summary.histogram import DEFAULT_DESCRIPTOR, Histogram, HistogramDescriptor, Quantile
from telemetry.summary.merge import identity, merge_packed
from telemetry.summary.quantization import TARGETS, QuantizationLoss
from telemetry.summary.record import TensorSummary
from telemetry.summary.running import RunningHistogram, RunningStats
from telemetry.summary.summarize import summarize

__all__ = [
    "DEFAULT_DESCRIPTOR",
    "DERIVED_FIELDS",
    "FLOAT_FIELDS",
    "INT_FIELDS",
    "SUMMARY_FIELDS",
    "TARGETS",
    "Histogram",
    "HistogramDescriptor",
    "Quantile",
    "QuantizationLoss",
    "RunningHistogram",
    "RunningStats",
    "TensorSummary",
    "available_backends",
    "backend_name",
    "derive",
    "identity",
    "merge_packed",
    "summarize",
    "using_backend",
]
