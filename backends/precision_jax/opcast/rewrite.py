"""The interpreter: evaluates a jaxpr with every primitive's inputs cast as its family, the policy's rules and islands say.

Values carry their own dtypes; those that the jaxpr was traced with say what the author declared.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex

from precision.ops import FAMILIES, widest
from precision_jax.opcast import _private, islands, marks, patterns
from precision_jax.opcast.closures import Same
from precision_jax.opcast.contract import contract, round_p
from precision_jax.opcast.families import CONTRACTIONS, EACH, FAMILY, SELECTING, VIEW
from precision_jax.opcast.notes import (
    CASTABLE,
    F32,
    PLAIN,
    Note,
    cast,
    castable,
    declared,
    dtype_of,
    exact,
    fits,
    literal_note,
)
from precision_jax.opcast.paths import Fixed, Following, Rules

Results = tuple[list[Any], list[Note]]
Handler = Callable[["Rewriter", Any, list[Any], list[Note], tuple[str, ...]], Results]
HANDLERS: dict[str, Handler] = {}
"""What enters, or otherwise treats, primitives with a rule of their own; filled by the modules beside this one."""


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Register a handler of primitives."""

    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return register


class Rewriter:
    """Evaluates jaxprs under a policy.

    Args:
        rules: the policy's decisions.
        recompute: whether softmax, norms and the like are computed again in the backward pass rather than kept in float32.
        islands: equations whose results the author has cast to float32 although that is what they were traced with.
    """

    def __init__(self, rules: Rules, recompute: bool = True, islands: Any = None) -> None:
        self.rules = rules
        self.recompute = recompute
        self.islands = islands or {}
        self.mark: str | None = None

    def following(self) -> Rewriter:
        """The same for a region whose ops follow their inputs: ``mp.op("elementwise")`` and ``mp.op("shape")``."""
        other = Rewriter(Following(self.rules.policy), self.recompute, self.islands)
        other.mark = marks.FOLLOW
        return other

    def fixed(self) -> Rewriter:
        """The same for what runs in float32 throughout: known functions traced in a low dtype, linear solves."""
        other = Rewriter(Fixed(self.rules.policy), self.recompute)
        other.mark = self.mark
        return other

    def key(self) -> Any:
        """What decides how a jaxpr is rewritten, besides its inputs; hashable."""
        return (
            self.rules.policy,
            type(self.rules),
            self.recompute,
            self.mark,
            Same(self.islands) if self.islands else None,
        )

    def run(
        self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], notes: Sequence[Note], prefix: tuple[str, ...]
    ) -> Results:
        """Evaluate an open jaxpr. Gives its results and what is known of them."""
        frame = _Frame(self, jaxpr, prefix)
        held = [Note(stored=True, whole=True)] * len(consts)
        frame.write([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], [*held, *notes])
        position = 0
        while position < len(jaxpr.eqns):
            position = frame.step(position)
        results = [frame.read(a) for a in jaxpr.outvars], [frame.note(a) for a in jaxpr.outvars]
        return frame.marked(frame.islands.results, *results)

    def run_closed(self, closed: Any, args: Sequence[Any], notes: Sequence[Note], prefix: tuple[str, ...]) -> Results:
        """:meth:`run` of a closed jaxpr."""
        return self.run(closed.jaxpr, closed.consts, args, notes, prefix)


