"""Every exception that Rankfold raises, each with a stable code, a place and a remedy.

One class stands for one code. All of them derive from :class:`RankfoldError`, pickle without loss, and cross
process borders as plain JSON (:meth:`RankfoldError.to_wire`), because a refusal on one rank is raised on all.
The codes are listed for users in ``docs/reference/errors.md``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

__all__ = [
    "AggregatorUnavailableError",
    "AttachTimeoutError",
    "CatalogueConflictError",
    "ClusterFilesMissingError",
    "ConfigurationError",
    "DtypeUnsupportedError",
    "FieldUnknownError",
    "HistogramAbsentError",
    "HistoryDamagedError",
    "HistoryError",
    "HistoryFullError",
    "HistoryNotFoundError",
    "HistoryVersionError",
    "HistoryWriteError",
    "IntegrationUnavailableError",
    "KindUnknownError",
    "LayoutMismatchError",
    "MaskShapeError",
    "MergeDeadlineError",
    "ModelAlreadyWatchedError",
    "NothingSelectedError",
    "PacketMalformedError",
    "PacketVersionError",
    "PeerLostError",
    "PlacementInvalidError",
    "ProcessGroupMissingError",
    "RankfoldError",
    "RenderUnavailableError",
    "ReportUnavailableError",
    "RunDirectoryForeignError",
    "RunDirectoryInUseError",
    "RunDirectoryMissingRunError",
    "RunDirectoryUnwritableError",
    "SessionClosedError",
    "SessionNestingError",
    "SettingMalformedError",
    "SignalUnknownError",
    "SinkCapabilityError",
    "SinkDuplicateError",
    "SinkTagError",
    "SinkUnavailableError",
    "SiteUnknownError",
    "SketchDescriptorError",
    "SketchDescriptorMismatchError",
    "StepOrderError",
    "VerdictExistsError",
    "VerdictMalformedError",
    "WriterFencedError",
]


class RankfoldError(Exception):
    """Base of all Rankfold exceptions.

    Attributes:
        code: stable snake_case identifier of the class.
        message: what is wrong, without the place.
        remedy: the next action for whoever reads this, or "".
        rank, step, site: where it happened, ``None`` where that is not known or does not apply.
        failures: rank → message, when several ranks were asked and some refused.
    """

    code: ClassVar[str] = "rankfold_error"
    _by_code: ClassVar[dict[str, type[RankfoldError]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        RankfoldError._by_code[cls.code] = cls

    def __init__(
        self,
        message: str,
        *,
        remedy: str = "",
        rank: int | None = None,
        step: int | None = None,
        site: str | None = None,
        failures: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.rank = rank
        self.step = step
        self.site = site
        self.failures = dict(failures or {})

    def __str__(self) -> str:
        places = [
            f"{name} {value}"
            for name, value in (("rank", self.rank), ("step", self.step), ("site", self.site))
            if value is not None
        ]
        where = f" ({', '.join(places)})" if places else ""
        others = "".join(
            f"\n  rank {rank}: {text}" for rank, text in sorted(self.failures.items()) if rank != self.rank
        )
        remedy = f"\n  → {self.remedy}" if self.remedy else ""
        return f"[{self.code}] {self.message}{where}{others}{remedy}"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self._state())

    def _state(self) -> dict[str, Any]:
        return {
            "message": self.message,
            "remedy": self.remedy,
            "rank": self.rank,
            "step": self.step,
            "site": self.site,
            "failures": self.failures,
        }

    def to_wire(self) -> dict[str, Any]:
        """Return the error as a JSON-serialisable dictionary."""
        state = self._state()
        state["failures"] = {str(rank): text for rank, text in self.failures.items()}
        return {"code": self.code, **state}

    @staticmethod
    def from_wire(wire: Mapping[str, Any]) -> RankfoldError:
        """Rebuild the exception that :meth:`to_wire` described; an unknown code becomes the base class."""
        state = dict(wire)
        cls = RankfoldError._by_code.get(state.pop("code"), RankfoldError)
        state["failures"] = {int(rank): text for rank, text in state["failures"].items()}
        return _rebuild(cls, state)


def _rebuild(cls: type[RankfoldError], state: dict[str, Any]) -> RankfoldError:
    return cls(state.pop("message"), **state)


class ConfigurationError(RankfoldError, ValueError):
    """An argument has a value that cannot work. Base of the refusals at attach."""

    code = "configuration_invalid"


class SettingMalformedError(ConfigurationError):
    """An environment variable or a key of the settings file has a value that is none."""

    code = "setting_malformed"


class SignalUnknownError(ConfigurationError):
    """A name in ``signals`` is none of the five."""

    code = "signal_unknown"


class NothingSelectedError(ConfigurationError):
    """``select`` matched no site of a requested signal."""

    code = "nothing_selected"


class StepOrderError(ConfigurationError):
    """A step number repeats or goes back inside one segment."""

    code = "step_not_increasing"


class ModelAlreadyWatchedError(ConfigurationError):
    """The model has a live session of the same name."""

    code = "model_already_watched"


class SessionClosedError(RankfoldError, RuntimeError):
    """The session was used after its close."""

    code = "session_closed"


class SessionNestingError(RankfoldError, RuntimeError):
    """A step scope was opened inside another one of the same session."""

    code = "step_scope_nested"


class LayoutMismatchError(ConfigurationError):
    """The axes of the layout do not multiply to the world size, or the rank lies outside of it."""

    code = "layout_world_mismatch"


class PlacementInvalidError(ConfigurationError):
    """A placement contradicts itself or the layout."""

    code = "placement_invalid"


class ProcessGroupMissingError(ConfigurationError):
    """The environment announces several ranks, but no process group was initialised."""

    code = "process_group_missing"


class RunDirectoryInUseError(ConfigurationError):
    """The directory already holds a run and no ``resume_step`` was given."""

    code = "run_directory_in_use"


class RunDirectoryForeignError(ConfigurationError):
    """The directory holds files that are not ours."""

    code = "run_directory_foreign"


class RunDirectoryUnwritableError(ConfigurationError):
    """The directory cannot be created or written."""

    code = "run_directory_unwritable"


class RunDirectoryMissingRunError(ConfigurationError):
    """``resume_step`` was given, but the directory holds no run."""

    code = "run_directory_missing_run"


class DtypeUnsupportedError(ConfigurationError, TypeError):
    """A tensor of this dtype has no summary."""

    code = "stat_dtype_unsupported"


class MaskShapeError(ConfigurationError):
    """The mask does not fit the tensor."""

    code = "mask_shape_mismatch"


class SketchDescriptorError(ConfigurationError):
    """A histogram descriptor describes no usable grid."""

    code = "sketch_descriptor_invalid"


class SketchDescriptorMismatchError(ConfigurationError):
    """Two histograms on different grids met; there is no re-binning path."""

    code = "sketch_descriptor_mismatch"


class CatalogueConflictError(ConfigurationError):
    """Two ranks define one site differently."""

    code = "catalogue_conflict"


class SinkDuplicateError(ConfigurationError):
    """The same sink object was given twice."""

    code = "sink_duplicate"


class SinkUnavailableError(ConfigurationError):
    """A sink cannot work here, for instance because its library is not installed."""

    code = "sink_unavailable"


class SinkCapabilityError(ConfigurationError):
    """A sink was asked for something that it does not carry."""

    code = "sink_capability_missing"


class SinkTagError(ConfigurationError):
    """Two sites would be shown under one name."""

    code = "sink_tag_collision"


class AggregatorUnavailableError(ConfigurationError):
    """No aggregator serves the destination given as ``to``."""

    code = "aggregator_unavailable"


class IntegrationUnavailableError(ConfigurationError, ImportError):
    """The framework that an integration is for is not installed."""

    code = "integration_unavailable"


class AttachTimeoutError(RankfoldError, TimeoutError):
    """Some ranks did not come to ``watch`` within the deadline."""

    code = "attach_timeout"


class MergeDeadlineError(RankfoldError, TimeoutError):
    """Some ranks did not deliver a step within the deadline."""

    code = "merge_deadline_missed"


class PeerLostError(RankfoldError, ConnectionError):
    """The connection to another rank broke."""

    code = "peer_lost"


class PacketMalformedError(RankfoldError, ValueError):
    """Bytes that should be a packet are not."""

    code = "packet_malformed"


class PacketVersionError(RankfoldError, ValueError):
    """The packet was written by an incompatible version."""

    code = "packet_version_unsupported"


class HistoryError(RankfoldError):
    """Base of everything the history refuses."""

    code = "history_error"


class HistoryNotFoundError(HistoryError, FileNotFoundError):
    """There is no run at this path."""

    code = "history_not_found"


class HistoryDamagedError(HistoryError, ValueError):
    """Committed bytes are not what was written."""

    code = "history_damaged"


class WriterFencedError(HistoryError):
    """Another writer has taken over this run."""

    code = "writer_fenced"


class HistoryVersionError(HistoryError, ValueError):
    """The record was written by a newer, incompatible version."""

    code = "history_version_unsupported"


class HistoryWriteError(HistoryError, OSError):
    """A step could not be made durable; what was committed before stays readable."""

    code = "history_write_failed"


class HistoryFullError(HistoryError):
    """The run has no directory, and as many steps are in memory as were allowed."""

    code = "history_memory_full"


class SiteUnknownError(HistoryError, ValueError):
    """The record has no site of this name."""

    code = "site_unknown"


class KindUnknownError(HistoryError, ValueError):
    """The record has no site of this kind, or none of this name and kind."""

    code = "kind_unknown"


class FieldUnknownError(HistoryError, ValueError):
    """A summary has no field, or a table no column, of this name."""

    code = "field_unknown"


class HistogramAbsentError(HistoryError, ValueError):
    """The site has no histogram at this step."""

    code = "histogram_absent"


class ReportUnavailableError(RankfoldError, ImportError):
    """A library that draws the report is not installed."""

    code = "report_unavailable"


class ClusterFilesMissingError(RankfoldError, FileNotFoundError):
    """The installation lacks the files of ``cluster/``."""

    code = "cluster_files_missing"


class RenderUnavailableError(RankfoldError, ImportError):
    """The library that fills in the templates of cluster jobs is not installed."""

    code = "render_unavailable"


class VerdictExistsError(ConfigurationError):
    """The folder for the verdicts of acceptance gates holds results of one of them."""

    code = "gate_verdict_exists"


class VerdictMalformedError(ConfigurationError):
    """A file in a folder of verdicts is not a verdict on an acceptance gate."""

    code = "gate_verdict_malformed"
