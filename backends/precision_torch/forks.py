"""Ranks forked from a process that has imported PyTorch: one start of it for all of them, since that takes longest.

For tests and the parity suite, on Linux. The process that forks must not have computed anything: PyTorch's autograd cannot be
forked once it ran. :func:`precision.testing.run_ranks` with one rank gives such a process, and bounds the time.
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
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from precision.testing import RankError

POSSIBLE = sys.platform == "linux"
"""Whether ranks can be forked here."""


def preload() -> None:
    """Import what training imports late, once for all ranks."""
    import torch._dynamo  # an optimizer's first step does
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel  # noqa: F401

    import precision_torch  # noqa: F401


def fork_ranks(world: int, act: Callable[[int], Any], timeout: float = 90.0) -> list[Any] | None:
    """Call ``act(rank)`` in processes of their own; results by rank, or None if a rank was killed by SIGKILL.

    When one ends badly the others are killed, as a launcher does.

    Args:
        world: how many.
        act: its result is pickled.
        timeout: seconds for all of it.

    Raises:
        RuntimeError: a rank failed; with its traceback.
        TimeoutError: the time is up; all are killed.
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
                    raise RankError(f"rank {rank} failed:\n{(folder / f'error{rank}').read_text()[-3000:]}")
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
        register_module_forward_pre_hook(_keep)
        (folder / f"result{rank}").write_bytes(pickle.dumps(act(rank)))
        code = 0
    except BaseException:  # noqa: BLE001 - told to the parent, whatever it is
        (folder / f"error{rank}").write_text(traceback.format_exc())
    finally:
        sys.stderr.flush()
        os._exit(code)


_KEPT: list[Any] = []


def _keep(module: Any, inputs: Any) -> None:
    """Keep a DDP module until the rank exits, which it does without destroying anything.

    PyTorch destroys DDP's reducer, and with it a gloo group, while it holds the interpreter's lock; the group's thread may need
    that lock to let go of the last collective, and then each waits for the other for ever.
    """
    if isinstance(module, DistributedDataParallel) and not any(kept is module for kept in _KEPT):
        _KEPT.append(module)


def _kill(children: dict[int, int]) -> None:
    for pid in children:
        os.kill(pid, signal.SIGKILL)
