"""``autocast``: a function of any pytrees is traced once for its arguments' shapes, and evaluated again under the policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from precision.backend import check_leaf
from precision_jax.leaves import cast_leaf, is_array
from precision_jax.opcast import _private, control, derivatives, islands, marks, modules
from precision_jax.opcast.cache import Kept
from precision_jax.opcast.closures import fingerprint
from precision_jax.opcast.paths import Rules
from precision_jax.opcast.rewrite import Rewriter

if TYPE_CHECKING:
    from precision_jax.bound import JaxPolicy

del control, derivatives  # they fill the table of handlers


def is_traced(leaf: Any) -> bool:
    """Whether a leaf is traced, and not a setting."""
    return is_array(leaf) and not isinstance(leaf, jax.ShapeDtypeStruct)


class Autocast:
    """A function under a policy, op by op.

    Args:
        mp: the bound policy.
        fun: the function, or a callable pytree whose leaves are traced as an argument's are.
        kept: which arguments are never cast; given the number of positional ones, their positions and names.
        output: the dtype that floating results leave in, or None to leave them as they come.
        recompute: see :meth:`precision_jax.JaxPolicy.autocast`.
    """

    def __init__(
        self,
        mp: JaxPolicy,
        fun: Callable[..., Any],
        kept: Callable[[int], set[int | str]],
        output: Any,
        recompute: bool,
        module: bool,
    ) -> None:
        self.mp, self.fun, self.kept, self.output, self.recompute, self.module = (
            mp,
            fun,
            kept,
            output,
            recompute,
            module,
        )
        self._traced = Kept(64)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = modules.Call((self.fun if self.module else None, args, kwargs))
        pairs, structure = jax.tree_util.tree_flatten_with_path(call.tree)
        for _, leaf in pairs:
            check_leaf(leaf, "jax")
        names = self.kept(len(args))
        values = [leaf for _, leaf in pairs if is_traced(leaf)]
        notes = [call.note(path, names) for path, leaf in pairs if is_traced(leaf)]
        settings = [(i, leaf) for i, (_, leaf) in enumerate(pairs) if not is_traced(leaf)]

        def make() -> _Program:
            return _Program(self, call, structure, settings, values)

        key = self._key(structure, settings, values, call)
        program = make() if key is None else self._traced.get(key, make)
        if program.open_over and key is not None:  # it holds values of the trace around it: good for this call only
            self._traced.forget(key)
        rules = Rules(self.mp.policy)
        rewriter = Rewriter(rules, self.recompute, program.islands)
        with marks.region(marks.DECLARED):
            results = rewriter.run_closed(program.closed, values, notes, ())[0]
            results, states = program.split(results)
            if self.output is not None:
                results = [cast_leaf(x, self.output) for x in results]
        self.mp.rules.maybe_parameters(*call.trees(), scopes=rules.seen)
        call.update(program.state_tree, states)
        return program.join(results)

    def _key(self, structure: Any, settings: Sequence[Any], values: Sequence[Any], call: Any) -> Any:
        """What a trace depends on; None if that cannot be told, and it is to be made anew."""
        known = fingerprint(None if self.module else self.fun)
        if known is None or call.stateful:
            return None
        key = (
            known,
            structure,
            tuple((i, type(leaf), leaf) for i, leaf in settings),
            tuple(jax.typeof(x) for x in values),
            _private.context_key(),
        )
        try:
            hash(key)
        except TypeError:
            return None
        return key


class _Program:
    """A traced function: its jaxpr, and how its results are put together."""

    def __init__(
        self, owner: Autocast, call: Any, structure: Any, settings: Sequence[Any], values: Sequence[Any]
    ) -> None:
        self._settings = held = dict(settings)  # alive as long as the program, so that identities stay theirs
        fun, module = owner.fun, owner.module
        ends: dict[str, Any] = {}

        def flat(*traced: Any) -> list[Any]:
            moving = iter(traced)
            leaves = [held[i] if i in held else next(moving) for i in range(structure.num_leaves)]
            callee, args, kwargs = call.rebuild(jax.tree.unflatten(structure, leaves))
            out = (callee if module else fun)(*args, **kwargs)
            state, ends["state_tree"] = call.states()
            outs, ends["out_tree"] = jax.tree.flatten(out)
            ends["fixed"] = {i: leaf for i, leaf in enumerate(outs) if not is_traced(leaf)}
            ends["count"] = len(outs)
            return [*(leaf for leaf in outs if is_traced(leaf)), *state]

        flat.__name__ = getattr(fun, "__name__", type(fun).__name__)
        self.closed = jax.make_jaxpr(flat)(*values)
        self._out_tree, self._fixed, self._count = ends["out_tree"], ends["fixed"], ends["count"]
        self.state_tree = ends["state_tree"]
        self.open_over = any(isinstance(c, jax.core.Tracer) for c in self.closed.consts)
        self.islands = islands.find(fun, flat, self.closed, values, owner.mp.compute_dtype)

    def split(self, results: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The function's own results, and the new state of modules among its arguments."""
        end = self._count - len(self._fixed)
        return list(results[:end]), list(results[end:])

    def join(self, results: Sequence[Any]) -> Any:
        """The function's results in their tree."""
        moving = iter(results)
        leaves = [self._fixed[i] if i in self._fixed else next(moving) for i in range(self._count)]
        return jax.tree.unflatten(self._out_tree, leaves)
