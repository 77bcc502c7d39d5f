"""What the processes of the TensorFlow tests run: each launch does many checks and hands plain values back."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import threading
import time
import traceback
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import precision
from precision import LossScale, PrecisionPolicy
from precision.parity.replicas import expected, replica_specs, tier_replicas
from precision.testing import Fault, FaultPlan
from precision_tensorflow.parity_replicas import ReplicaTrainer, logical_devices

DYNAMIC = {"mode": "dynamic", "initial": 1024.0, "growth_interval": 1000}
RNG = np.random.default_rng(3)
X = RNG.standard_normal((48, 4)).astype(np.float32)
Y = X[:, :2] ** 2


def bind(name="float32", reduce_dtype="float32", **loss_scale):
    scale = LossScale(**{**DYNAMIC, **loss_scale})
    policy = PrecisionPolicy.from_name(name).with_(loss_scale=scale, reduce_dtype=reduce_dtype)
    return precision.bind(policy, backend="tensorflow", device="CPU:0")


def scope(strategy):
    return contextlib.nullcontext() if strategy is None else strategy.scope()


def copies(variable) -> list[np.ndarray]:
    """A variable's value on each local replica."""
    native = variable.value if isinstance(variable, keras.Variable) else variable
    return [v.numpy() for v in native.values] if hasattr(native, "values") else [native.numpy()]


def all_copies(variables) -> list[list[np.ndarray]]:
    return [copies(v) for v in variables]


def same(a, b) -> bool:
    """Whether two nests of arrays are bit-equal."""
    a, b = tf.nest.flatten(a), tf.nest.flatten(b)
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def alike(variables) -> bool:
    """Whether every local replica holds the same."""
    return all(np.array_equal(c, values[0]) for values in all_copies(variables) for c in values)


class Loop:
    """A custom loop on one vector: the gradient on replica ``r`` at a step is what is fed for it, over their number."""

    def __init__(self, strategy, make, size=2, start=0.0, compile=True, guard=None):
        self.strategy = strategy or tf.distribute.get_strategy()
        with scope(strategy):
            self.weights = tf.Variable(tf.fill([size], start))
            self.optimizer = make()
            self.optimizer.build([self.weights])
            self.statistic = tf.Variable(0.0, trainable=False, aggregation=tf.VariableAggregation.MEAN)
        self.mp = guard
        self.step = tf.function(self._step) if compile else self._step

    def _step(self, fed):
        self.strategy.run(self._on_replica, args=(fed,))

    def _on_replica(self, fed):
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        with self.mp.guard([self.statistic]) if self.mp else contextlib.nullcontext():
            self.statistic.assign_add(1.0)
            with tf.GradientTape() as tape:
                grad = tf.gather(fed, replica) / float(self.strategy.num_replicas_in_sync)
                loss = tf.reduce_sum(self.weights * grad)
                scaled = self.optimizer.scale_loss(loss)
            self.optimizer.apply_gradients([(tape.gradient(scaled, self.weights), self.weights)])

    def run(self, *steps):
        """Each step is a gradient for each replica, shape ``(replicas, size)``; numbers fill the vector."""
        for step in steps:
            rows = [np.broadcast_to(np.float32(row), self.weights.shape) for row in step]
            self.step(tf.constant(np.stack(rows)))
        return self


def model_for(
    mp,
    strategy,
    *,
    native=False,
    norm=True,
    sync=False,
    optimizer=lambda: keras.optimizers.Adam(0.05),
    dropout=False,
    eager=False,
):
    keras.utils.set_random_seed(1)
    with scope(strategy):
        layers = [keras.Input((4,)), keras.layers.Dense(5, activation="tanh")]
        layers += [keras.layers.BatchNormalization(synchronized=sync)] if norm else []
        layers += [keras.layers.Dropout(0.25, seed=5)] if dropout else []
        with mp.scope():
            model = keras.Sequential([*layers, keras.layers.Dense(2)])
        model = model if native else mp.prepare(model)
        inner = optimizer()
        wrapped = keras.optimizers.LossScaleOptimizer(inner) if native else mp.optimizer(inner)
        model.compile(wrapped, "mse", run_eagerly=eager)
    return model


