"""An adapter that lives in a process of its own, so that frameworks share neither memory nor threads when measured."""

from __future__ import annotations

import dataclasses
import functools
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, Literal

from precision.backend import Backend
from precision.errors import PrecisionError
from precision.loss_scale import LossScale
from precision.parity.adapter import (
    Array,
    NetworkResult,
    NetworkSpec,
    OpResult,
    ParityAdapter,
    ReplicaResult,
    ReplicaSpec,
    TrainResult,
    TrainSpec,
)
from precision.policy import PrecisionPolicy


class WorkerError(PrecisionError):
    """A worker process failed; the message holds its own traceback."""


@dataclasses.dataclass(frozen=True)
class PolicyOnly:
    """Stands for a bound policy on this side of the process boundary; the worker binds it on the other."""

    policy: PrecisionPolicy


class RemoteAdapter(ParityAdapter):
    """A backend's adapter run in a fresh process. Use as a context manager, or call ``close``.

    Args:
        backend: the backend's name.

    Raises:
        PrecisionError: raised by the backend in the process, as it is there.
        WorkerError: the process ended, or something else failed in it.
    """

    def __init__(self, backend: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, child = context.Pipe()
        self._log = tempfile.TemporaryDirectory(prefix="precision-")
        log = os.path.join(self._log.name, "stderr")
        self._process = context.Process(target=_serve, args=(child, backend, log), daemon=True)
        self._process.start()
        child.close()
        self.name = backend
        self.flushes_subnormals, self.saturates, self.engines = self._receive()

    def __enter__(self) -> RemoteAdapter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(timeout=5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._log.cleanup()

    def run_op(self, mp: Any, case: str, family: str, inputs: Sequence[Array]) -> OpResult:
        result: OpResult = self._call("run_op", PolicyOnly(mp.policy), case, family, list(inputs))
        return result

    def autocast_ops(self, mp: Any, calls: Sequence[tuple[str, Sequence[Array]]]) -> list[OpResult]:
        results: list[OpResult] = self._call("autocast_ops", PolicyOnly(mp.policy), list(calls))
        return results

    def autocast_network(self, spec: NetworkSpec) -> NetworkResult:
        result: NetworkResult = self._call("autocast_network", spec)
        return result

    def round_to(self, values: Array, dtype: str) -> Array:
        result: Array = self._call("round_to", values, dtype)
        return result

    def trajectory(
        self,
        config: LossScale,
        finite: Sequence[bool],
        form: Literal["neutral", "native"],
        start: Mapping[str, float | int] | None = None,
    ) -> list[dict[str, float | int]]:
        result: list[dict[str, float | int]] = self._call("trajectory", config, list(finite), form, start)
        return result

    def train(self, spec: TrainSpec) -> TrainResult:
        result: TrainResult = self._call("train", spec)
        return result

    def replicated(self, engine: str, specs: Sequence[ReplicaSpec]) -> list[ReplicaResult]:
        result: list[ReplicaResult] = self._call("replicated", engine, list(specs))
        return result

    def peak_bytes(self) -> int:
        """Largest resident size the process has had, in bytes; 0 where the system does not tell."""
        result: int = self._call("peak_bytes")
        return result

    def _call(self, method: str, *args: Any) -> Any:
        try:
            self._pipe.send((method, args))
        except OSError as error:
            raise WorkerError(f"the {self.name} worker process has ended: {error}") from None
        return self._receive()

    def _receive(self) -> Any:
        try:
            ok, value = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(timeout=5)
            with open(os.path.join(self._log.name, "stderr"), encoding="utf-8", errors="replace") as log:
                said = log.read()[-2000:]
            raise WorkerError(
                f"the {self.name} worker process ended (exit code {self._process.exitcode}). It said:\n{said}"
            ) from None
        if isinstance(value, PrecisionError):
            raise value
        if not ok:
            raise WorkerError(f"the {self.name} worker process failed:\n{value}")
        return value


def _serve(pipe: Connection, name: str, log: str) -> None:
    # What frameworks print while they load and compile goes to a file: it would break the progress bar.
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    # This process is ours alone. XLA may keep float32 where a program rounds; parity is about the program's numbers.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_allow_excess_precision=false".strip()
    os.environ["KERAS_BACKEND"] = "tensorflow"
    # The suite's models are tiny: threads would spend their time waiting for each other.
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        from precision.registry import get_backend

        backend = get_backend(name)
        adapter: ParityAdapter = backend.parity()
        pipe.send((True, (adapter.flushes_subnormals, adapter.saturates, adapter.engines)))
    except Exception as error:  # noqa: BLE001 - handed to the parent, which raises it
        pipe.send((False, _told(error)))
        return
    while True:
        try:
            method, args = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            if method == "peak_bytes":
                pipe.send((True, _peak_bytes()))
                continue
            pipe.send((True, getattr(adapter, method)(*[_bound(backend, arg) for arg in args])))
        except KeyboardInterrupt:
            return
        except Exception as error:  # noqa: BLE001 - handed to the parent, which raises it
            pipe.send((False, _told(error)))


def _told(error: Exception) -> PrecisionError | str:
    """Our own errors as they are: they say what to do. Others with their traceback."""
    return error if isinstance(error, PrecisionError) else traceback.format_exc()


def _bound(backend: Backend, arg: Any) -> Any:
    return _bind(backend, arg.policy) if isinstance(arg, PolicyOnly) else arg


@functools.lru_cache(maxsize=32)
def _bind(backend: Backend, policy: PrecisionPolicy) -> Any:
    return backend.bind(policy)


def _peak_bytes() -> int:
    try:
        import resource
    except ImportError:  # not on Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) if sys.platform == "darwin" else int(peak) * 1024
