"""A whole small backend for NumPy, to run the conformance kit against: once as it should be, and once for each way to be wrong."""

import ml_dtypes
import numpy as np

import precision
from precision import FloatFormat
from precision.backend import check_leaf, require_supported
from precision.loss_scale import LossScaleState
from precision.ops import decide
from precision.parity import CASES, OpResult, ParityAdapter, ReplicaResult

CASE = {case.name: case for case in CASES}


class NumpyLossScaler(precision.LossScaler):
    xp = np

    def from_host(self, state):
        return state

    def scale(self, loss, state):
        return loss if self.config.mode == "none" else (loss.astype(np.float32) * state.scale)

    def unscale(self, grads, state):
        if self.config.mode == "none":
            return grads, np.bool_(True)
        inverse = np.float32(1) / state.scale
        grads = {name: g.astype(np.float32) * inverse for name, g in grads.items()}
        return grads, np.bool_(all(np.isfinite(g).all() for g in grads.values()))


class NumpyPolicy(precision.BoundPolicy):
    scaler_type = NumpyLossScaler

    def __init__(self, policy, backend):
        self.policy, self.backend = policy, backend
        self.loss_scaler = self.scaler_type(policy.loss_scale)

    def cast(self, leaf, dtype):
        check_leaf(leaf, "numpy")
        if isinstance(leaf, np.ndarray) and leaf.dtype.name in precision.DTYPES:
            return leaf.astype(FloatFormat.of(dtype).numpy_dtype)
        return leaf

    def _by_rules(self, tree, dtype):
        rules = {path: self.policy.rule_for(path) for path in tree}
        return {path: self.cast(leaf, rules[path].dtype if rules[path] else dtype) for path, leaf in tree.items()}

    def cast_to_param(self, tree):
        return self._by_rules(tree, self.policy.param_dtype)

    def cast_to_compute(self, tree):
        return self._by_rules(tree, self.policy.compute_dtype)

    def cast_to_output(self, tree):
        return {path: self.cast(leaf, self.policy.output_dtype) for path, leaf in tree.items()}

    def autocast(self, function):
        return function

    def island(self, dtype="float32"):
        return lambda function: lambda *inputs: function(*(self.cast(x, dtype) for x in inputs))

    def op(self, family):
        def mark(function):
            def run(*inputs):
                dtypes = decide(self.policy, family, [x.dtype.name for x in inputs])
                return function(*(x.astype(np.dtype(d)) for x, d in zip(inputs, dtypes, strict=True)))

            return run

        return mark

    def optimizer(self, optimizer):
        self.policy.require_trainable()
        return optimizer


class NumpyParity(ParityAdapter):
    name = "numpy"
    engines = ("loop",)
    models = ()

    def __init__(self, backend):
        self.backend = backend

    def tensor(self, array):
        return array

    def array(self, tensor):
        return np.asarray(tensor)

    def round_to(self, values, dtype):
        with np.errstate(over="ignore", invalid="ignore"):
            return values.astype(FloatFormat.of(dtype).numpy_dtype).astype(np.float32)

    def _scaler(self, config):
        return self.backend.bind(precision.PrecisionPolicy(loss_scale=config)).loss_scaler

    def trajectory(self, config, finite, form, start=None):
        scaler, states = self._scaler(config), []
        state = scaler.init() if start is None else scaler.load_state_dict(start)
        for flag in finite:
            _, seen = scaler.unscale({"w": np.float32([1.0 if flag else np.inf])}, state)
            state = scaler.update(state, seen)
            states.append(scaler.state_dict(state))
        return states

    def run_op(self, mp, case, family, inputs):
        seen = []

        def op(*arrays):
            seen.extend(a.dtype.name for a in arrays)
            wide = [a.astype(np.float32) if a.dtype.itemsize < 4 else a for a in arrays]
            floating = [a.dtype for a in arrays if a.dtype.name in precision.DTYPES]
            return np.asarray(CASE[case].reference(*wide)).astype(np.result_type(*floating))

        out = mp.op(family)(op)(*inputs)
        return OpResult(tuple(seen), out.dtype.name, out.astype(np.float64))

    def agree(self, flags):
        return all(flags)

    def replicated(self, engine, specs):
        return [self._replicas(spec) for spec in specs]

    def _replicas(self, spec):
        scaler, count = self._scaler(spec.config), spec.replicas
        state, weights = [scaler.init()] * count, [np.zeros(4, np.float32)] * count
        out = ReplicaResult(
            np.empty((count, len(spec.factors), 5)), np.empty((count, len(spec.factors), 4), np.float32)
        )
        for step, factors in enumerate(spec.factors):
            losses = [scaler.scale(np.float32(12 * (r + 1)) * factors[r], state[r]) for r in range(count)]
            pairs = [scaler.unscale({"w": np.full(4, losses[r])}, state[r]) for r in range(count)]
            mean = np.mean([grads["w"] for grads, _ in pairs], axis=0, dtype=np.float32)
            for r in range(count):
                finite = np.bool_(self.agree([flag for _, flag in pairs]))
                weights[r] = weights[r] - np.float32(2**-6) * mean if finite else weights[r]
                state[r] = scaler.update(state[r], finite)
                out.states[r, step] = [float(getattr(state[r], name)) for name in LossScaleState._fields]
                out.weights[r, step] = weights[r]
        return out

    def train(self, spec):
        raise precision.UnsupportedError("NumPy has no gradients")


class NumpyBackend(precision.Backend):
    name = "numpy"
    framework = "numpy"
    policy_type = NumpyPolicy
    adapter_type = NumpyParity

    def bind(self, policy, **options):
        require_supported(policy, self.capabilities(), "cpu")
        return self.policy_type(policy, self)

    def versions(self):
        return {"numpy": np.__version__, "ml_dtypes": ml_dtypes.__version__}

    def capabilities(self):
        support = {"float32": "native", "float16": "slow", "bfloat16": "slow"}
        return [precision.Capability("cpu", d, support.get(d, "storage"), "through float32") for d in precision.DTYPES]

    def parity(self):
        return self.adapter_type(self)
