"""Ranks forked from a process that has imported PyTorch: many launches for one start of it, since that takes longest.

Called through ``precision.testing.run_ranks`` with one rank, which bounds the time and leaves no process behind. The
process itself computes nothing: PyTorch's autograd cannot be forked once it ran.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # imported by the first step of an optimizer: once here, not in every process
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.fsdp.sharded_grad_scaler
import torch.distributed.tensor.parallel

import precision_torch  # noqa: F401 - likewise
from precision.testing import free_port


def fork_ranks(world: int, act: Callable[[int], Any], timeout: float = 90.0) -> list[Any] | None:
    """Call ``act(rank)`` in processes of their own; results by rank, or None if a rank was killed by SIGKILL.

    When one ends badly the others are killed, as a launcher does.
    """
    with tempfile.TemporaryDirectory(prefix="precision-forks-") as name:
        folder = Path(name)
        children = {_fork(rank, act, folder): rank for rank in range(world)}
        killed, deadline = False, time.monotonic() + timeout
        while children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                if time.monotonic() > deadline:
                    _kill(children)
                    raise TimeoutError(f"ranks {sorted(children.values())} did not end in {timeout:g} s")
                time.sleep(0.002)
                continue
            rank = children.pop(pid)
            if status != 0 and not killed:
                if not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL):
                    _kill(children)
                    raise RuntimeError(f"rank {rank} failed:\n{(folder / f'error{rank}').read_text()[-3000:]}")
                killed = True
                _kill(children)
        return None if killed else [pickle.loads((folder / f"result{r}").read_bytes()) for r in range(world)]


def _fork(rank: int, act: Callable[[int], Any], folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        torch.set_num_threads(1)
        (folder / f"result{rank}").write_bytes(pickle.dumps(act(rank)))
        code = 0
    except BaseException:
        (folder / f"error{rank}").write_text(traceback.format_exc())
    finally:
        sys.stderr.flush()
        os._exit(code)


def _kill(children: dict[int, int]) -> None:
    for pid in children:
        os.kill(pid, signal.SIGKILL)


def launches(rank: int, world: int, port: int, wanted: list[tuple[str, int, tuple[Any, ...]]]) -> list[list[Any]]:
    """Launch after launch: the worker's name, how many ranks, and arguments beside rank, world and port."""
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
