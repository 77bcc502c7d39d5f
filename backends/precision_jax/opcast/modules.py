"""The arguments of a call: any pytrees, and Flax NNX modules whose state a call may change.

A function is traced on copies. What it writes into a module's variables comes out of the trace as results, and is written
into the caller's module.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import jax

from precision_jax.leaves import dotted
from precision_jax.opcast.notes import Note


def _nnx() -> Any:
    return sys.modules.get("flax.nnx")  # whoever has such a module has imported it


def is_module(node: Any) -> bool:
    """Whether a node is a Flax NNX module."""
    nnx = _nnx()
    return nnx is not None and isinstance(node, nnx.Module)


class Call:
    """The callee (None unless it is a pytree), the arguments and keywords of a call.

    Attributes:
        tree: what is traced in their place.
        stateful: whether there are modules among them.
    """

    def __init__(self, whole: tuple[Any, Any, Any]) -> None:
        self._whole = whole
        self.stateful = bool(_modules(whole))
        self._graph: Any = None
        self._inner: Any = None
        self.tree: Any = whole
        if self.stateful:
            self._graph, self.tree = _nnx().split(whole)

    def trees(self) -> list[Any]:
        """The trees that may hold parameters, for the report of rules that match nothing."""
        fun, args, kwargs = self._whole
        return [*args, *kwargs.values(), *([] if fun is None else [fun])]

    def rebuild(self, tree: Any) -> Any:
        """Callee, arguments and keywords from a traced tree."""
        self._inner = _nnx().merge(self._graph, tree) if self.stateful else tree
        return self._inner

    def states(self) -> tuple[list[Any], Any]:
        """The state that the function has left in its copies of the modules."""
        if not self.stateful:
            return [], None
        leaves, structure = jax.tree.flatten([_nnx().state(module) for module in _modules(self._inner)])
        self._inner = None
        return leaves, structure

    def update(self, structure: Any, leaves: Sequence[Any]) -> None:
        """Write a state into the caller's modules."""
        if not self.stateful:
            return
        for module, state in zip(_modules(self._whole), jax.tree.unflatten(structure, list(leaves)), strict=True):
            _nnx().update(module, state)

    def note(self, path: Sequence[Any], kept: set[int | str]) -> Note:
        """What is known of a leaf of :attr:`tree`: its path within its argument, and whether that is kept."""
        group = _key(path[0])
        if group == 0:
            return Note(path=dotted(path[1:]), stored=True, whole=True)
        return Note(path=dotted(path[2:]), stored=True, whole=True, pinned=2 if _key(path[1]) in kept else 0)


def _modules(tree: Any) -> list[Any]:
    return [node for node in jax.tree.leaves(tree, is_leaf=is_module) if is_module(node)]


def _key(entry: Any) -> Any:
    return getattr(entry, "key", getattr(entry, "idx", getattr(entry, "name", entry)))
