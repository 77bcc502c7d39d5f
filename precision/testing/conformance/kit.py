"""Running the checks: what a check gets, how it fails, and the report of all of them."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Iterable
from typing import Any, Literal

import numpy as np

from precision.backend import Backend
from precision.errors import PrecisionError, UnsupportedError
from precision.parity.adapter import Array, ParityAdapter
from precision.parity.tiers import TierResult
from precision.policy import PrecisionPolicy
from precision.registry import get_backend


class NotConformingError(PrecisionError, AssertionError):
    """A backend does not do what the contract says; the message says what it did."""


class NotOffered(Exception):
    """The backend does not have an optional part, which is then not checked."""


@dataclasses.dataclass(frozen=True)
class Kit:
    """What a check works with.

    Attributes:
        backend: the backend.
        adapter: its parity adapter.
        patterns: how many random overflow patterns to try for each engine and number of replicas.
        replicas: the numbers of replicas to try.
        steps: of each training run.
    """

    backend: Backend
    adapter: ParityAdapter
    patterns: int = 12
    replicas: tuple[int, ...] = (2,)
    steps: int = 30

    @property
    def lows(self) -> list[str]:
        """The 16-bit dtypes that some device computes in."""
        usable = {c.dtype for c in self.backend.capabilities() if c.support in ("native", "slow")}
        return [dtype for dtype in ("bfloat16", "float16") if dtype in usable]

    def bind(self, policy: PrecisionPolicy) -> Any:
        """The policy bound to the backend."""
        return self.backend.bind(policy)

    def tensor(self, values: Any, dtype: Any = np.float32) -> Any:
        """A tensor of the framework."""
        return self.adapter.tensor(np.asarray(values).astype(dtype))

    def array(self, tensor: Any) -> Array:
        """A tensor's values."""
        return np.asarray(self.adapter.array(tensor))


def need(condition: Any, message: str) -> None:
    """Fail the check unless the condition holds."""
    if not condition:
        raise NotConformingError(message)


def need_error(kind: type[BaseException], what: str, call: Callable[..., Any], *args: Any) -> BaseException:
    """Fail the check unless ``call(*args)`` raises an error of that kind; give the error."""
    try:
        result = call(*args)
    except kind as error:
        need(str(error).strip(), f"{what} raises a {kind.__name__} that says nothing")
        return error
    except Exception as error:
        raise NotConformingError(
            f"{what} must raise {kind.__name__}; it raised {type(error).__name__}: {error}"
        ) from error
    raise NotConformingError(f"{what} must raise {kind.__name__}; it returned {result!r}")


def need_tier(result: TierResult) -> None:
    """Fail the check unless a parity tier holds."""
    need(result.checked > 0, f"{result.what}: nothing was compared")
    need(result.passed, f"{result.what}: {'; '.join(result.failures[:3])}")


@dataclasses.dataclass(frozen=True)
class Check:
    """One property of the contract.

    Attributes:
        name: the property, as a sentence that is true of a conforming backend.
        function: takes a :class:`Kit`; returns if the property holds.
    """

    name: str
    function: Callable[[Kit], None]


@dataclasses.dataclass(frozen=True)
class CheckResult:
    """The outcome of one check.

    Attributes:
        name: of the check.
        outcome: ``"passed"``, ``"failed"`` or ``"not offered"`` (an optional part that the backend does not have).
        message: what was wrong, or what is not offered.
    """

    name: str
    outcome: Literal["passed", "failed", "not offered"]
    message: str = ""


@dataclasses.dataclass(frozen=True)
class Report:
    """The outcome of the whole kit.

    Attributes:
        backend: the backend's name.
        results: one for each check, in order.
    """

    backend: str
    results: tuple[CheckResult, ...]

    @property
    def passed(self) -> bool:
        """Whether something passed and nothing failed."""
        outcomes = {result.outcome for result in self.results}
        return "passed" in outcomes and "failed" not in outcomes

    def require(self) -> Report:
        """Give the report back.

        Raises:
            NotConformingError: a check failed; names all that did.
        """
        failed = [f"- {r.name}: {r.message}" for r in self.results if r.outcome == "failed"]
        if failed:
            raise NotConformingError(f"backend {self.backend!r} does not conform:\n" + "\n".join(failed))
        return self

    def __str__(self) -> str:
        counts = {o: sum(r.outcome == o for r in self.results) for o in ("passed", "failed", "not offered")}
        lines = [f"{self.backend}: " + ", ".join(f"{n} {outcome}" for outcome, n in counts.items() if n)]
        lines += [f"{r.outcome:>11}  {r.name}" + (f": {r.message}" if r.message else "") for r in self.results]
        return "\n".join(lines)


CHECKS: list[Check] = []
"""All checks, in the order in which to mend what they find."""


def check(name: str) -> Callable[[Callable[[Kit], None]], Callable[[Kit], None]]:
    """Add a function to :data:`CHECKS`."""

    def add(function: Callable[[Kit], None]) -> Callable[[Kit], None]:
        CHECKS.append(Check(name, function))
        return function

    return add


def run_check(each: Check, kit: Kit) -> CheckResult:
    """Run one check; what it raises becomes its result."""
    try:
        each.function(kit)
    except NotOffered as missing:
        return CheckResult(each.name, "not offered", str(missing))
    except NotConformingError as error:
        return CheckResult(each.name, "failed", str(error))
    except Exception as error:  # noqa: BLE001 - whatever a backend raises is a failure of the check
        where = traceback.extract_tb(error.__traceback__)[-1]
        message = f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"
        return CheckResult(each.name, "failed", message)
    return CheckResult(each.name, "passed")


def make_kit(backend: str | Backend, **options: Any) -> Kit:
    """The kit for a backend, by name or as an object.

    Raises:
        BackendNotFoundError, BackendUnavailableError: as :func:`precision.get_backend`.
        UnsupportedError: the backend supplies no parity adapter.
    """
    found = backend if isinstance(backend, Backend) else get_backend(backend)
    adapter = found.parity()
    if not isinstance(adapter, ParityAdapter):
        raise UnsupportedError(
            f"backend {found.name!r}: parity() must give a ParityAdapter, not {type(adapter).__name__}."
        )
    return Kit(found, adapter, **options)


def run(
    backend: str | Backend,
    *,
    patterns: int = 12,
    replicas: Iterable[int] = (2,),
    steps: int = 30,
    only: str | None = None,
) -> Report:
    """Run the kit against a backend, in this process (engines of several replicas start processes of their own).

    Args:
        backend: a name (registered, an entry point or built in), or the backend.
        patterns: random overflow patterns for each engine and number of replicas.
        replicas: numbers of replicas to try, 2 to 4.
        steps: of each training run.
        only: run only the checks whose name holds this.

    Example:
        >>> print(run("jax").require())                                         # doctest: +SKIP
    """
    kit = make_kit(backend, patterns=patterns, replicas=tuple(replicas), steps=steps)
    chosen = [each for each in CHECKS if only is None or only in each.name]
    if not chosen:
        raise UnsupportedError(f"no check's name holds {only!r}. Names: {'; '.join(each.name for each in CHECKS)}.")
    return Report(kit.backend.name, tuple(run_check(each, kit) for each in chosen))


from precision.testing.conformance import checks  # noqa: E402, F401 - fills CHECKS