class _Frame:
    """The evaluation of one jaxpr: its values, what is known of them, and the casts that were made."""

    def __init__(self, rewriter: Rewriter, jaxpr: Any, prefix: tuple[str, ...]) -> None:
        self.rw, self.jaxpr, self.prefix = rewriter, jaxpr, prefix
        self.plan = patterns.plan(jaxpr)
        self.attending = False
        self.values: dict[Any, Any] = {}
        self.notes: dict[Any, Note] = {}
        self.casts: dict[tuple[int, np.dtype], Any] = {}
        self.islands = rewriter.islands.get(jaxpr, islands.NONE)

    def read(self, atom: Any) -> Any:
        return atom.val if isinstance(atom, jex.Literal) else self.values[atom]

    def note(self, atom: Any) -> Note:
        return literal_note(atom.val) if isinstance(atom, jex.Literal) else self.notes[atom]

    def write(self, variables: Sequence[Any], values: Sequence[Any], notes: Sequence[Note]) -> None:
        self.values.update(zip(variables, values, strict=True))
        self.notes.update(zip(variables, notes, strict=True))

    def cast(self, x: Any, dtype: np.dtype, note: Note) -> Any:
        """Cast a value, once however often it is asked for."""
        if dtype_of(x) == dtype or not castable(x):
            return x
        key = (id(x), dtype)  # the value is alive as long as this frame holds it
        if key not in self.casts:
            self.casts[key] = (x, cast(x, dtype, note))
        return self.casts[key][1]

    def marked(self, marks: Sequence[int], values: list[Any], notes: list[Note]) -> tuple[list[Any], list[Note]]:
        """Values as the author has cast them: up, where an island begins, or down, where it ends."""
        if not any(marks):
            return values, notes
        values, notes = list(values), list(notes)
        for i, mark in enumerate(marks):
            if mark and castable(values[i]) and not notes[i].weak:
                low = self.rw.rules.compute
                values[i] = self.cast(values[i], F32 if mark > 0 else low, notes[i])
                notes[i] = notes[i]._replace(pinned=2) if mark > 0 else PLAIN
        return values, notes

    # ---- one equation -------------------------------------------------------------------------------------------

    def step(self, position: int) -> int:
        eqn = self.jaxpr.eqns[position]
        with _private.where(eqn), eqn.ctx.manager:
            region = self.plan.regions.get(position)
            free = marks.mark_of(eqn) is None and type(self.rw.rules) is Rules
            whole = None if self.attending else self.plan.attentions.get(position)
            if whole is not None and free and self.attention(whole):
                return whole.stop
            if region is not None and free and self.region(region):
                return region.stop
            args, notes = [self.read(a) for a in eqn.invars], [self.note(a) for a in eqn.invars]
            args, notes = self.marked(self.islands.operands.get(position, ()), args, notes)
            results, known = self.apply(position, eqn, args, notes)
        self.write(eqn.outvars, results, known)
        return position + 1

    def apply(self, position: int, eqn: Any, args: list[Any], notes: list[Note]) -> Results:
        name = eqn.primitive.name
        mark = marks.mark_of(eqn)
        if mark is not None and mark != self.rw.mark:
            if mark == marks.DECLARED:
                return opaque(self.rw, eqn, args, notes, ())
            return _Frame(self.rw.following(), self.jaxpr, self.prefix).apply(position, eqn, args, notes)
        scope = self.rw.rules.scope(self.prefix, eqn)
        if position in self.plan.attention and marks.ATTENTION not in scope:
            scope = (*scope, marks.ATTENTION)
        if name in HANDLERS:
            return HANDLERS[name](self.rw, eqn, args, notes, scope)
        family = patterns.family_of(eqn)
        if family in _FOLDED and all(n.weak for n in notes) and all(v.aval.shape == () for v in eqn.outvars):
            folded = _fold(eqn, args, notes)
            if folded is not None:
                return folded
        moving = [i for i, (x, v) in enumerate(zip(args, eqn.invars, strict=True)) if castable(x) and declared(v)]
        wide = [v for v in eqn.invars if getattr(v.aval, "dtype", None) == np.float64]
        if family is None or not moving or wide:
            return opaque(self.rw, eqn, args, notes, scope)
        if name in EACH:
            return self.each(eqn, family, args, notes, scope)
        if name in CONTRACTIONS:
            return self.contraction(position, eqn, family, args, notes, scope)
        if position in self.plan.additions:
            done = self.addition(eqn, args, notes, scope)
            if done is not None:
                return done
        target = self.rw.rules.target(family, scope, [notes[i].path for i in moving])
        if target is None and position in self.plan.asked:
            target = F32
        return self.plain(eqn, args, notes, moving, target)

    def plain(
        self, eqn: Any, args: list[Any], notes: list[Note], moving: list[int], target: np.dtype | None
    ) -> Results:
        """Cast to one dtype and bind. Constants take the dtype of what they meet, where it can hold them."""
        back = None
        if target is None:
            strong = [i for i in moving if not notes[i].weak]
            target = np.dtype(F32 if not strong else _widest([args[i].dtype for i in strong]))
            if target != F32 and eqn.primitive.name not in SELECTING:
                numbers = [notes[i].value for i in moving if notes[i].weak]
                if any(n is None or not exact(n, target) for n in numbers):
                    # computed in float32 with the constant as it is, then rounded; not where that would lose it
                    back = target if all(n is not None and fits(n, target) for n in numbers) else None
                    target = np.dtype(F32)
        cast_args = [
            self.cast(x, target, n) if i in moving else x for i, (x, n) in enumerate(zip(args, notes, strict=True))
        ]
        results = bind(eqn, cast_args)
        if back is not None:
            results = [cast(x, back) if castable(x) else x for x in results]
        return results, _notes(eqn, notes, moving, results)

    def each(self, eqn: Any, family: str, args: list[Any], notes: list[Note], scope: tuple[str, ...]) -> Results:
        target = self.rw.rules.target(family, scope, [n.path for n in notes])
        if target is not None:
            args = [self.cast(x, target, n) for x, n in zip(args, notes, strict=True)]
        results = bind(eqn, args)
        kept = notes if len(results) == len(notes) and eqn.primitive.name in VIEW else [PLAIN] * len(results)
        return results, list(kept)

    # ---- products -----------------------------------------------------------------------------------------------

    def contraction(
        self, position: int, eqn: Any, family: str, args: list[Any], notes: list[Note], scope: tuple[str, ...]
    ) -> Results:
        """A matrix product or convolution: low operands, a float32 sum, one rounding (after the bias, if there is one)."""
        pair = notes[:2]
        both = all(castable(x) for x in args[:2])
        kept = any(n.pinned == 2 for n in pair) or all(n.pinned for n in pair)
        family = "attention" if family == "matmul" and marks.ATTENTION in scope else family
        target = self.rw.rules.target(family, scope, [n.path for n in pair], islands=kept)
        if not both or kept or target is None or target == F32 or _algorithm(eqn):
            args = [self.cast(x, F32, n) for x, n in zip(args, notes, strict=True)]
            changed: dict[str, Any] = {"precision": None} if eqn.params.get("precision") in _OURS else {}
            if both:  # what JAX chose for low operands would round the float32 sum
                changed["preferred_element_type"] = F32
            return bind(eqn, args, **changed), [Note(pinned=int(kept))]
        operands = [
            x if n.stored and x.dtype == F32 else self.cast(x, target, n) for x, n in zip(args[:2], pair, strict=True)
        ]
        keep = (pair[0].whole or args[0].dtype == target, pair[1].whole or args[1].dtype == target)
        wide = position in self.islands.wide  # the author's preferred_element_type
        scores = position in self.plan.scores  # an attention's, which go to its softmax
        out = F32 if wide or scores or position in self.plan.biased else target
        params = {**eqn.params, "precision": None} if eqn.params.get("precision") in _OURS else eqn.params
        value = contract(eqn.primitive, params, [*operands, *args[2:]], target, out, keep)
        return [value], [Note(path=_ROUND + target.name) if position in self.plan.biased and not wide else PLAIN]

    def addition(self, eqn: Any, args: list[Any], notes: list[Note], scope: tuple[str, ...]) -> Results | None:
        """A bias added to a product's float32 sum, and the one rounding. None if it is no bias of that product after all."""
        sides = [i for i, n in enumerate(notes) if n.path.startswith(_ROUND)]
        if not sides:
            return None
        if len(sides) == 2:  # two products that one bias is added to: their sum waits for it
            return bind(eqn, args), [notes[0]]
        side = sides[0]
        low = np.dtype(notes[side].path[len(_ROUND) :])
        other = 1 - side
        if not notes[other].stored:
            args[side], notes[side] = cast(args[side], low), PLAIN
            return None
        target = self.rw.rules.target("matmul", scope, [notes[other].path]) or low
        wide = [self.cast(x, F32, n) for x, n in zip(args, notes, strict=True)]
        if target == F32:
            return bind(eqn, wide), [PLAIN]
        if args[other].dtype != target:
            wide[other] = round_p.bind(wide[other], dtype=target)
        return [cast(bind(eqn, wide)[0], low)], [PLAIN]

    # ---- known functions ----------------------------------------------------------------------------------------

    def region(self, region: patterns.Region) -> bool:
        """Evaluate a known function in its family's dtype. False if it is to go primitive by primitive."""
        inputs = [self.values[v] for v in region.inputs]
        notes = [self.notes[v] for v in region.inputs]
        floats = [i for i, x in enumerate(inputs) if castable(x) and not notes[i].weak]
        if not floats or any(getattr(v.aval, "dtype", None) == np.float64 for v in region.inputs):
            return False
        scope = self.rw.rules.scope(self.prefix, self.jaxpr.eqns[region.start])
        target = self.rw.rules.target(region.family, scope, [notes[i].path for i in floats])
        out = target or _widest([inputs[i].dtype for i in floats])
        fused = out != F32  # takes and gives a low dtype, and computes in float32 inside
        low = any(inputs[i].dtype != F32 for i in floats)
        eqns = self.jaxpr.eqns[region.start : region.stop]

        def inside(*values: Any) -> list[Any]:
            if region.traced_wide:
                results = _Declared(dict(zip(region.inputs, values, strict=True))).run(eqns, region.outputs)
            else:
                frame = _Frame(self.rw.fixed(), self.jaxpr, self.prefix)
                known = [n if n.weak else PLAIN for n in notes]
                frame.write(region.inputs, [self.wide(x, n) for x, n in zip(values, known, strict=True)], known)
                for position in range(region.start, region.stop):
                    frame.step(position)
                results = [frame.read(v) for v in region.outputs]
            return [cast(x, out) if castable(x) else x for x in results]

        if fused:
            inputs = [
                self.cast(x, out, n) if i in floats else x for i, (x, n) in enumerate(zip(inputs, notes, strict=True))
            ]
        run = jax.checkpoint(inside) if self.rw.recompute and low else inside
        with marks.region(marks.FUSED) if fused else contextlib.nullcontext():
            results = run(*inputs)
        self.write(region.outputs, results, [PLAIN] * len(region.outputs))
        return True

    def attention(self, region: patterns.Region) -> bool:
        """Evaluate an attention function as a fused kernel would be: of it, only its inputs are kept for the backward pass.

        False if it is to go primitive by primitive.
        """
        inputs, notes = [self.values[v] for v in region.inputs], [self.notes[v] for v in region.inputs]
        if not self.rw.recompute or self.rw.rules.target("attention", (), ()) in (None, F32):
            return False
        if any(n.pinned for n in notes) or any(getattr(v.aval, "dtype", None) == np.float64 for v in region.inputs):
            return False

        def inside(*values: Any) -> list[Any]:
            frame = _Frame(self.rw, self.jaxpr, self.prefix)
            frame.attending = True
            frame.write(region.inputs, values, notes)
            position = region.start
            while position < region.stop:
                position = frame.step(position)
            return [frame.read(v) for v in region.outputs]

        self.write(region.outputs, jax.checkpoint(inside)(*inputs), [PLAIN] * len(region.outputs))
        return True

    def wide(self, x: Any, note: Note) -> Any:
        """A value in float32, if it may be cast."""
        return self.cast(x, F32, note) if castable(x) else x