def fit(model, x=X, batch=12, epochs=1, callbacks=()):
    return model.fit(
        x, Y[: len(x)], batch_size=batch, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks)
    )


BAD = X.copy()
BAD[11] = np.inf  # the last row of the first batch of 12: on the last replica, however many there are


# ---- MirroredStrategy --------------------------------------------------------------------------------------------


def check_fit(two, three, folder):
    out = {}
    model = model_for(bind("mixed_float16"), two, native=True)
    fit(model, BAD[:12])
    out["native finite"] = [bool(np.isfinite(w).all()) for w in model.get_weights()]
    for name, strategy, sync in (("ours", two, False), ("synchronized", three, True)):
        model = model_for(bind("mixed_float16"), strategy, sync=sync)
        fit(model, X[:24])
        inner = model.optimizer.inner_optimizer.variables
        before = all_copies([*model.weights, *inner])
        moved = [not np.array_equal(*copies(v)[:2]) for v in model.non_trainable_variables if "moving" in v.path]
        fit(model, BAD)  # one bad batch, and three that train on
        skipped = all_copies([*model.weights, *inner])
        out[name] = {
            "statistics differ by replica": moved,
            "alike": alike([*model.trainable_variables, *model.optimizer.variables]),
            "went on": not same(before, skipped),
            "finite": all(np.isfinite(c).all() for each in skipped for c in each),
            "state": model.optimizer.state_dict(),
        }
        before = all_copies([*model.weights, *inner])
        fit(model, BAD[:12])
        out[name]["unchanged"] = same(before, all_copies([*model.weights, *inner]))
        out[name]["replicas"] = [c[2:] for c in zip(*all_copies(model.optimizer.variables[:7]), strict=True)]
    return out


def check_loops(two, three, folder):
    out = {}
    plan = FaultPlan([Fault("overflow", 1, 1), Fault("nan", 3, 0), Fault("overflow", 5, 1), Fault("nan", 5, 0)])
    factors = plan.factors(8, 2)
    for how in ("graph", "eager"):
        mp = bind(growth_interval=2, hysteresis=2)
        loop = Loop(two, lambda mp=mp: mp.optimizer(keras.optimizers.SGD(1.0)), compile=how == "graph", guard=mp)
        states = []
        for row in factors:
            loop.run(row)
            states.append(loop.optimizer.state_dict())
        out[how] = {
            "as the plan says": states == plan.trajectory(mp.policy.loss_scale, 8),
            "weights": copies(loop.weights),
            "statistic": copies(loop.statistic),
            "steps": int(loop.optimizer.inner_optimizer.iterations.numpy()),
            "alike": alike([loop.weights, *loop.optimizer.variables]),
        }
    return out


def check_order(two, three, folder):
    """Sum, then clip: the numbers are the closed form's."""
    out = {}
    steps = [[[3.0, 4.0], [6.0, 8.0]]]
    for name, inside, outside in (
        ("inside", {"global_clipnorm": 1.0}, {}), ("outside", {}, {"global_clipnorm": 1.0}), ("each", {"clipnorm": 1.0}, {})
    ):  # fmt: skip
        loop = Loop(two, lambda i=inside, o=outside: bind().optimizer(keras.optimizers.SGD(1.0, **i), **o)).run(*steps)
        out[name] = copies(loop.weights)
    out["native"] = copies(Loop(two, lambda: keras.optimizers.SGD(1.0, global_clipnorm=1.0)).run(*steps).weights)
    unscaled = precision.bind("mixed_bfloat16", backend="tensorflow")
    make = lambda: unscaled.optimizer(keras.optimizers.SGD(1.0, global_clipnorm=1.0))  # noqa: E731
    out["mode none"] = copies(Loop(two, make).run(*steps).weights)
    for name, plain in (("none plain", lambda: keras.optimizers.Adam(0.1)), ("none ours", lambda: unscaled.optimizer(keras.optimizers.Adam(0.1)))):  # fmt: skip
        out[name] = copies(Loop(two, plain).run([1.0, 2.0], [0.1, 0.3], [5.0, -2.0]).weights)
    for dtype in ("float32", "bfloat16", "float16"):
        loop = Loop(two, lambda d=dtype: bind(reduce_dtype=d).optimizer(keras.optimizers.SGD(1.0)))
        out[dtype] = copies(loop.run([2.0, 2.0**-8]).weights)
    loop = Loop(two, lambda: bind(reduce_dtype="float16", initial=1.0).optimizer(keras.optimizers.SGD(1.0)))
    loop.run([1.2e5, 1.2e5], [1.0, 1.0])  # each fits into float16, their sum does not
    out["sum overflows"] = [copies(loop.weights), loop.optimizer.state_dict()["skipped"]]
    loop = Loop(two, lambda: bind(reduce_dtype="bfloat16", initial=1.0).optimizer(keras.optimizers.SGD(1.0)))
    out["keeps"] = loop.optimizer.get_config()["reduce_dtype"]
    return out


