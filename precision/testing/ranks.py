"""Running the ranks of a distributed test as processes on this machine, with bounded time and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from precision.errors import PrecisionError


class RankError(PrecisionError, RuntimeError):
    """A rank failed, was killed, or did not end in time. The message holds what the ranks wrote.

    Attributes:
        codes: exit code of each rank; negative for the signal that ended it, None if it ran out of time.
        errors: for each rank the exception it ended with, if that could be sent.
    """

    def __init__(self, message: str, codes: Sequence[int | None] = (), errors: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.codes = tuple(codes)
        self.errors = tuple(errors)


def free_port() -> int:
    """A TCP port on the loopback address that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def run_ranks(
    function: Callable[..., Any],
    count: int,
    args: Sequence[Any] = (),
    *,
    env: Mapping[str, str] | None = None,
    timeout: float = 120.0,
    check: bool = True,
) -> list[Any]:
    """Call ``function(rank, world, port, *args)`` in ``count`` processes of their own, and give what each returned.

    Args:
        function: a module's function; the processes import it by its module's name. Arguments and results are pickled.
        count: the number of ranks.
        args: further arguments, the same for all.
        env: environment variables beside this process's own.
        timeout: seconds for all of it; then every rank is killed.
        check: whether a rank that fails or is killed raises here, the others being killed at once. With False every rank
            is waited for, and its exception (or a :class:`RankError` with its exit code) stands in its place.

    Returns:
        Results by rank.

    Raises:
        RankError: as said under ``check``; or, in any case, when time is up.
    """
    if "<" in function.__qualname__ or function.__module__ == "__main__":
        raise RankError(f"{function.__qualname__} must be a function of a module that can be imported.")
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="precision-ranks-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        call = pickle.dumps((function, count, port, tuple(args)))  # the function by its name
        (folder / "call").write_bytes(pickle.dumps((list(sys.path), call)))
        ranks = []
        for rank in range(count):
            log = stack.enter_context((folder / f"log{rank}").open("wb"))
            command = [sys.executable, "-c", _START, str(folder), str(rank)]
            own = {**os.environ, **(env or {}), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            ranks.append(
                subprocess.Popen(
                    command,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    env=own,
                    start_new_session=True,
                )
            )
        try:
            late = _wait(ranks, time.monotonic() + timeout, check)
        finally:
            for process in ranks:
                _end(process)
        codes = [None if late and process in late else process.returncode for process in ranks]
        outcomes = [_outcome(folder, rank, code) for rank, code in enumerate(codes)]
        if late or (check and any(not ok for ok, _ in outcomes)):
            raise _failure(function.__qualname__, folder, codes, outcomes, timeout, bool(late))
        return [value for _, value in outcomes]


_START = "import sys; from precision.testing.ranks import _rank; _rank(sys.argv[1], int(sys.argv[2]))"


def _wait(ranks: list[subprocess.Popen[bytes]], deadline: float, check: bool) -> list[subprocess.Popen[bytes]]:
    """Wait for all, or for the first failure; give those that ran out of time."""
    while any(process.poll() is None for process in ranks):
        if check and any(process.poll() not in (None, 0) for process in ranks):
            time.sleep(1.0)  # others that fail of the same cause tell of it
            return []
        if time.monotonic() > deadline:
            return [process for process in ranks if process.poll() is None]
        time.sleep(0.02)
    return []


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a rank with all that it started."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    elif process.poll() is None:
        process.kill()
    process.wait()


def _outcome(folder: Path, rank: int, code: int | None) -> tuple[bool, Any]:
    try:
        ok, value = pickle.loads((folder / f"result{rank}").read_bytes())
        return bool(ok), value
    except (OSError, EOFError, pickle.UnpicklingError):
        return False, RankError(f"rank {rank} ended with exit code {code}. It wrote:\n{_log(folder, rank)}", [code])


def _failure(
    name: str, folder: Path, codes: list[int | None], outcomes: list[tuple[bool, Any]], timeout: float, late: bool
) -> RankError:
    lines = [f"{name} did not end within {timeout:g} s." if late else f"{name} failed."]
    for rank, (code, (ok, value)) in enumerate(zip(codes, outcomes, strict=True)):
        if not ok:
            lines.append(f"--- rank {rank} (exit code {code}): {value}\n{_log(folder, rank)}")
    return RankError("\n".join(lines), codes, [None if ok else value for ok, value in outcomes])


def _log(folder: Path, rank: int) -> str:
    return (folder / f"log{rank}").read_text(encoding="utf-8", errors="replace")[-3000:]


def _rank(folder: str, rank: int) -> None:
    """What each process runs."""
    result = Path(folder) / f"result{rank}"
    sys.path[:], call = pickle.loads((Path(folder) / "call").read_bytes())
    try:
        function, world, port, args = pickle.loads(call)
        content = pickle.dumps((True, function(rank, world, port, *args)))
    except BaseException as error:  # noqa: BLE001 - told to the parent
        traceback.print_exc()
        try:
            content = pickle.dumps((False, error))
            pickle.loads(content)
        except Exception:  # noqa: BLE001 - an exception that does not pickle
            content = pickle.dumps((False, RankError(f"{type(error).__name__}: {error}")))
        _write(result, content)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # at once: destructors of a broken process group may wait for the others
    _write(result, content)


def _write(path: Path, content: bytes) -> None:
    temporary = path.with_suffix(".part")
    temporary.write_bytes(content)
    temporary.replace(path)