_ROUND = (
    "\0round:"  # in the place of a path: a product's float32 sum that is still to be rounded to the dtype that follows
)


class _Declared:
    """Evaluates equations in the dtypes they were traced with, whatever comes in."""

    def __init__(self, values: dict[Any, Any]) -> None:
        self.values = values

    def run(self, eqns: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
        for eqn in eqns:
            args = [self.read(a) for a in eqn.invars]
            with _private.where(eqn), eqn.ctx.manager:
                self.values.update(zip(eqn.outvars, bind(eqn, args), strict=True))
        return [self.values[v] for v in outputs]

    def read(self, atom: Any) -> Any:
        if isinstance(atom, jex.Literal):
            return atom.val
        self.values[atom] = restore(self.values[atom], atom)
        return self.values[atom]


def restore(x: Any, var: Any, note: Note = PLAIN) -> Any:
    """A value in the dtype its variable was traced with."""
    dtype = declared(var)
    return cast(x, dtype, note) if dtype is not None and castable(x) else x


def bind(eqn: Any, args: Sequence[Any], **changed: Any) -> list[Any]:
    """Bind an equation's primitive to other values (and changed parameters)."""
    params = eqn.primitive.get_bind_params({**eqn.params, **changed})
    results = eqn.primitive.bind(*args, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


def opaque(rw: Rewriter, eqn: Any, args: Sequence[Any], notes: Sequence[Note], scope: tuple[str, ...]) -> Results:
    """What sees the dtypes it was traced with: kernels, callbacks, solves, and whatever has no family."""
    del rw, scope
    args = [restore(x, v, n) for x, v, n in zip(args, eqn.invars, notes, strict=True)]
    results = bind(eqn, args)
    weak = bool(notes) and all(n.weak for n in notes)
    return results, [Note(weak=weak) if weak and eqn.primitive.name in FAMILY else PLAIN for _ in results]


def _notes(eqn: Any, notes: Sequence[Note], moving: Sequence[int], results: Sequence[Any]) -> list[Note]:
    known = [notes[i] for i in moving]
    strong = [n for n in known if not n.weak]
    pinned = 1 if any(n.pinned for n in strong) else 0
    weak = all(n.weak for n in notes)
    if eqn.primitive.name in VIEW and len(known) == 1:
        kept = known[0]
        same = eqn.primitive.name in ("reshape", "broadcast_in_dim", "squeeze")
        whole = kept.whole and eqn.primitive.name in _FREE
        return [kept._replace(whole=whole, value=kept.value if same else None)] * len(results)
    return [Note(pinned=pinned, weak=weak)] * len(results)


_FOLDED = frozenset(("elementwise", "transcendental"))


def _fold(eqn: Any, args: Sequence[Any], notes: Sequence[Note]) -> Results | None:
    """A number computed from numbers (``1 / sqrt(64)``), so that it is known. None if one of them is not."""
    if not notes or any(isinstance(x, jax.core.Tracer) for x in args):
        return None
    args = [restore(x, v, n) for x, v, n in zip(args, eqn.invars, notes, strict=True)]
    with jax.ensure_compile_time_eval():
        results = bind(eqn, args)
        known = [Note(weak=True, value=float(x)) if castable(x) else Note(weak=True) for x in results]
    return results, known


_FREE = frozenset(
    ["squeeze", "reshape", "pvary", "stop_gradient", "sharding_constraint", "name", "optimization_barrier"]
)


def _widest(dtypes: Sequence[Any]) -> np.dtype:
    names = {np.dtype(d).name for d in dtypes}
    return np.dtype(widest(sorted(names)))


_PRESET = jax.lax.DotAlgorithmPreset
_OURS = (_PRESET.DEFAULT, _PRESET.F16_F16_F32, _PRESET.BF16_BF16_F32)  # what a product of low operands is here anyway


def _algorithm(eqn: Any) -> bool:
    """Whether the author has chosen the algorithm of a product, which fixes its dtypes."""
    chosen = eqn.params.get("precision")
    return isinstance(chosen, (jax.lax.DotAlgorithm, _PRESET)) and chosen not in _OURS


__all__ = ["CASTABLE", "FAMILIES", "HANDLERS", "Rewriter", "bind", "handles", "opaque", "restore"]