def check_cadence(two, three, folder):
    out = {}
    inf = np.inf
    loop = Loop(two, lambda: bind().optimizer(keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)))
    loop.run([2.0, 4.0], [4.0, 6.0], [1.0, inf], [6.0, 8.0], [inf, 1.0], [8.0, 10.0])
    out["accumulated"] = [copies(loop.weights), loop.optimizer.state_dict()["skipped"]]
    settings = {"gradient_accumulation_steps": 2, "use_ema": True, "ema_overwrite_frequency": 2, "ema_momentum": 0.5}
    runs = []
    for strategy in (two, None):
        loop = Loop(strategy, lambda: bind().optimizer(keras.optimizers.Adam(0.125, **settings)), start=1.0)
        for i in range(8):
            both = [1.0 + i, 3.0 + i] if i != 5 else [1.0, inf]
            loop.run(both if strategy else [np.mean(both)])
        runs.append([copies(v)[-1] for v in [loop.weights, *loop.optimizer.variables]])
    out["as on one device"] = [bool(np.allclose(a, b, rtol=1e-6, atol=0)) for a, b in zip(*runs, strict=True)]
    try:
        Loop(two, lambda: keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)).run([1.0, 1.0])
        out["native"] = ""
    except Exception as error:
        out["native"] = str(error)
    return out


def check_sparse(two, three, folder):
    with two.scope():
        table = tf.Variable(tf.zeros((4, 2)))
        optimizer = bind().optimizer(keras.optimizers.SGD(1.0))
        optimizer.build([table])

    def on_replica(rows, factor):
        with tf.GradientTape() as tape:
            scaled = optimizer.scale_loss(tf.reduce_sum(tf.gather(table, rows)) * factor)
        grad = tape.gradient(scaled, table)
        assert isinstance(grad, tf.IndexedSlices)
        optimizer.apply_gradients([(grad, table)])

    @tf.function
    def step(factors):
        def body(context):
            return tf.gather(factors, context.replica_id_in_sync_group), context.replica_id_in_sync_group

        two.run(lambda: on_replica(*_rows(*body(tf.distribute.get_replica_context()))))

    def _rows(factor, replica):
        return tf.stack([replica, replica + 1]), factor

    step(tf.constant([1.0, 2.0]))
    step(tf.constant([1.0, np.inf]))
    return copies(table), optimizer.state_dict()["skipped"]


def check_uneven(two, three, folder):
    """Five rows in batches of four: the second replica's last batch has no row. Beside Keras's bare optimizer."""
    runs = []
    for bare in (False, True):
        model = model_for(bind(), two, norm=False, optimizer=lambda: keras.optimizers.SGD(0.125), eager=True)
        if bare:
            with two.scope():
                model.compile(keras.optimizers.SGD(0.125), "mse", run_eagerly=True)
        fit(model, X[:5], batch=4, epochs=2)
        runs.append((model.get_weights(), None if bare else model.optimizer.state_dict()["skipped"]))
    return same(runs[0][0], runs[1][0]), runs[0][1]


