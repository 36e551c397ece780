"""Attach at the actor: every rank brings its offer, one verdict goes to all of them.

The same agreement as over the tree of the collective backend: the ballots are joined in order of rank and decide.
"""

from __future__ import annotations

from pickle import UnpicklingError

from aggregator.collective.absence import attach_timeout
from aggregator.collective.ballot import Ballot
from aggregator.definitions import DefinedSite
from aggregator.ray_actor.library import load_ray
from aggregator.ray_actor.messages import Charter, JoinRequest
from telemetry.errors import ConfigurationError, LayoutMismatchError, RankfoldError

__all__ = ["Meeting", "newcomer_refusal", "read_charter"]


class Meeting:
    """The offers of one attach, until all ranks have come."""

    def __init__(self) -> None:
        self.requests: dict[int, JoinRequest] = {}

    def add(self, request: JoinRequest) -> None:
        """Take in an offer; one that comes again takes its own place."""
        self.requests[request.rank] = request

    @property
    def world_size(self) -> int:
        """How many ranks there are, as the lowest of those that have come says; 0 before the first."""
        return self.requests[min(self.requests)].world_size if self.requests else 0

    @property
    def is_complete(self) -> bool:
        """Whether so many have come."""
        return 0 < self.world_size <= len(self.requests)

    def missing(self, waited_s: float) -> dict[int, str]:
        """Return the ranks that have not come, with how long they were waited for."""
        text = f"did not come to watch within {waited_s:g} s"
        return {rank: text for rank in range(self.world_size) if rank not in self.requests}

    def decide(self, waited_s: float) -> tuple[Charter, tuple[DefinedSite, ...]]:
        """Return what all ranks have agreed on, and the sites of all.

        Raises:
            RankfoldError: they have not; every rank raises it.
        """
        whole = Ballot()
        for rank in sorted(self.requests):
            whole.add(Ballot.from_wire(self.requests[rank].ballot))
        refusal, missing = whole.refusal(), self.missing(waited_s)
        # Ranks that differ in the size of the world differ in who is missing, too.
        if missing and not isinstance(refusal, LayoutMismatchError):
            raise attach_timeout(min(self.requests), missing)
        if refusal is not None:
            raise refusal
        proposal = read_charter(self.requests[0].charter)
        nodes = {rank: request.node for rank, request in self.requests.items()}
        return Charter(whole.agreed(proposal.offer), proposal.job, nodes), whole.sites


def read_charter(data: bytes | None) -> Charter:
    """Unpickle a charter; done by hand, so that a sink that cannot be rebuilt here is refused by name on all ranks.

    Raises:
        ConfigurationError: something in it cannot be rebuilt in the actor.
    """
    assert data is not None, "rank zero brings a charter, and so does whoever has agreed"
    try:
        charter = load_ray().cloudpickle.loads(data)
    except (ImportError, AttributeError, UnpicklingError, TypeError, ValueError, EOFError) as error:
        raise ConfigurationError(
            f"a sink or the health thresholds cannot be rebuilt in the actor: {type(error).__name__}: {error}",
            rank=0,
            remedy="install what they are made of on all nodes, for instance through the runtime_env of the job",
        ) from error
    assert isinstance(charter, Charter)
    return charter


def newcomer_refusal(request: JoinRequest, charter: Charter) -> RankfoldError | None:
    """Return why a rank cannot join the run that is under way, or None. It may believe in another world size."""
    mine, theirs = Ballot.of(charter.offer), Ballot.from_wire(request.ballot)
    terms = {name: dict(values) for name, values in theirs.terms.items() if name != "world_size"}
    mine.add(Ballot(failures=theirs.failures, terms=terms))
    return mine.refusal()
