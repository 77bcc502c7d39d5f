"""Faults to inject into a training run: pure data that says what goes wrong at which step on which rank.

Values go wrong by multiplication, which works on every framework's tensors, eager or compiled: the loss (or one gradient)
times :meth:`FaultPlan.factor`. What must come of it follows from the plan alone: :meth:`FaultPlan.trajectory`.
"""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import time
from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args

import numpy as np

from precision.errors import PolicyError
from precision.loss_scale import LossScale, initial_state, next_state, state_to_dict

Kind = Literal["overflow", "nan", "delay", "kill"]
KINDS: tuple[str, ...] = get_args(Kind)
_FACTORS = {"overflow": math.inf, "nan": math.nan}


@dataclasses.dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        kind: ``"overflow"`` (the factor is infinite), ``"nan"``, ``"delay"`` (the rank sleeps) or ``"kill"`` (it ends by
            SIGKILL, with no chance to clean up).
        step: at which step, counted from 0.
        rank: on which rank or replica; None for all.
        seconds: how long a delay is.

    Raises:
        PolicyError: an unknown kind, a negative step or rank, or seconds that do not go with the kind.
    """

    kind: Kind
    step: int
    rank: int | None = None
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise PolicyError(f"a fault's kind is one of {', '.join(KINDS)}; not {self.kind!r}.")
        for name, value in (("step", self.step), ("rank", self.rank)):
            none = name == "rank" and value is None
            if not none and (isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0):
                raise PolicyError(f"a fault's {name} is a whole number of at least 0; not {value!r}.")
        if (self.kind == "delay") != (self.seconds > 0) or not math.isfinite(self.seconds):
            raise PolicyError(
                f"seconds is above 0 for a delay, and left out for others; {self.kind} has {self.seconds!r}."
            )

    def hits(self, step: int, rank: int) -> bool:
        """Whether it strikes at a step on a rank."""
        return self.step == step and self.rank in (None, rank)


class FaultPlan:
    """All the faults of a run. The same plan is given to every rank.

    Args:
        faults: in any order.

    Example:
        >>> plan = FaultPlan([Fault("overflow", step=2, rank=1), Fault("nan", step=4)])
        >>> plan.factor(2, 0), plan.factor(2, 1)
        (1.0, inf)
        >>> plan.finite(6)
        [True, True, False, True, False, True]
        >>> [state["scale"] for state in plan.trajectory(LossScale(mode="dynamic", initial=8.0), 6)]
        [8.0, 8.0, 4.0, 4.0, 2.0, 2.0]
    """

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self.faults = tuple(faults)
        for fault in self.faults:
            if not isinstance(fault, Fault):
                raise PolicyError(f"a FaultPlan takes Faults, not {type(fault).__name__}.")

    @classmethod
    def random(
        cls,
        seed: int,
        steps: int,
        ranks: int,
        rate: float = 0.1,
        kinds: Sequence[Kind] = ("overflow", "nan"),
        seconds: float = 0.01,
    ) -> FaultPlan:
        """Faults at random: at each step each rank has one with probability ``rate``.

        Args:
            seed: the same seed gives the same plan.
            steps, ranks: the extent of the run.
            rate: probability, 0 to 1.
            kinds: chosen from evenly.
            seconds: of each delay.
        """
        if not 0 <= rate <= 1:
            raise PolicyError(f"rate is a probability, 0 to 1; not {rate!r}.")
        rng = np.random.default_rng(seed)
        hits = np.argwhere(rng.random((steps, ranks)) < rate)
        chosen = rng.integers(0, len(kinds), len(hits))
        return cls(
            Fault(kinds[k], int(step), int(rank), seconds if kinds[k] == "delay" else 0.0)
            for (step, rank), k in zip(hits, chosen, strict=True)
        )

    @classmethod
    def from_finite(cls, finite: Any) -> FaultPlan:
        """An overflow wherever ``finite[step][rank]`` (bool, shape ``(steps, ranks)``) is False."""
        return cls(Fault("overflow", int(step), int(rank)) for step, rank in np.argwhere(~np.asarray(finite, bool)))

    def factor(self, step: int, rank: int = 0) -> float:
        """What to multiply the loss (or a gradient) with: 1, infinity or NaN (NaN where both would strike)."""
        factors = [_FACTORS[f.kind] for f in self.faults if f.kind in _FACTORS and f.hits(step, rank)]
        return math.nan if any(map(math.isnan, factors)) else max(factors, default=1.0)

    def factors(self, steps: int, ranks: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        """All the factors, float32 of shape ``(steps, ranks)``, for a compiled loop to index."""
        return np.array([[self.factor(s, r) for r in range(ranks)] for s in range(steps)], np.float32).reshape(
            steps, ranks
        )

    def wait(self, step: int, rank: int = 0) -> None:
        """Call it at the start of a step: sleeps through a delay, and does not return from a kill."""
        for fault in self.faults:
            if fault.hits(step, rank):
                if fault.kind == "delay":
                    time.sleep(fault.seconds)
                elif fault.kind == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)

    def finite(self, steps: int) -> list[bool]:
        """Whether each step is finite on all ranks: the flag that all of them must agree on."""
        bad = {fault.step for fault in self.faults if fault.kind in _FACTORS}
        return [step not in bad for step in range(steps)]

    def trajectory(self, config: LossScale, steps: int) -> list[dict[str, float | int]]:
        """The loss-scale state, as ``state_dict`` gives it, that every rank must hold after each step."""
        state, states = initial_state(config), []
        for finite in self.finite(steps):
            state = next_state(config, state, np.bool_(finite), np)
            states.append(state_to_dict(state))
        return states

    def __repr__(self) -> str:
        return f"FaultPlan({list(self.faults)!r})"