def check_divergence(two, three, folder):
    out = {}
    mp = bind(max_consecutive_skips=2)
    loop = Loop(two, lambda: mp.optimizer(keras.optimizers.SGD(1.0)))
    loop.run([np.inf, 1.0], [1.0, np.nan], [1.0, [np.inf, 1.0]])
    with contextlib.suppress(precision.NonFiniteGradientsError):
        loop.optimizer.check()
    for name, act in (
        ("check", loop.optimizer.check),
        ("fit", lambda: fit(model_for(mp, two, norm=False), np.tile(BAD[:12], (4, 1)), callbacks=[mp.callback(1)])),
        (
            "eager",
            lambda: Loop(two, lambda: mp.optimizer(keras.optimizers.SGD(1.0)), compile=False).run(*[[1.0, np.inf]] * 8),
        ),
    ):
        try:
            act()
            out[name] = None
        except precision.NonFiniteGradientsError as error:
            out[name] = (error.tensors, error.scales, error.consecutive_skips, str(error))
    mp = bind(max_consecutive_skips=1, reduce_dtype="float16", initial=1.0, minimum=1.0)
    loop = Loop(two, lambda: mp.optimizer(keras.optimizers.SGD(1.0))).run(*[[1.2e5, 1.2e5]] * 2)
    try:
        loop.optimizer.check()
    except precision.NonFiniteGradientsError as error:
        out["sum"] = error.tensors
    single = Loop(None, lambda: bind(max_consecutive_skips=1).optimizer(keras.optimizers.SGD(1.0)))
    single.run(*[[[np.nan, 1.0]]] * 2)
    try:
        single.optimizer.check()
    except precision.NonFiniteGradientsError as error:
        out["single"] = error.tensors
    return out


def check_neutral(two, three, folder):
    scaler = bind().loss_scaler

    @tf.function
    def step(state, factors):
        def on_replica():
            factor = tf.gather(factors, tf.distribute.get_replica_context().replica_id_in_sync_group)
            grads, finite = scaler.unscale({"w": scaler.scale(factor, state)}, state)
            return grads["w"], scaler.update(state, finite)

        return two.run(on_replica)

    grads, state = step(scaler.init(), tf.constant([2.0, np.inf]))
    local = two.experimental_local_results
    out = {"grads": [float(g) for g in local(grads)], "scales": [float(s) for s in local(state.scale)]}
    _, state = step(scaler.init(), tf.constant([2.0, 3.0]))
    out["good"] = [int(s) for s in local(state.good_steps)]
    with two.scope():
        try:
            scaler.unscale([grads], scaler.init())
        except precision.UnsupportedError as error:
            out["across"] = str(error)
        out["one set"] = bool(scaler.unscale([tf.constant(1.0)], scaler.init())[1])
    return out


def check_refusals(two, three, folder):
    out = {}

    def refused(name, act):
        try:
            act()
            out[name] = None
        except Exception as error:
            out[name] = (type(error).__name__, str(error))

    outside = bind().optimizer(keras.optimizers.SGD(1.0))
    refused("outside", lambda: Loop(two, lambda: outside).run([1.0, 1.0]))
    inner = keras.optimizers.SGD(1.0)
    refused("inner outside", lambda: Loop(two, lambda: bind().optimizer(inner)).run([1.0, 1.0]))
    loop = Loop(two, lambda: bind().optimizer(keras.optimizers.SGD(1.0)))

    def across():
        with two.scope():
            loop.optimizer.scale_loss(1.0)
            loop.optimizer.apply([tf.ones(2)], [loop.weights])

    refused("across", across)
    central = tf.distribute.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"], "CPU:0")
    refused("central", lambda: Loop(central, lambda: bind().optimizer(keras.optimizers.SGD(1.0))).run([1.0, 1.0]))

    class Own(keras.optimizers.SGD):
        def _backend_update_step(self, grads, variables, learning_rate):
            for grad, variable in zip(grads, variables, strict=True):
                variable.assign_sub(grad)

    refused("own sums", lambda: Loop(two, lambda: bind().optimizer(Own(1.0))).run([1.0, 1.0]))
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=["cpu:0", "cpu:1"]))
    try:
        refused("keras.distribution", lambda: bind().optimizer("sgd"))
    finally:
        keras.distribution.set_distribution(None)
    return out


