"""Runs of every kind that a report has to say the truth about, written by the real writer."""

from dataclasses import replace

import numpy as np
import torch

from aggregator.catalogue import Catalogue
from aggregator.history import HistoryWriter
from aggregator.testing import make_packet, make_site, make_step
from telemetry.packet import StepFacts
from telemetry.presence import Presence
from telemetry.replicas import ReplicaTable
from telemetry.summary import DEFAULT_DESCRIPTOR, summarize

PARTS = (
    "embed",
    "layers.0.attention.qkv",
    "layers.0.mlp",
    "layers.10.attention.qkv",
    "layers.10.mlp",
    "model.decoder.with.a.very.long.name.that.no.axis.has.room.for.layers.11.feed_forward.gate",
    "head",
)
KINDS = ("activation", "activation_grad", "parameter", "gradient", "update")
POPULATION = {"shape": (8, 8), "placements": (("dp", "shard(0)"),)}
WEIGHT = {"shape": (8, 8), "numel": 64, "placements": (("dp", "replica"),)}
SITES = [
    make_site(name, kind, **(POPULATION if kind.startswith("activation") else WEIGHT))
    for kind in KINDS
    for name in PARTS
]
HEAD = next(site for site in SITES if (site.name, site.kind) == ("head", "parameter"))
ACTIVATIONS = SITES[: len(PARTS)]
RUN = {"model": "Decoder", "world_size": 4, "hostname": "node-7", "rankfold": "0.1.0", "torch": "2.13.0",
       "every": dict.fromkeys(KINDS, 5), "hist_every": 10, "health": {"gradient_ratio": 100.0},
       "layout": {"axes": [["pp", 2], ["dp", 2]], "declared": True, "expert_axes": None}}  # fmt: skip
STEPS = range(0, 60, 5)
LOST = {3: "peer_lost: no answer for 30 s"}


def facts(step, **changes):
    told = {"num_applied": 4, "step_s": 0.5, "self_s": 0.01 + 0.001 * (step % 3), "read_bytes": 2**20,
            "transfer_s": 0.002, "wall_time_s": 1.7e9 + step}  # fmt: skip
    return StepFacts(**{**told, **changes})


def elements(site, step):
    """Elements of a site at a step: larger with depth, smaller with time, another size for each kind."""
    draw = np.random.default_rng([step, KINDS.index(site.kind), PARTS.index(site.name)])
    size = 10.0 ** (-KINDS.index(site.kind)) * 1.5 ** PARTS.index(site.name) / (1 + step / 30)
    return torch.from_numpy(draw.normal(0, size, 64)).float()


def packet(step, *, special=None, unobserved=None, histograms=True, sites=SITES, findings=(), world_size=4, **changes):
    """A step of which ``special`` replaces elements by site, and ``unobserved`` leaves sites out with a reason."""
    missing = unobserved or {}
    grid = DEFAULT_DESCRIPTOR if histograms and step % 10 == 0 else None
    observed = {
        site: summarize((special or {}).get(site, elements(site, step)), histogram=grid)
        for site in sites
        if site not in missing
    }
    told = facts(step, **changes)
    return make_packet(step, observed, unobserved=missing, facts=told, findings=findings, world_size=world_size)


def write(path, packets, run=RUN, resume_step=None, absent=None):
    """Write merged steps; ``absent`` maps a step to the ranks that are missing in it, with why."""
    writer, catalogue = HistoryWriter.create(path, run, DEFAULT_DESCRIPTOR, resume_step), Catalogue()
    for one in packets:
        gone = (absent or {}).get(one.step)
        ranks = tuple(rank for rank in range(one.world_size) if rank not in (gone or {}))
        writer.append(make_step(replace(one, ranks=ranks), catalogue, gone))
    writer.close()
    return path


def healthy(path):
    return write(path, [packet(step) for step in STEPS])


def troubled(path):
    """NaN, zero, missing, empty, another replica, a rank that went away, a replay, and findings about some of it."""
    qkv, mlp, empty, dead = ACTIVATIONS[1], ACTIVATIONS[2], ACTIVATIONS[3], ACTIVATIONS[4]
    some, none = elements(qkv, 20), torch.full((64,), float("nan"))
    some[:3], some[3] = float("nan"), float("inf")
    special = {20: {qkv: some, dead: torch.zeros(64)}, 25: {qkv: none, dead: torch.zeros(64), empty: torch.zeros(0)}}
    left = {mlp: (Presence.CAPTURE_FAILED, "<b>RuntimeError</b>: out of memory & more")}
    nonfinite = {"code": "nonfinite_values", "message": "3 NaN, 1 +inf of 64 elements, first on rank 0", "rank": 0,
                 "site": qkv.name, "kind": qkv.kind, "nan": 3, "pos_inf": 1, "total": 64}  # fmt: skip
    found = {20: [nonfinite], 25: [nonfinite]}
    first = [packet(step, special=special.get(step)) for step in STEPS if step <= 15]
    write(path, first)
    again = [
        disagreeing(packet(step, special=special.get(step), unobserved=left if step == 30 else None,
                           findings=found.get(step, ()), num_budget_dropped=2 if step == 45 else 0), step)
        for step in STEPS if step >= 10
    ]  # fmt: skip
    return write(path, again, resume_step=10, absent={35: LOST, 40: LOST})


def disagreeing(one, step):
    """Add what two ranks say of the bits of ``HEAD``: another thing at three steps."""
    ids, zeros, digests = np.array([HEAD.site_id], np.uint64), np.zeros(1, np.int64), np.ones((1, 4))
    differs = step in (30, 35, 40)
    second = ReplicaTable.of_rank(3, ids, zeros, zeros + 9 * differs, digests * (1.25 if differs else 1.0))
    return replace(one, replicas=ReplicaTable.of_rank(0, ids, zeros, zeros, digests).merge(second))


def without_histograms(path):
    return write(path, [packet(step, histograms=False) for step in STEPS], run={**RUN, "hist_every": None})


def without_steps(path):
    return write(path, [])


def call_sites_only(path):
    site = make_site("router.logits", "router_logits")
    return write(path, [make_packet(step, {site: summarize(torch.ones(4))}) for step in range(3)], run={})


WRITERS = (healthy, troubled, without_histograms, without_steps, call_sites_only)
