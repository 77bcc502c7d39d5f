"""Launch after launch of ranks, forked from one process that has imported PyTorch."""

from __future__ import annotations

from typing import Any

import torch.distributed.checkpoint
import torch.distributed.fsdp.sharded_grad_scaler  # noqa: F401

from precision.testing import free_port
from precision_torch.forks import fork_ranks, preload

preload()


def launches(rank: int, world: int, port: int, wanted: list[tuple[str, int, tuple[Any, ...]]]) -> list[list[Any]]:
    """For ``run_ranks`` with one rank. Each launch: the worker's name, how many ranks, and arguments beside rank, world, port."""
    from tests.distributed import killed_torch, workers_torch

    results = []
    for name, count, args in wanted:
        if name == "killed_runs":  # which forks ranks itself
            results.append([killed_torch.killed_runs(*args)])
            continue
        call, free = getattr(workers_torch, name), free_port()
        results.append(
            fork_ranks(count, lambda r, call=call, count=count, free=free, args=args: call(r, count, free, *args))
        )
    return results
