"""``JaxPolicy``: a policy bound to JAX; what ``precision.bind(policy, backend="jax")`` returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import optax

from precision.backend import BoundPolicy
from precision.errors import PolicyError
from precision.formats import canonical_dtype
from precision.policy import PrecisionPolicy
from precision_jax import autocast as _autocast
from precision_jax.casting import RuleWatch, cast_by_rules, cast_tree, numpy_dtype
from precision_jax.clipping import clip_by_global_norm, global_norm
from precision_jax.devices import capabilities, find_device
from precision_jax.divergence import Divergence
from precision_jax.gradients import value_and_grad as _value_and_grad
from precision_jax.optimizer import wrap_optimizer
from precision_jax.replicas import AxisName
from precision_jax.scaler import JaxLossScaler, all_finite, select
from precision_jax.shardings import state_shardings

if TYPE_CHECKING:
    import os

    from precision_jax.backend import JaxBackend
    from precision_jax.checkpoints import Checkpoints


class JaxPolicy(BoundPolicy):
    """A policy bound to JAX: casts over any pytree, function transforms, and an optax optimizer.

    Attributes:
        policy: the policy.
        backend: the backend.
        device: the device it was checked against, such as ``"cpu:0"``.
        loss_scaler: the neutral loss scaler with explicit state.

    Example:
        >>> import jax, jax.numpy as jnp, optax, precision
        >>> mp = precision.bind("mixed_float16", backend="jax")
        >>> params = {"w": jnp.ones((2, 1))}
        >>> opt = mp.optimizer(optax.sgd(0.1))
        >>> opt_state = opt.init(params)
        >>> def loss_fn(params, x):
        ...     return jnp.mean(mp.autocast(jnp.dot)(x, params["w"]) ** 2)
        >>> loss, grads = mp.value_and_grad(loss_fn)(params, jnp.ones((4, 2)) / 8, loss_scale=opt_state.loss_scale)
        >>> updates, opt_state = opt.update(grads, opt_state, params)
        >>> params = optax.apply_updates(params, updates)
        >>> float(loss), params["w"].dtype.name, bool(opt_state.finite)
        (0.0625, 'float32', True)
    """

    def __init__(self, policy: PrecisionPolicy, backend: JaxBackend, device: str) -> None:
        self.policy = policy
        self.backend = backend
        self.device = device
        self.loss_scaler: JaxLossScaler = JaxLossScaler(policy.loss_scale)
        self.rules = RuleWatch(policy)
        self.divergence = Divergence(self.loss_scaler)

    # ---- dtypes -------------------------------------------------------------------------------------------------

    @property
    def param_dtype(self) -> np.dtype:
        """The dtype parameters are kept in, for a layer's ``param_dtype=``."""
        return numpy_dtype(self.policy.param_dtype)

    @property
    def compute_dtype(self) -> np.dtype:
        """The dtype ops compute in, for a layer's ``dtype=``."""
        return numpy_dtype(self.policy.compute_dtype)

    @property
    def output_dtype(self) -> np.dtype:
        """The dtype results leave in."""
        return numpy_dtype(self.policy.output_dtype)

    @property
    def reduce_dtype(self) -> np.dtype:
        """The dtype gradients are averaged over replicas in (``value_and_grad(..., axis_name=...)``)."""
        return numpy_dtype(self.policy.reduce_dtype)

    # ---- casts --------------------------------------------------------------------------------------------------

    def cast_to_param(self, tree: Any) -> Any:
        """Cast a tree's floating leaves to the parameter dtype; a rule for a leaf's path wins.

        Float64, integers, bools, PRNG keys and whatever is no array are untouched, and so are running statistics (Flax'
        ``batch_stats`` collection, nnx ``BatchStat``). An ``nnx.Module`` comes back as a copy.

        Raises:
            MixedFrameworksError: a leaf is PyTorch's or TensorFlow's.
        """
        self.rules.maybe_parameters(tree)
        return cast_by_rules(self.policy, tree, self.policy.param_dtype)

    def cast_to_compute(self, tree: Any) -> Any:
        """Cast a tree's floating leaves to the compute dtype; otherwise as :meth:`cast_to_param`."""
        self.rules.maybe_parameters(tree)
        return self.cast_arguments(tree)

    def cast_to_output(self, tree: Any) -> Any:
        """Cast a tree's floating leaves, float64 excepted, to the output dtype."""
        return cast_tree(tree, self.policy.output_dtype)

    def cast_arguments(self, tree: Any) -> Any:
        """:meth:`cast_to_compute` without looking for rules that match nothing."""
        return cast_by_rules(self.policy, tree, self.policy.compute_dtype)

    # ---- function transforms ------------------------------------------------------------------------------------

    def autocast(
        self, fun: Callable[..., Any] | None = None, *, keep: Sequence[int | str] = (), recompute: bool = True
    ) -> Any:
        """Run a function under the policy, op by op: each primitive's inputs are cast as its op family and the rules say.

        The function is traced for its arguments' shapes and dtypes, and evaluated again with casts: matrix products and
        convolutions in the compute dtype (summed in float32, rounded once after the bias), softmax, norms, losses, sums and
        exponentials in float32, the rest in whatever it meets (:data:`precision.FAMILIES`). The bodies of ``jit``, ``scan``,
        ``while_loop``, ``cond``, ``checkpoint``, ``shard_map`` and of functions with custom derivatives are entered; kernels
        (Pallas), callbacks and linear solves see the dtypes that they were traced with. Arguments are not cast: parameters
        stay float32, are cast where they are used, and get float32 gradients that were never rounded. Results leave in the
        output dtype.

        A rule with ``module=`` holds for the ops in a module (a scope of ``jax.named_scope``, as Flax linen and Haiku make them)
        and for those that take a parameter at that path within its argument. What the function closes over is read when it is
        traced, which is again for other shapes, and whenever it closes over something that may have changed. Works before
        and after ``jit``, ``grad``, ``vmap``.

        Args:
            fun: the function, or a callable pytree such as an Equinox module; left out, this is a decorator with options.
            keep: arguments, by position or name, that nothing casts: an op that takes one runs in its dtype.
            recompute: whether known functions that run in float32 inside (softmax, gelu, norms of ``jax.nn``) are computed again
                in the backward pass instead of being kept in float32.

        Returns:
            The wrapped function. What it does to Flax NNX modules among its arguments (running statistics) is done to them.

        Raises:
            PolicyError: ``keep`` names no argument; or, when called, rules for one op disagree.
            MixedFrameworksError: when called, an argument holds another framework's tensor.

        Example:
            >>> import jax, jax.numpy as jnp, precision
            >>> mp = precision.bind("mixed_bfloat16", backend="jax")
            >>> @mp.autocast
            ... def model(params, x):
            ...     return jax.nn.softmax(x @ params["w"])
            >>> params = {"w": jnp.ones((2, 3))}
            >>> model(params, jnp.ones((1, 2))).dtype.name
            'float32'
            >>> jax.grad(lambda p: model(p, jnp.ones((1, 2)))[0, 0])(params)["w"].dtype.name
            'float32'
        """
        region = _autocast.CastRegion(lambda f: _autocast.autocast(self, f, keep, recompute), "mp.autocast()")
        return region if fun is None else region(fun)

    def cast_boundary(self, fun: Callable[..., Any] | None = None, *, keep: Sequence[int | str] = ()) -> Any:
        """Cast a function's floating arguments to the compute dtype, and its results to the output dtype; nothing inside.

        What meets inside promotes as JAX promotes. A rule for a leaf's path (within its argument) wins. It costs no tracing;
        :meth:`autocast` decides op by op.

        Args:
            fun: the function, or a callable pytree such as an Equinox module, whose parameters are cast as well; left out,
                this is a decorator with options.
            keep: arguments, by position or name, to leave as they are: BatchNorm statistics, regression targets.

        Returns:
            The wrapped function.

        Raises:
            PolicyError: ``keep`` names no argument.
            UnsupportedError: when called with an ``nnx.Module`` that has state besides its parameters; a copy would be run.

        Example:
            >>> import jax.numpy as jnp, precision
            >>> mp = precision.bind("mixed_bfloat16", backend="jax")
            >>> @mp.cast_boundary
            ... def model(params, x):
            ...     y = x @ params["w"]
            ...     print(y.dtype)
            ...     return y
            >>> model({"w": jnp.ones((2, 3))}, jnp.ones((1, 2))).dtype.name
            bfloat16
            'float32'
        """
        self._warn_of_families("mp.cast_boundary casts at a function's boundary")
        region = _autocast.CastRegion(lambda f: _autocast.cast_boundary(self, f, keep), "mp.cast_boundary()")
        return region if fun is None else region(fun)

    def island(self, dtype: Any = "float32") -> Any:
        """A decorator that casts a function's floating arguments (not float64) to a dtype; results as it gives them.

        Of nested islands the innermost counts.

        Raises:
            PolicyError: not a policy dtype, or one that the device does not compute in.

        Example:
            >>> import jax.numpy as jnp, precision
            >>> mp = precision.bind("mixed_bfloat16", backend="jax")
            >>> mp.island("float32")(jnp.exp)(jnp.ones(1, "bfloat16")).dtype.name
            'float32'
        """
        if callable(dtype) and not isinstance(dtype, type):  # @mp.island, without brackets
            return _autocast.island("float32")(dtype)
        name = canonical_dtype(dtype)
        able = [c.dtype for c in capabilities(find_device(self.device)) if c.support in ("native", "slow")]
        if name not in able:
            raise PolicyError(
                f"an island in {name}: {self.device} does not compute in it. It computes in {', '.join(able)}."
            )
        return _autocast.CastRegion(_autocast.island(name), "mp.island()")

    def op(self, family: str) -> Any:
        """A decorator that casts a function's floating inputs as its op family asks (:func:`precision.ops.decide`).

        Example:
            >>> import jax.numpy as jnp, precision
            >>> mp = precision.bind("mixed_bfloat16", backend="jax")
            >>> mp.op("matmul")(jnp.dot)(jnp.ones((2, 2)), jnp.ones((2, 2))).dtype.name
            'bfloat16'
        """
        return _autocast.CastRegion(_autocast.op(self, family), f"mp.op({family!r})")

    def value_and_grad(
        self,
        fun: Callable[..., Any],
        argnums: int | Sequence[int] = 0,
        has_aux: bool = False,
        *,
        cast_argnums: int | Sequence[int] | None = None,
        axis_name: AxisName = None,
    ) -> Callable[..., Any]:
        """``jax.value_and_grad`` under the policy.

        The function runs under :meth:`autocast`, so gradients reach float32 masters in float32, without a rounding on the way.
        The loss is scaled in float32, and the gradients unscaled with that same scale. Gradients that overflowed stay inf or
        NaN for :meth:`optimizer` to see.

        Args:
            fun: gives a scalar loss, or ``(loss, aux)`` with ``has_aux``.
            argnums: the positional arguments to differentiate. Their leaves that are no floating or complex arrays get the
                gradient None (as in ``equinox.filter_grad``; Python floats outside Equinox modules get one).
            has_aux: whether ``fun`` gives ``(loss, aux)``; ``aux`` comes back as it is.
            cast_argnums: instead of autocasting op by op, the positional arguments to cast to the compute dtype at the
                function's boundary: ``(0, 1)`` for parameters and inputs, ``()`` for none (the model casts by itself, with
                :meth:`autocast` or :meth:`op`).
            axis_name: a mapped axis, or several, to average loss and gradients over, in the policy's reduce dtype.

        Returns:
            A function of the arguments of ``fun`` and, unless ``loss_scale.mode`` is ``"none"``, ``loss_scale=`` (the
            :class:`~precision.LossScaleState` in the optimizer's state). It gives ``(loss, gradients)`` or ``((loss, aux),
            gradients)``: the true loss in the output dtype, and true gradients in float32 (or wider).

        Raises:
            PolicyError: the policy computes, or averages over replicas, in float16 without scaling the loss; or, when called,
                ``argnums`` name an argument twice, or ``axis_name`` one that shards the parameters.
            LossScaleError: when called, if ``loss_scale`` is missing or is no LossScaleState.
            MixedFrameworksError: when called, if an argument holds another framework's tensor.
        """
        return _value_and_grad(self, fun, argnums, has_aux, cast_argnums, axis_name)

    # ---- optimizer ----------------------------------------------------------------------------------------------

    def optimizer(  # type: ignore[override]
        self,
        optimizer: Any,
        *,
        master_weights: bool | None = None,
        axis_name: AxisName = None,
    ) -> optax.GradientTransformationExtraArgs:
        """Wrap an optax transformation so that it skips non-finite steps and moves the loss scale.

        A skipped step leaves the inner state as it was (step counts too) and gives updates of zero. Its state is an
        :class:`OptimizerState`. Clipping belongs inside the wrapped transformation, which sees unscaled gradients;
        ``optax.MultiSteps`` too, so that a non-finite micro-batch is dropped before it is accumulated.

        Args:
            optimizer: an ``optax.GradientTransformation`` (or ``optax.MultiSteps``).
            master_weights: whether float32 copies of low-precision parameters are kept in the state. None (the default):
                low-precision parameters are an error; True: keep them; False: go without.
            axis_name: over which mapped axes all replicas agree to step or to skip. None (the default) takes all axes of
                the ``shard_map`` or ``pmap`` that ``update`` runs in, which is right for replicated and for sharded
                parameters; an axis of ``vmap`` must be named. Named axes are the only ones; an empty tuple means that each
                replica is a model of its own. Under ``jit`` with sharded arrays there is nothing to agree on.

        Returns:
            The transformation. ``update`` passes extra arguments on, but for ``finite=``, a flag found elsewhere that is
            used instead of looking at the gradients (and skips with mode ``"none"``, too, where nothing looks); replicas
            agree on it all the same.

        Raises:
            PolicyError: the policy computes in float16 without scaling the loss, or ``axis_name`` is no name.
            UnsupportedError: not an optax transformation.
            MasterWeightsError: from ``init``, if parameters are in a low dtype and ``master_weights`` was not given.
        """
        return wrap_optimizer(self, optimizer, master_weights, axis_name)

    def state_shardings(self, opt: optax.GradientTransformation, params: Any) -> Any:
        """Where each leaf of an optimizer's state belongs: for ``out_shardings``, or to restore a checkpoint to.

        What mirrors a parameter (moments, masters, accumulated gradients) is sharded as it is; counters and the loss scale are on
        every device.

        Args:
            opt: the optimizer, from :meth:`optimizer`, or any optax transformation.
            params: the parameters, placed on a mesh, or ``jax.ShapeDtypeStruct`` with their shardings.

        Returns:
            A tree of ``NamedSharding`` of the structure of ``opt.init(params)``.

        Raises:
            UnsupportedError: parameters are on no mesh; names them.

        Example:
            >>> import jax, optax, precision
            >>> from jax.sharding import NamedSharding, PartitionSpec as P
            >>> mp = precision.bind("mixed_float16", backend="jax")
            >>> mesh = jax.make_mesh((1,), ("data",))
            >>> params = {"w": jax.device_put(jax.numpy.ones((4, 2)), NamedSharding(mesh, P("data")))}
            >>> opt = mp.optimizer(optax.adam(1e-3))
            >>> opt_state = jax.jit(opt.init, out_shardings=mp.state_shardings(opt, params))(params)
            >>> opt_state.inner_state[0].mu["w"].sharding.spec, opt_state.loss_scale.scale.sharding.spec
            (P('data',), P())
        """
        return state_shardings(opt, params)

    def global_norm(self, tree: Any, specs: Any = None) -> jax.Array:
        """The norm of a tree of gradients, inside ``shard_map`` too; see :func:`precision_jax.global_norm`."""
        return global_norm(tree, specs)

    def clip_by_global_norm(self, max_norm: Any, specs: Any = None) -> optax.GradientTransformation:
        """``optax.clip_by_global_norm`` that is right inside ``shard_map``, too, where parameters are sharded.

        Put it inside the wrapped transformation, ``mp.optimizer(optax.chain(mp.clip_by_global_norm(1.0), optax.adam(1e-3)))``,
        which sees unscaled gradients.

        Args:
            max_norm: above 0.
            specs: how the parameters are sharded; see :func:`precision_jax.global_norm`.

        Raises:
            PolicyError: ``max_norm`` is no number above 0.
        """
        return clip_by_global_norm(max_norm, specs)

    def check(self, *opt_states: Any) -> None:
        """End the run if more than ``max_consecutive_skips`` steps in a row were skipped. Call it once a step, on the host.

        It reads the device at every ``max_consecutive_skips``-th call only, so that no step waits; the error comes at the
        latest after twice as many skips. Every process counts and sees the same, so all of them raise at the same step.

        Args:
            opt_states: the state of each optimizer of the run (:class:`OptimizerState`), all in one call.

        Raises:
            NonFiniteGradientsError: names the gradients of the last step that are not finite, by the paths of the
                parameters; gives the way of the scale, and what to try.

        Example:
            >>> import jax.numpy as jnp, optax, precision
            >>> scale = precision.LossScale(mode="dynamic", max_consecutive_skips=2)
            >>> mp = precision.bind(precision.PrecisionPolicy(loss_scale=scale), backend="jax")
            >>> opt = mp.optimizer(optax.sgd(0.1))
            >>> params = {"embed": jnp.ones(2), "head": jnp.ones(2)}
            >>> opt_state = opt.init(params)
            >>> for step in range(9):
            ...     grads = {"embed": jnp.ones(2), "head": jnp.full(2, jnp.nan)}
            ...     _, opt_state = opt.update(grads, opt_state, params)
            ...     mp.check(opt_state)
            Traceback (most recent call last):
                ...
            precision.errors.NonFiniteGradientsError: 4 steps in a row had non-finite gradients and were skipped ...
        """
        self.divergence.check(*opt_states)

    def checkpoints(self, directory: str | os.PathLike[str], keep: int | None = None) -> Checkpoints:
        """Checkpoints of a run through Orbax, whole after a kill at any moment; see :class:`precision_jax.checkpoints.Checkpoints`.

        Args:
            directory: the run's folder; made when the first checkpoint is saved.
            keep: how many complete checkpoints to keep; None keeps all.

        Raises:
            BackendUnavailableError: Orbax is not installed (``pip install orbax-checkpoint``).
        """
        from precision_jax.checkpoints import Checkpoints

        return Checkpoints(directory, keep)

    def all_finite(self, tree: Any, axis_name: AxisName = None) -> jax.Array:
        """Whether a tree's floating values are all finite; see :func:`precision_jax.all_finite`."""
        return all_finite(tree, axis_name)

    def select(self, finite: Any, new: Any, old: Any) -> Any:
        """One tree or the other; see :func:`precision_jax.select`."""
        return select(finite, new, old)
