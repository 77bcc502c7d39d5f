"""``mp.check``: ends a run that only skips, with the names of the gradients that are not finite.

The optimizer's state carries one flag a gradient; their names are noted here when a step is traced.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from precision.divergence import NonFiniteTensor
from precision.errors import LossScaleError
from precision_jax.leaves import dotted
from precision_jax.scaler import JaxLossScaler, on_host


def leaves_or_none(tree: Any) -> list[Any]:
    """The leaves of a tree, None among them: the same positions in parameters and in gradients that lack some."""
    return jax.tree.leaves(tree, is_leaf=_is_none)


def _is_none(node: Any) -> bool:
    return node is None


class Divergence:
    """Looks at optimizer states every so many calls, so that no step waits for the device.

    Args:
        scaler: the bound policy's.
    """

    def __init__(self, scaler: JaxLossScaler) -> None:
        self._scaler = scaler
        self._calls = 0
        self._names: list[tuple[str, ...]] = []

    def names(self, tree: Any) -> tuple[str, ...]:
        """Note, and give, the names of a tree of parameters or gradients, position by position."""
        pairs = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_none)
        found = tuple(dotted(path) or "the parameter" for path, _ in pairs)
        if found not in self._names:
            self._names.append(found)
        return found

    def check(self, *states: Any) -> None:
        """See :meth:`precision_jax.JaxPolicy.check`."""
        for state in states:
            if not hasattr(state, "loss_scale") or not hasattr(state, "finite_leaves"):
                raise LossScaleError(
                    f"mp.check takes the states of mp.optimizer (OptimizerState), not {type(state).__name__}."
                )
        limit = self._scaler.config.max_consecutive_skips
        if limit is None:
            return
        self._calls += 1
        if self._calls % limit == 0:
            for state in states:
                self._scaler.check(state.loss_scale, lambda state=state: self._tensors(state))

    def _tensors(self, state: Any) -> Iterator[NonFiniteTensor]:
        if state.finite_leaves is None:  # of a state made without max_consecutive_skips
            return
        flags: Any = on_host(state.finite_leaves)
        flags = np.all(flags.reshape(-1, flags.shape[-1]), axis=0)  # pmap and vmap keep a row a replica
        for index in np.flatnonzero(~flags):
            known = [names[index] for names in self._names if len(names) == len(flags)]
            yield NonFiniteTensor(" or ".join(dict.fromkeys(known)) or f"gradient {index} of {len(flags)}")
