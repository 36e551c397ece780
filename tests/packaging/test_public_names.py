"""What a module exports is what it lists, and what it lists is there."""

import importlib
import pkgutil

import pytest

import aggregator.report
import aggregator.sinks
import launch
import telemetry.summary

MODULES = [
    found.name
    for package in (telemetry, aggregator, launch)
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    if ".demo." not in found.name
]


FRONT_DOORS = {
    telemetry: """
        Aggregator Deadlines FlatShard Owned ParallelLayout Partial Placement Plan Presence RankRelation RankfoldError
        Replica SIGNALS Session SessionReport Shard __version__ capture_tensor_observations is_observing_tensor
        observe_layer_residuals observe_tensor suspend_tensor_observations watch
    """,
    telemetry.summary: """
        DEFAULT_DESCRIPTOR DERIVED_FIELDS FLOAT_FIELDS Histogram HistogramDescriptor INT_FIELDS SUMMARY_FIELDS
        Quantile QuantizationLoss RunningHistogram RunningStats TARGETS TensorSummary available_backends backend_name
        derive identity merge_packed summarize using_backend
    """,
    aggregator: "open_history",
    aggregator.report: "render_png write_report",
    aggregator.sinks: """
        CAPABILITIES CometSink ExactingSink JsonlSink MemorySink MetricLoggerSink MlflowSink RunInfo RunPlan Sink
        SinkRunner TensorBoardSink WandbSink admit_sinks require_valid_sinks
    """,
}


@pytest.mark.parametrize("package", FRONT_DOORS, ids=lambda package: package.__name__)
def test_the_front_doors_are_these_and_no_wider(package):
    assert set(package.__all__) == set(FRONT_DOORS[package].split())


@pytest.mark.parametrize("name", MODULES)
def test_every_name_in_all_exists_and_every_public_definition_is_in_it(name):
    module = importlib.import_module(name)
    listed = set(getattr(module, "__all__", ()))
    assert listed <= set(vars(module))
    defined_here = {
        attribute
        for attribute, value in vars(module).items()
        if not attribute.startswith("_") and getattr(value, "__module__", None) == name and hasattr(value, "__name__")
    }
    assert not listed or defined_here <= listed
