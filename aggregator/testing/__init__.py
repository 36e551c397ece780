"""For whoever writes a sink or tests what comes after the packet: a contract suite, and steps made from tensors."""

from aggregator.testing.packets import make_packet, make_site, make_step, make_steps
from aggregator.testing.sink_contract import SinkContract

__all__ = ["SinkContract", "make_packet", "make_site", "make_step", "make_steps"]
