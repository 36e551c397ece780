"""A small data-parallel job with a checkpoint, as a user writes it; what happens to it is said on its command line."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import telemetry


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step")
    parser.add_argument("--checkpoint", type=Path, help="file of the last finished step; none, no resuming")
    parser.add_argument("--kill-at", default="", help="steps at which rank 1 kills itself, one an attempt")
    parser.add_argument("--out", type=Path, required=True, help="folder for what the ranks say")
    parser.add_argument("--own-handler", action="store_true", help="a SIGTERM handler of the script's own")
    parser.add_argument("--alone", action="store_true", help="train without communication, so only telemetry waits")
    parser.add_argument("--merge-s", type=float, default=30.0)
    parser.add_argument("--group-s", type=float, default=60.0, help="timeout of the training's own group")
    return parser.parse_args()


def main() -> None:
    args = parse()
    dist.init_process_group("gloo", timeout=timedelta(seconds=args.group_s))
    rank = dist.get_rank()
    attempt = int(os.environ.get("RANKFOLD_ATTEMPT", "-1"))
    names = ("RANKFOLD_TO", "RANKFOLD_JOB", "RANKFOLD_ATTEMPT", "RANKFOLD_NONCE", "OMP_NUM_THREADS")
    told: dict[str, object] = {name: os.environ.get(name) for name in names}
    told["launch"] = [name for name in sys.modules if name.partition(".")[0] == "launch"]
    (args.out / f"told-{attempt}-{rank}.json").write_text(json.dumps(told))
    (args.out / f"pid-{attempt}-{rank}").write_text(str(os.getpid()))
    if args.own_handler:
        signal.signal(signal.SIGTERM, lambda *_: leave(args.out / f"handler-{rank}"))
    done = int(args.checkpoint.read_text()) if args.checkpoint and args.checkpoint.exists() else 0
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4))
    parallel = model if args.alone else DistributedDataParallel(model)
    deadlines = telemetry.Deadlines(attach_s=60, merge_s=args.merge_s, close_s=args.merge_s)
    kill_at = [int(step) for step in args.kill_at.split(",") if step]
    session = telemetry.watch(parallel, every=1, deadlines=deadlines, resume_step=done + 1 if done else None)
    with session:
        for step in range(done + 1, args.steps + 1):
            with session.step(step):
                parallel(torch.full((2, 4), float(rank + step))).sum().backward()
            if rank == 1 and 0 <= attempt < len(kill_at) and kill_at[attempt] == step:
                time.sleep(1.0)  # The step is merged elsewhere; it has to leave this process first.
                os.kill(os.getpid(), signal.SIGKILL)
            if args.checkpoint and not args.alone and step % 2 == 0:
                dist.barrier()
                if rank == 0:
                    write(args.checkpoint, str(step))
            (args.out / f"at-{rank}").write_text(str(step))
            time.sleep(args.pause)
            if (args.out / "stop").exists():
                break
    if rank == 0:
        print(session.report, flush=True)
    failure = session.report.merge.failure
    missing = sorted(session.report.merge.missing_ranks)
    (args.out / f"report-{rank}.json").write_text(json.dumps({"failure": str(failure), "missing": missing}))
    if not args.alone:
        dist.destroy_process_group()


def leave(mark: Path) -> None:
    mark.touch()
    raise SystemExit(143)


def write(path: Path, text: str) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(text)
    draft.replace(path)


if __name__ == "__main__":
    main()
