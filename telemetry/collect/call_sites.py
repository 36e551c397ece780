"""The session as a listener of call sites: every call becomes an observation of the running step."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from telemetry.collect.book import LocalSite, SiteBook
from telemetry.collect.clock import SelfTime
from telemetry.collect.names import ModelNames, legal_name, unwrapped
from telemetry.collect.observations import Observations
from telemetry.collect.placing import CallDims
from telemetry.collect.schedule import ANY_KIND
from telemetry.compiled import UnresolvedOwner
from telemetry.presence import Presence
from telemetry.scopes import close_gate, join, leave, open_gate
from telemetry.sites import KIND_OF_SIGNAL
from telemetry.torch_internals import is_recomputing, left_out

__all__ = ["CallSiteObserver"]

_NOT_CALLED = "the call site did not run in this step"
_UNKNOWN_OWNER = (
    "the owner of the call is no module of the watched model, so the site has the name of its class; all such owners "
    "of a class are one site"
)


class CallSiteObserver:
    """A Megatron observer that records into a session; outside of due steps it does nothing, and it never raises.

    Attributes:
        kinds: see below.
        listener: what to call.

    Args:
        kinds: source kinds that the session listens to by itself, in its due steps. What it gets from scopes that
            others open, ``capture_tensor_observations(session.observer, …)``, may be of any kind.
        traced: whether it also listens to compiled code.
    """

    def __init__(
        self,
        names: ModelNames,
        book: SiteBook,
        observations: Observations,
        clock: SelfTime,
        kinds: Sequence[str],
    ) -> None:
        self._owners = {id(module): (name, module, aliases) for name, module, aliases in names.owners()}
        self._book = book
        self._observations = observations
        self._clock = clock
        self.kinds = frozenset(kinds)
        self._met: set[str] = set()
        self._sites: dict[tuple[int | str, str, str], LocalSite] = {}
        self._is_open = False
        self._skipped: frozenset[str] = frozenset()
        self._gate: bool | None = None
        # Called from code that is being compiled around it, it is not compiled along.
        self.listener = left_out(self)

    def never_met(self) -> tuple[str, ...]:
        """Return the kinds that the session listens to and that no due step has met so far."""
        return tuple(sorted(self.kinds - self._met))

    def open(self, due: frozenset[str], *, traced: bool) -> None:
        """Begin a due step.

        Args:
            due: names of the schedule that are due; of the session's own kinds, the others are passed over.
            traced: whether compiled code can be listened to.
        """
        self._is_open = True
        # Not a narrower scope: compiled code would make a graph for each set of kinds.
        self._skipped = self.kinds - due
        for site in self._sites.values():
            if site.spec.kind not in self._skipped and (site.spec.kind in self.kinds or ANY_KIND in due):
                self._observations.expect(site, _NOT_CALLED)
        if self.kinds:
            self._gate = traced
            open_gate(self.kinds, traced=traced)
            join(self.listener, self.kinds)

    def close(self) -> None:
        """End the step."""
        self._is_open = False
        if self._gate is not None:
            leave(self.listener)
            close_gate(self.kinds, traced=self._gate)
            self._gate = None

    def __call__(
        self,
        owner: object,
        name: str,
        source_kind: str,
        tensor: Tensor,
        tp_shard_dim: int | None = None,
        sequence_dim: int | None = None,
        batch_dim: int | None = None,
    ) -> None:
        """Reduce one tensor into the site of its owner, name and kind; see ``telemetry.observe_tensor``."""
        if not self._is_open or source_kind in self._skipped or is_recomputing():
            return
        with self._clock:
            self._met.add(source_kind)
            owned = self._owners.get(id(owner))
            key = id(owner) if owned is not None and owned[1] is owner else _class_of(owner)
            site = self._sites.get((key, source_kind, name))
            if site is None:
                site = self._define(owner, name, source_kind, tensor, CallDims(tp_shard_dim, sequence_dim, batch_dim))
                self._sites[key, source_kind, name] = site
            if not isinstance(tensor, Tensor):
                # A call site is the user's code, which nobody type-checks against us.
                reason = f"the call showed a {type(tensor).__name__}, not a tensor"  # type: ignore[unreachable]
                self._observations.mark(site, Presence.UNSUPPORTED, reason)
                return
            self._observations.observe(site, tensor)
            if isinstance(key, str):
                self._observations.note(site, _UNKNOWN_OWNER)

    def _define(self, owner: object, name: str, kind: str, tensor: Tensor, dims: CallDims) -> LocalSite:
        found = self._owners.get(id(unwrapped(owner) if isinstance(owner, nn.Module) else owner))
        owner_name, _, aliases = found or (f"unresolved.{_class_of(owner)}", None, ())
        # A kind of a signal has sites of that signal, which this one must not run into.
        local = f"{name}:call" if kind in KIND_OF_SIGNAL.values() else name
        return self._book.add(
            kind,
            legal_name(_joined(owner_name, local)),
            tensor if isinstance(tensor, Tensor) else None,
            aliases=tuple(legal_name(_joined(alias, local)) for alias in aliases),
            dims=dims,
        )


def _class_of(owner: object) -> str:
    return owner.class_name if isinstance(owner, UnresolvedOwner) else type(owner).__name__


def _joined(owner_name: str, name: str) -> str:
    return f"{owner_name}.{name}" if owner_name else name