def check_graph(two, three, folder):
    """Which branches of the compiled step hold a collective, and how many collectives there are in all."""
    out = {}
    native = lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0))  # noqa: E731
    ours = lambda **kw: lambda: bind(**kw).optimizer(keras.optimizers.SGD(1.0))  # noqa: E731
    for name, make in (("native", native), ("ours", ours()), ("recorded", ours(max_consecutive_skips=2)), ("bare", lambda: keras.optimizers.SGD(1.0))):  # fmt: skip
        loop = Loop(two, make)
        definition = loop.step.get_concrete_function(tf.TensorSpec((2, 2))).graph.as_graph_def()
        functions = {f.signature.name: f for f in definition.library.function}

        def collectives(nodes, functions=functions):
            total = 0
            for node in nodes:
                total += node.op.startswith("Collective")
                for attr in node.attr.values():
                    for each in [attr.func.name] if attr.func.name else []:
                        total += collectives(functions[each].node_def) if each in functions else 0
            return total

        branches = [
            functions[node.attr[side].func.name]
            for nodes in [definition.node, *(f.node_def for f in functions.values())]
            for node in nodes
            if node.op in ("If", "StatelessIf")
            for side in ("then_branch", "else_branch")
        ]
        out[name] = {
            "in branches": sum(collectives(branch.node_def) for branch in branches),
            "branches": len(branches),
            "in all": collectives(definition.node),
            "host": [n.op for ns in [definition.node, *(f.node_def for f in functions.values())] for n in ns if "PyFunc" in n.op],
        }  # fmt: skip
    return out


def check_checkpoints(two, three, folder):
    out = {}
    mp = bind("mixed_bfloat16", growth_interval=2)
    adam = lambda: keras.optimizers.Adam(0.05, use_ema=True)  # noqa: E731
    state = lambda model: [*model.variables, *model.optimizer.variables]  # noqa: E731

    def make(strategy):
        return model_for(mp, strategy, dropout=True, optimizer=adam, eager=True)

    # Bit-equal on two replicas, with statistics that differ by replica, into an optimizer that is not built yet.
    chain = mp.checkpoints(f"{folder}/chain", keep=3)
    model = make(two)
    fit(model, BAD, batch=24)
    chain.save(2, model, extra={"file": "a", "at": [1, 2.5]})
    again = make(two)
    with two.scope():
        again.optimizer.learning_rate = 0.5
    restored = chain.restore(again)
    out["restored"] = tuple(restored)
    out["same copies"] = same(all_copies(state(model)), all_copies(state(again)))
    for each in (model, again):
        fit(each, BAD, batch=24)
    out["goes on equal"] = same(all_copies(state(model)), all_copies(state(again)))
    # Two replicas, one, three.
    single = make(None)
    out["none there"] = mp.checkpoints(f"{folder}/nothing").restore(single)
    chain.restore(single)
    fit(single, BAD, batch=24)
    chain.save(4, single)
    more = make(three)
    chain.restore(more)
    out["three alike"] = same([copies(v) * 3 for v in state(single)], all_copies(state(more)))
    fit(more, BAD, batch=24)
    out["three train"] = [more.optimizer.state_dict()["skipped"], int(more.optimizer.iterations.numpy())]
    # Foreign and damaged ones change nothing.
    before = all_copies(state(single))
    other = model_for(mp, None, norm=False, optimizer=adam, eager=True)
    mp.checkpoints(f"{folder}/other").save(1, other)
    out["errors"] = {}
    for name, act in (
        ("foreign", lambda: mp.checkpoints(f"{folder}/other").restore(single)),
        ("truncated", lambda: chain.restore(single)),
        ("json", lambda: chain.save(9, single, extra={1: 2})),
        ("nothing", lambda: chain.save(9)),
        ("no file", lambda: chain.load_model(2)),
    ):
        if name == "truncated":
            data = next(p for p in chain.store.path(4).iterdir() if ".data" in p.name)
            data.write_bytes(data.read_bytes()[:-10])
        try:
            act()
            out["errors"][name] = None
        except precision.CheckpointError as error:
            out["errors"][name] = str(error)
    out["nothing changed"] = same(before, all_copies(state(single)))
    out["an older one"] = chain.restore(single, step=2).step
    # Generators, iterators and neutral state beside a model; a .keras file.
    generator, scaler = tf.random.Generator.from_seed(3), mp.loss_scaler
    batches = iter(tf.data.Dataset.range(10))
    next(batches)
    files = mp.checkpoints(f"{folder}/files", keras_file=True)
    files.save(2, single, extra=scaler.state_dict(scaler.init()), generator=generator, batches=batches)
    want = [generator.normal([2]).numpy(), next(batches).numpy()]
    back = files.restore(single, generator=generator, batches=batches)
    out["objects"] = same(want, [generator.normal([2]).numpy(), next(batches).numpy()])
    out["neutral"] = scaler.state_dict(scaler.load_state_dict(back.extra)) == scaler.state_dict(scaler.init())
    loaded = files.load_model()
    out["keras file"] = same([v.numpy() for v in loaded.weights], [v.numpy() for v in single.weights])
    out["keras file trains"] = type(loaded.optimizer).__name__
    return out


