"""Functions that the tests of ``run_ranks`` call in other processes."""

import os
import signal
import time

from precision import NonFiniteGradientsError


def tell(rank: int, world: int, port: int, factor: int) -> tuple[int, int, bool, str]:
    return rank * factor, world, 0 < port < 65536, os.environ.get("RANKS_TEST", "")


def fail(rank: int, world: int, port: int) -> int:
    print("rank", rank, "says so")
    if rank == 1:
        raise NonFiniteGradientsError("diverged", scales=[2.0])
    time.sleep(60)
    return 0


def killed(rank: int, world: int, port: int) -> int:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def sleep(rank: int, world: int, port: int) -> None:
    time.sleep(60)
