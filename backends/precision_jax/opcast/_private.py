"""The one place that imports what JAX does not publish, each with what would be done without it.

Everything else of the package uses ``jax``, ``jax.extend`` and ``jax.interpreters``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax._src import config as _config
from jax._src import custom_derivatives as _custom_derivatives
from jax._src import linear_util as _linear_util
from jax._src import source_info_util as _source_info
from jax._src.interpreters import partial_eval as _partial_eval
from jax.extend import core as jex

INSTANTIATED = _custom_derivatives.SymbolicZero
"""The type that stands for a zero tangent in the rules of ``jax.custom_jvp`` (``symbolic_zeros=True``)."""


def trace(fun: Callable[..., Sequence[Any]], avals: Sequence[Any], debug_info: Any) -> tuple[Any, list[Any]]:
    """Trace a flat function at abstract values, sharding and varying axes included; gives a jaxpr and its constants.

    ``jax.make_jaxpr`` would do, for arguments that are arrays; it costs more, and has no way to keep names of arguments.
    """
    jaxpr, _, consts = _partial_eval.trace_to_jaxpr_dynamic(_linear_util.wrap_init(fun, debug_info=debug_info), avals)
    return jaxpr, consts


def trace_closed(fun: Callable[..., Sequence[Any]], avals: Sequence[Any], debug_info: Any) -> Any:
    """:func:`trace`, closed over its constants."""
    return jex.ClosedJaxpr(*trace(fun, avals, debug_info))


def debug_info(name: str, fun: Callable[..., Any], count: int) -> Any:
    """What names a traced function in messages."""
    return jex.DebugInfo(name, f"{fun.__module__}.{fun.__qualname__}", tuple(f"x{i}" for i in range(count)), None)


def where(eqn: Any) -> Any:
    """A context in which what is bound has an equation's traceback and name stack, within the current one."""
    stack = _source_info.current_name_stack() + eqn.source_info.name_stack
    return _source_info.user_context(eqn.source_info.traceback, name_stack=stack)


def scopes(name_stack: Any) -> tuple[str, ...]:
    """The names of the scopes of a name stack (``jax.named_scope``), those of transformations left out."""
    return tuple(part.name for part in name_stack.stack if isinstance(part, _source_info.Scope))


def codes(eqn: Any) -> Sequence[Any]:
    """The code objects of the Python frames that an equation was traced in, innermost first; empty if none were kept."""
    traceback = eqn.source_info.traceback
    return () if traceback is None else traceback.raw_frames()[0]


def context_key() -> Any:
    """What of JAX's configuration and context a trace depends on, hashable: x64, axes, mesh, default precision."""
    return _config.trace_context()


def jvp_rule(eqn: Any, zeros: Sequence[bool]) -> tuple[Any, Sequence[Any], Sequence[bool]]:
    """The author's rule of a ``custom_jvp_call`` as a jaxpr (primals, then tangents that are not zero), and its constants.

    The last item says which tangents of the results are zero; the jaxpr gives the others after the results.
    """
    return eqn.params["jvp_jaxpr_fun"].call_wrapped(*zeros)


def vjp_rule(eqn: Any, perturbed: Sequence[bool]) -> tuple[Any, Sequence[Any], int, Sequence[int | None]]:
    """The author's forward rule of a ``custom_vjp_call``: a jaxpr that gives residuals, then results; its constants.

    Then how many residuals it gives, and where each residual of the backward rule is found: None for the next of them, or
    the position of an argument, constants among them.
    """
    jaxpr, consts = eqn.params["fwd_jaxpr_thunk"].call_wrapped(*perturbed)
    _, residuals, forwarded = eqn.params["out_trees"]()
    return jaxpr, consts, residuals.num_leaves - sum(f is not None for f in forwarded), forwarded


def backward_rule(eqn: Any) -> Callable[..., Sequence[Any]]:
    """The author's backward rule of a ``custom_vjp_call``: from residuals and cotangents to cotangents of the arguments."""

    def backward(*args: Any) -> Sequence[Any]:
        found = eqn.params["bwd"].call_wrapped(*args)
        logs = isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], list)  # since JAX 0.12
        return found[0] if logs else found

    return backward


def scan_counts(eqn: Any) -> tuple[int, int]:
    """How many constants, and how many carried values, come first among the arguments of a ``scan``."""
    if "num_carry" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()  # since JAX 0.12
    return len(consts), len(carry)