class Stop(keras.callbacks.Callback):
    def __init__(self, after):
        super().__init__()
        self.after = after

    def on_train_batch_end(self, batch, logs=None):
        self.after -= 1
        if self.after == 0:
            raise KeyboardInterrupt


def check_resume(two, three, folder):
    """Keras's ``BackupAndRestore`` beside ours: a ``fit`` broken off after three of four batches. The scale comes down first."""
    out = {}
    mp = bind("mixed_float16", initial=2.0**26, growth_interval=2)

    def run(name, strategy, callback=None, after=None):
        model = model_for(mp, strategy, dropout=True, eager=True)
        callbacks = [callback(f"{folder}/{name}")] if callback else []
        try:
            history = fit(model, epochs=2, batch=24, callbacks=callbacks + ([Stop(after)] if after else [])).history
        except KeyboardInterrupt:
            history = None
        return [copies(v) for v in [*model.weights, *model.optimizer.variables]], history, model.optimizer.state_dict()

    native = lambda path: keras.callbacks.BackupAndRestore(path, save_freq=1)  # noqa: E731
    ours = lambda path: mp.checkpoints(path, keep=2).callback(save_every=1)  # noqa: E731
    whole = {strategy: run("whole", strategy) for strategy in (None, two)}
    for name, strategy, callback in (("native", None, native), ("ours", two, ours)):
        want, history, state = whole[strategy]
        run(name, strategy, callback, 3)
        got, resumed, _ = run(name, strategy, callback)
        out[name] = {
            "equal": same(want, got),
            "loss": history["loss"][-1] == resumed["loss"][-1],
            "epochs": len(resumed["loss"]),
            "skipped": state["skipped"],
        }
    return out


def check_patterns(two, three, folder):
    """The parity suite's patterns, with the strategies at hand."""
    four = tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(4)], cross_device_ops=tf.distribute.ReductionToOneDevice()
    )

    class Here:
        name = "tensorflow"

        def replicated(self, strategy, specs):
            done = {}
            for config in dict.fromkeys(spec.config for spec in specs):
                at = [i for i, spec in enumerate(specs) if spec.config == config]
                trainer = ReplicaTrainer(strategy, config)
                done.update(zip(at, trainer.run(np.stack([specs[i].factors for i in at])), strict=True))
            return [done[i] for i in range(len(specs))]

    runs = ((2, two, 96), (3, three, 36), (4, four, 16))
    results = [tier_replicas(Here(), each, replica_specs(count, n, steps=8)) for n, each, count in runs]
    return [result.detail for result in results], [text for result in results for text in result.failures]


