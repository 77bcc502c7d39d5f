"""Runs that are killed by SIGKILL, at a step or in the middle of a save, and resumed until they are done.

The ranks are forked, so that a resume takes a fraction of a second.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from precision import CheckpointStore
from precision.testing import Fault, FaultPlan
from precision_torch.forks import fork_ranks
from tests.distributed.workers_torch import engine, everything, train_on

STEPS, EVERY = 10, 2
WORLDS = {"alone": 1, "masters": 1, "ddp": 2, "fsdp2": 2}


def overflows(world: int) -> list[Fault]:
    """The overflows of the run itself, killed or not."""
    return [Fault("overflow", 3, world - 1), Fault("nan", 6, 0)]


def one_rank(how: str, rank: int, world: int, folder: Path, attempt: int, kill: dict[str, Any] | None) -> Any:
    """Train from the last checkpoint to the end, or to the kill; gives the final state."""
    if world > 1:
        store = folder / f"store{attempt}"
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
        )
    mp, model, call, optimizer = engine(how, rank, world)
    torch.manual_seed(50 + rank)
    checkpoints = mp.checkpoints(folder / "checkpoints", keep=2)
    restored = checkpoints.restore(call, optimizer)
    start = 0 if restored is None else restored.step
    if restored is not None and restored.extra != {"batch": 7 * restored.step}:
        raise RuntimeError(f"extra came back as {restored.extra}")
    faults = overflows(world)
    mine = kill is not None and kill["rank"] == rank
    if mine and kill["step"] is not None and kill["step"] >= start:
        faults.append(Fault("kill", kill["step"], rank))

    def after(step: int) -> None:
        if (step + 1) % EVERY == 0 and step + 1 > start:
            if mine and kill["step"] is None and kill["save"] == step + 1:
                threading.Thread(target=_die_after, args=(kill["seconds"],), daemon=True).start()
            checkpoints.save(step + 1, call, optimizer, extra={"batch": 7 * (step + 1)})

    train_on(mp, call, optimizer, rank, start, STEPS, FaultPlan(faults), after)
    return everything(mp, model, optimizer), checkpoints.steps()


def _die_after(seconds: float) -> None:
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)


def attempt_run(how: str, folder: Path, attempt: int, kill: dict[str, Any] | None) -> list[Any] | None:
    """The ranks' final states; None if they were killed."""
    world = WORLDS[how]
    return fork_ranks(world, lambda rank: one_rank(how, rank, world, folder, attempt, kill))


def killed_runs(folder: str, engines: list[str], kills: int, seed: int) -> dict[str, Any]:
    """For each engine an unkilled run, and one that is killed again and again; their final states and what happened."""
    out: dict[str, Any] = {}
    rng = random.Random(seed)
    for how in engines:
        ranks = WORLDS[how]
        whole, broken = Path(folder, how, "whole"), Path(folder, how, "broken")
        whole.mkdir(parents=True)
        broken.mkdir(parents=True)
        unkilled = attempt_run(how, whole, 0, None)
        resumed_at, during, attempt, finished = [], 0, 0, None
        while finished is None:
            done = _latest(broken)
            kill: dict[str, Any] | None = None
            if attempt < kills:
                kill = {"rank": rng.randrange(ranks), "step": None, "save": None, "seconds": 0.0}
                if attempt % 3 == 0:
                    kill["step"] = min(done + rng.randrange(3), STEPS - 1)
                else:  # somewhere in the next save, or just after it
                    kill.update(save=min(done + EVERY, STEPS), seconds=rng.uniform(0.0, 0.05))
                    during += 1
            finished = attempt_run(how, broken, attempt, kill)
            attempt += 1
            if finished is None:
                resumed_at.append(_latest(broken))
        out[how] = {
            "equal": [a == b for a, b in zip(unkilled or [], finished, strict=True)],
            "scale": [final["scale"] for final, _ in finished],
            "steps": [steps for _, steps in finished],
            "resumes": len(resumed_at),
            "resumed at": resumed_at,
            "during a save": during,
            "left over": sorted(p.name for p in (broken / "checkpoints").iterdir() if not p.name.startswith("step-")),
        }
    return out


def _latest(folder: Path) -> int:
    return CheckpointStore(folder / "checkpoints").latest() or 0