CHECKS = {name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")}


def mirrored(rank, world, port, folder, names=tuple(CHECKS)):
    """One process: two replicas with TensorFlow's default reduction, three with another, and none."""
    devices = logical_devices(4)
    two = tf.distribute.MirroredStrategy(devices[:2])
    plain = tf.distribute.MirroredStrategy(devices[:2], cross_device_ops=tf.distribute.ReductionToOneDevice())
    three = tf.distribute.MirroredStrategy(devices[:3], cross_device_ops=tf.distribute.ReductionToOneDevice())
    out = {}
    for name in names:
        begin = time.process_time()
        try:
            # An eager all-reduce by TensorFlow's default is traced anew each time.
            pair = plain if name in ("uneven", "checkpoints", "resume") else two
            out[name] = CHECKS[name](pair, three, f"{folder}/{name}")
        except Exception:
            out[name] = traceback.format_exc()
        print(f"{name}: {time.process_time() - begin:.1f} s of CPU", flush=True)
    return out


# ---- MultiWorkerMirroredStrategy ---------------------------------------------------------------------------------


def worker_strategy(rank, ports):
    cluster = {"worker": [f"127.0.0.1:{port}" for port in ports]}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": rank}})
    return tf.distribute.MultiWorkerMirroredStrategy()


def multi_worker(rank, world, port, ports, folder):
    """Two processes with a replica each: what one alone overflows, both skip. At last Keras's own, which does not end."""
    strategy = worker_strategy(rank, ports)
    out = {}
    # fit, with an overflow on the second worker
    mp = bind("mixed_float16", growth_interval=3, max_consecutive_skips=2)
    data = lambda x: _sharded(tf.data.Dataset.from_tensor_slices((x, Y)).batch(12))  # noqa: E731
    model = model_for(mp, strategy)
    history = model.fit(data(X), epochs=2, verbose=0).history
    inner = model.optimizer.inner_optimizer.variables
    before = all_copies([*model.weights, *inner])
    bad = np.tile(BAD[:12], (4, 1))
    model.fit(_first(data(bad)), verbose=0)
    out["unchanged"] = same(before, all_copies([*model.weights, *inner]))
    out["state"] = model.optimizer.state_dict()
    out["weights"] = [v.numpy() for v in [*model.trainable_variables, *model.optimizer.variables]]
    out["statistics"] = [v.numpy() for v in model.non_trainable_variables]
    out["loss"] = history["loss"]
    out["evaluate"] = model.evaluate(data(X), verbose=0)
    # checkpoints: statistics differ by worker, one worker alone fails, and both go on equal
    checkpoints = mp.checkpoints(f"{folder}/run", keep=2)
    checkpoints.save(3, model, extra={"at": 3})
    try:
        checkpoints.save(4, model, extra={"at": 4} if rank == 0 else {4: "at"})
    except precision.CheckpointError as error:
        out["one failed"] = str(error)
    out["steps"] = checkpoints.steps()
    again = model_for(mp, strategy)
    out["restored"] = tuple(checkpoints.restore(again))
    for each in (model, again):
        each.fit(data(X), verbose=0)
    everything = lambda m: all_copies([*m.weights, *m.optimizer.variables])  # noqa: E731
    out["goes on equal"] = same(everything(model), everything(again))
    # the end of a run that only skips
    try:
        model.fit(data(bad), verbose=0, callbacks=[mp.callback(1)])
    except precision.NonFiniteGradientsError as error:
        out["diverged"] = (error.tensors, error.consecutive_skips, model.optimizer.state_dict()["skipped"])
    # custom loops: a plan with a delayed worker, low-precision sums, and random patterns
    plan = FaultPlan([Fault("overflow", 1, 1), Fault("delay", 2, 0, seconds=0.3), Fault("nan", 4, 0)])
    loop_mp = bind(reduce_dtype="bfloat16", growth_interval=2)
    loop = Loop(strategy, lambda: loop_mp.optimizer(keras.optimizers.SGD(1.0)), guard=loop_mp)
    states = []
    for step, row in enumerate(plan.factors(6, 2)):
        plan.wait(step, rank)
        loop.run(row)
        states.append(loop.optimizer.state_dict())
    out["as the plan says"] = states == plan.trajectory(loop_mp.policy.loss_scale, 6)
    out["loop"] = [copies(loop.weights), copies(loop.statistic)]
    Path(f"{folder}/found-{rank}").write_bytes(pickle.dumps(out))
    hang_as_keras_does(strategy, 4)


def worker_patterns(rank, world, port, ports, count):
    """The parity suite's patterns over workers; how many there were, and in how many a worker differed from the rule."""
    strategy = worker_strategy(rank, ports)
    specs = replica_specs(count, world)
    wrong = 0
    for config in dict.fromkeys(spec.config for spec in specs):
        mine = [spec for spec in specs if spec.config == config]
        for spec, result in zip(
            mine, ReplicaTrainer(strategy, config).run(np.stack([s.factors for s in mine])), strict=True
        ):
            want = expected(spec)
            wrong += not (same(result.states[0], want.states[rank]) and same(result.weights[0], want.weights[rank]))
    return len(specs), wrong


def hang_as_keras_does(strategy, seconds):
    """Keras's own optimizer, the second step overflowing on worker 1 alone; ended by SIGALRM, for it would not end."""
    loop = Loop(strategy, lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0)))
    loop.run([1.0, 1.0])
    print(f"one step is taken: {copies(loop.weights)}", flush=True)
    signal.alarm(seconds)
    loop.run([1.0, np.inf], [1.0, 1.0])
    print(f"three steps are taken: {copies(loop.weights)}", flush=True)


def _sharded(dataset):
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return dataset.with_options(options)


def _first(dataset):
    return _sharded(dataset.take(1))


# ---- killed and resumed ------------------------------------------------------------------------------------------


class Killer(keras.callbacks.Callback):
    """Ends the process by SIGKILL: at the start of a batch, or a while after a save began."""

    def __init__(self, kind, step, delay):
        super().__init__()
        self.kind, self.step, self.delay = kind, step, delay
        self.seen = 0

    def on_train_batch_begin(self, batch, logs=None):
        if self.kind == "between":
            FaultPlan([Fault("kill", self.step)]).wait(self.seen)

    def on_train_batch_end(self, batch, logs=None):
        self.seen += 1
        if self.kind == "during" and self.seen == self.step:
            threading.Thread(target=self._later, daemon=True).start()

    def _later(self):
        time.sleep(self.delay)
        os.kill(os.getpid(), signal.SIGKILL)


def restarts(rank, world, port, folder, kills):
    """Run a ``fit`` to its end in processes that are killed one after the other; and one that is never killed.

    The processes are forked before TensorFlow has started anything, which spares importing it each time.

    Returns:
        Whether both ended bit-equal, the number of processes that were killed, the positions they resumed from, and what
        was left in the folder.
    """
    whole, resumed = f"{folder}/whole", f"{folder}/resumed"
    assert _in_child(lambda: _fit_to(whole, None)) == 0
    killed, at = 0, []
    for kill in kills:
        at.append(_latest(resumed))
        code = _in_child(lambda kill=kill: _fit_to(resumed, kill))
        killed += code == -signal.SIGKILL
    code = _in_child(lambda: _fit_to(resumed, None))
    with np.load(f"{whole}.npz") as one, np.load(f"{resumed}.npz") as other:
        equal = list(one) == list(other) and all(np.array_equal(one[k], other[k]) for k in one)
    return equal, killed, at, sorted(os.listdir(resumed)), code


def _latest(folder):
    return precision.CheckpointStore(folder).latest()


def _in_child(work):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _fit_to(folder, kill):
    tf.config.threading.set_intra_op_parallelism_threads(1)
    mp = bind("mixed_float16", initial=2.0**26, growth_interval=2)
    model = model_for(mp, None, dropout=True)
    model.run_eagerly = True
    callback = mp.checkpoints(folder, keep=2).callback(save_every=1)
    callbacks = [Killer(*kill), callback] if kill else [callback]
    fit(model, epochs=3, batch=16, callbacks=callbacks)
    values = [v.numpy() for v in [*model.variables, *model.optimizer.variables]]
    np.savez(f"{folder}.npz", *values)
