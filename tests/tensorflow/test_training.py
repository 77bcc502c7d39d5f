"""Whole training steps: ``fit`` compiled and not, custom loops in and out of ``tf.function``, and statistics kept on skips."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from precision import LossScaleError, NonFiniteGradientsError, PolicyError, PrecisionWarning, Rule
from precision_tensorflow import PrecisionLossScaleOptimizer
from tests.tensorflow.helpers import bind, data, equal, small_model, unscaled, values

X, Y = data()
BAD = np.where(np.arange(16)[:, None] == 3, np.inf, X).astype(np.float32)
HOW = {"graph": {}, "xla": {"jit_compile": True}, "eager": {"run_eagerly": True}}


def compiled(mp, how="graph", norm=True, guard=True, **options):
    with mp.scope():
        model = mp.prepare(small_model(norm=norm), guard=guard)
    model.compile(optimizer=mp.optimizer(keras.optimizers.Adam(0.02)), loss="mse", **HOW[how], **options)
    return model


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("preset", ["mixed_bfloat16", "mixed_float16"])
def test_fit_trains_and_scales(how, preset):
    model = compiled(bind(preset, growth_interval=4), how)
    losses = model.fit(X, Y, batch_size=4, epochs=5, shuffle=False, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    state = model.optimizer.state_dict()
    assert (state["scale"], state["good_steps"], state["skipped"]) == (1024.0 * 2**5, 0, 0)
    assert int(model.optimizer.iterations) == 20
    assert model.predict(X, verbose=0).dtype == np.float32


@pytest.mark.parametrize("how", HOW)
def test_a_skipped_step_of_fit_leaves_weights_statistics_and_slots(how):
    model = compiled(bind("mixed_bfloat16"), how)
    model.fit(X, Y, batch_size=16, verbose=0)
    before = values(model.weights), values(model.optimizer.inner_optimizer.variables)
    statistics = model.get_layer("norm").moving_mean.numpy()
    assert np.any(statistics != 0)  # the first step did move them
    model.fit(BAD, Y, batch_size=16, epochs=1, verbose=0)
    assert equal(before[0], values(model.weights))
    assert equal(before[1], values(model.optimizer.inner_optimizer.variables))
    state = model.optimizer.state_dict()
    assert (state["skipped"], state["scale"]) == (1, 512.0)
    model.fit(X, Y, batch_size=16, epochs=1, verbose=0)
    assert not np.array_equal(statistics, model.get_layer("norm").moving_mean.numpy())
    assert all(np.all(np.isfinite(v)) for v in values(model.weights))


@pytest.mark.parametrize("how", ["graph", "xla"])
def test_the_guard_can_be_left_out_and_keras_then_poisons_the_statistics(how):
    model = compiled(bind("mixed_bfloat16"), how, guard=False)
    model.train_on_batch(X, Y)
    model.train_on_batch(BAD, Y)
    assert model.optimizer.state_dict()["skipped"] == 1
    assert not np.all(np.isfinite(model.get_layer("norm").moving_variance.numpy()))


def test_fit_runs_several_steps_an_execution():
    model = compiled(bind("mixed_bfloat16", growth_interval=4), steps_per_execution=3)
    x = np.concatenate([X, BAD, X])
    model.fit(x, np.concatenate([Y, Y, Y]), batch_size=16, epochs=2, shuffle=False, verbose=0)
    state = model.optimizer.state_dict()
    assert (state["skipped"], state["good_steps"], int(model.optimizer.iterations)) == (2, 1, 4)
    assert all(np.all(np.isfinite(v)) for v in values(model.weights))


def test_fit_equals_the_native_optimizer_step_for_step():
    """Same model, same data, powers of two for scales: the trajectory of weights is Keras's own, bit for bit."""
    results = []
    for ours in (True, False):
        keras.utils.set_random_seed(0)
        mp = bind("mixed_float16", initial=2.0**15, growth_interval=3)
        with mp.scope():
            model = mp.prepare(small_model())
        inner = keras.optimizers.Adam(0.02)
        native = keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**15, dynamic_growth_steps=3)
        model.compile(optimizer=mp.optimizer(inner) if ours else native, loss="mse")
        model.fit(np.concatenate([X, BAD]), np.concatenate([Y, Y]), batch_size=8, epochs=3, shuffle=False, verbose=0)
        results.append((values(model.weights), float(model.optimizer.dynamic_scale.numpy())))
    assert equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


def test_keras_does_not_wrap_the_wrapper_again():
    mp = bind("mixed_float16")
    with mp.scope():
        model = small_model()
        model.compile(optimizer=mp.optimizer("sgd"), loss="mse")
        plain = small_model()
        plain.compile(optimizer="sgd", loss="mse")
    assert type(model.optimizer) is PrecisionLossScaleOptimizer
    assert type(model.optimizer.inner_optimizer) is keras.optimizers.SGD
    assert type(plain.optimizer) is keras.optimizers.LossScaleOptimizer  # which it does do with a bare one


def test_several_outputs_weights_and_masks():
    mp = bind("mixed_bfloat16", initial=4.0)
    with mp.scope():
        x = keras.Input((4,))
        h = keras.layers.Dense(3, name="fc")(x)
        model = mp.prepare(keras.Model(x, [keras.layers.Dense(2, name="a")(h), keras.layers.Dense(2, name="b")(h)]))
    assert model.output_names == ["a_float32", "b_float32"]
    results = []
    start = model.get_weights()
    for optimizer in (mp.optimizer(keras.optimizers.SGD(0.5)), keras.optimizers.SGD(0.5)):
        model.set_weights(start)
        model.compile(
            optimizer=optimizer,
            loss={"a_float32": "mse", "b_float32": "mae"},
            loss_weights={"a_float32": 0.25, "b_float32": 2.0},
        )
        weight = np.linspace(0, 1, 16).astype(np.float32)
        model.train_on_batch(X, [Y, Y], sample_weight=[weight, weight])
        results.append(values(model.weights))
    for scaled, plain, before in zip(*results, start, strict=True):
        step = np.max(np.abs(plain - before))
        assert np.max(np.abs(scaled - plain)) <= 2.0**-6 * max(step, 1e-3)  # bfloat16 gradients, scaled by 4 or not
    assert results[0][0].shape == start[0].shape
    assert not equal(results[0], [w.astype(np.float64) for w in start])


def test_one_trace_serves_the_whole_run():
    traces = []

    class Counting(keras.Model):
        def train_step(self, data):
            traces.append(tf.executing_eagerly())
            return super().train_step(data)

    mp = bind("mixed_bfloat16", growth_interval=2)
    with mp.scope():
        inner = small_model(norm=True)
        model = mp.prepare(Counting(inner.inputs, inner.outputs))
    model.compile(optimizer=mp.optimizer("sgd"), loss="mse")
    model.fit(np.concatenate([X, BAD, X]), np.concatenate([Y, Y, Y]), batch_size=16, epochs=4, shuffle=False, verbose=0)
    assert traces == [False]
    assert model.optimizer.state_dict()["skipped"] == 4


# ---- custom loops ------------------------------------------------------------------------------------------------


def loop(mp, model, optimizer, guard=True):
    def step(x, y):
        def body():
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
                scaled = optimizer.scale_loss(loss)
            optimizer.apply_gradients(
                zip(tape.gradient(scaled, model.trainable_variables), model.trainable_variables, strict=True)
            )
            return loss

        if guard:
            with mp.guard(model):
                return body()
        return body()

    return step


COMPILERS = {"eager": lambda f: f, "graph": tf.function, "xla": tf.function(jit_compile=True)}


@pytest.mark.parametrize("how", COMPILERS)
def test_custom_loops_train_and_skip_cleanly(how):
    mp = bind("mixed_bfloat16", growth_interval=3)
    with mp.scope():
        model = mp.prepare(small_model(norm=True), guard=False)
    optimizer = mp.optimizer(keras.optimizers.Adam(0.02))
    step = COMPILERS[how](loop(mp, model, optimizer))
    losses = [float(step(tf.constant(X), tf.constant(Y))) for _ in range(8)]
    assert losses[-1] < losses[0]
    before = values(model.weights), values(optimizer.inner_optimizer.variables)
    step(tf.constant(BAD), tf.constant(Y))
    assert equal(before[0], values(model.weights))
    assert equal(before[1], values(optimizer.inner_optimizer.variables))
    assert optimizer.state_dict() == {
        "version": 1, "scale": 2048.0, "good_steps": 0, "hysteresis_left": 0, "skipped": 1, "consecutive_skips": 1,
    }  # fmt: skip


def test_a_custom_loop_is_traced_once():
    mp = bind("mixed_bfloat16", growth_interval=2)
    with mp.scope():
        model = mp.prepare(small_model(norm=True))
    optimizer = mp.optimizer("sgd")
    optimizer.build(model.trainable_variables)
    step = tf.function(loop(mp, model, optimizer))
    for x in (X, X, BAD, X, X, BAD, X):
        step(tf.constant(x), tf.constant(Y))
    assert step.experimental_get_tracing_count() == 1


def test_a_guard_entered_outside_the_function_is_refused():
    mp = bind("mixed_bfloat16")
    with mp.scope():
        model = mp.prepare(small_model(norm=True))
    step = tf.function(loop(mp, model, mp.optimizer("sgd"), guard=False))
    with mp.guard(model), pytest.raises(LossScaleError, match="mp.guard was entered outside the tf.function"):
        step(tf.constant(X), tf.constant(Y))


def test_a_guard_covers_statistics_and_not_frozen_weights_metrics_or_seeds():
    inner = keras.Sequential(
        [keras.layers.Dense(3, name="frozen"), keras.layers.BatchNormalization(name="norm"), keras.layers.Dropout(0.5)]
    )
    inner.build((None, 4))
    inner.get_layer("frozen").trainable = False
    inner.compile("sgd", "mse", metrics=["mae"])
    inner.train_on_batch(X, np.ones((16, 3)))
    from precision_tensorflow.guard import statistics

    assert sorted(v.name for v in statistics(inner)) == ["moving_mean", "moving_variance"]
    inner.get_layer("norm").trainable = False
    assert statistics(inner) == []


def test_a_guard_takes_plain_variables_and_nests():
    mp = bind()
    optimizer, v = mp.optimizer("sgd"), keras.Variable([1.0])
    outer, inner = tf.Variable(1.0), tf.Variable(1.0)
    for value in (np.nan, 1.0):
        with mp.guard([outer]), mp.guard([inner]):
            outer.assign_add(1.0)
            inner.assign_add(10.0)
            optimizer.build([v])
            optimizer.apply([tf.constant([value], tf.float32) * optimizer.scale], [v])
    assert (float(outer), float(inner)) == (2.0, 11.0)  # restored once, kept once


def test_two_optimizers_keep_scales_of_their_own():
    mp = bind(initial=16.0)
    one, two = mp.optimizer(keras.optimizers.SGD(1.0)), mp.optimizer(keras.optimizers.SGD(1.0))
    a, b = keras.Variable([0.0]), keras.Variable([0.0])

    @tf.function
    def step(poison):
        with tf.GradientTape(persistent=True) as tape:
            scaled_a = one.scale_loss(tf.reduce_sum(a * poison))
            scaled_b = two.scale_loss(tf.reduce_sum(b * 2.0))
        one.apply([tape.gradient(scaled_a, a.value)], [a])
        two.apply([tape.gradient(scaled_b, b.value)], [b])

    one.build([a])
    two.build([b])
    for poison in (1.0, np.inf, 1.0):
        step(tf.constant(poison, tf.float32))
    assert (float(a.value[0]), float(b.value[0])) == (-2.0, -6.0)
    assert (float(one.scale), float(two.scale)) == (8.0, 16.0)


def test_an_embedding_trains_sparsely_in_a_graph():
    mp = bind("mixed_bfloat16", initial=8.0)
    with mp.scope():
        x = keras.Input((2,), dtype="int32")
        model = mp.prepare(
            keras.Model(x, keras.layers.Dense(1)(keras.layers.Flatten()(keras.layers.Embedding(5, 3, name="table")(x))))
        )
    optimizer = mp.optimizer(keras.optimizers.SGD(0.5))
    table = model.get_layer("table").embeddings
    before = table.numpy()
    step = tf.function(loop(mp, model, optimizer))
    step(tf.constant([[1, 3]]), tf.constant([[1.0]]))
    moved = np.any(table.numpy() != before, axis=1)
    assert moved.tolist() == [False, True, False, True, False]


def test_a_float16_loss_costs_at_most_a_few_skips():
    """A loss kept in float16 cannot be given a gradient above 65504: the scale has to come down, and then training goes on."""
    mp = bind("mixed_float16", initial=2.0**18)
    optimizer, v = mp.optimizer(keras.optimizers.SGD(0.25)), keras.Variable([1.0])

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.cast(v.value, tf.float16) ** 2)
            scaled = optimizer.scale_loss(loss)
        optimizer.apply([tape.gradient(scaled, v.value)], [v])
        return scaled

    optimizer.build([v])
    first = step()
    assert (first.dtype, float(first)) == (tf.float32, 2.0**18)
    for _ in range(7):
        step()
    state = optimizer.state_dict()
    assert state["skipped"] == 4  # 2**18 -> 2**14, where 2 * 2**14 fits
    assert float(v.value[0]) == 0.5**4


# ---- output dtype, loss, warnings --------------------------------------------------------------------------------


def test_outputs_leave_in_the_output_dtype_for_each_kind_of_model():
    mp = unscaled("mixed_bfloat16")
    with mp.scope():
        raw = small_model()
        sequential = keras.Sequential([keras.layers.Dense(2)])
        subclassed = type(
            "Mine", (keras.Model,), {"call": lambda self, x: {"y": self.a(x), "n": keras.ops.shape(x)[0]}}
        )()
        subclassed.a = keras.layers.Dense(2)
        ended = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2), mp.output_layer(name="out")])
    sequential(X)
    subclassed(X)
    assert raw(X).dtype == sequential(X).dtype == subclassed(X)["y"].dtype == tf.bfloat16  # what Keras gives
    for model in (raw, sequential):
        prepared = mp.prepare(model)
        assert prepared(X).dtype == tf.float32
        assert np.array_equal(prepared(X), tf.cast(model(X), tf.float32))
        assert {id(w) for w in prepared.weights} == {id(w) for w in model.weights}
        assert prepared.dtype_policy == model.dtype_policy
    again = mp.prepare(subclassed)
    assert mp.prepare(again) is subclassed
    assert subclassed(X)["y"].dtype == tf.float32
    assert mp.prepare(ended) is ended
    assert ended(X).dtype == tf.float32


def test_losses_are_computed_in_float32():
    """In float16 the squares of 300 are infinite."""
    mp = bind("mixed_float16", initial=1.0)
    with mp.scope():
        model = mp.prepare(small_model())
    model.compile(optimizer=mp.optimizer("sgd"), loss="mse")
    loss = model.evaluate(X, np.full((16, 2), 300.0, np.float32), verbose=0)
    want = np.mean((model.predict(X, verbose=0).astype(np.float64) - 300.0) ** 2)
    assert abs(loss - want) < 1e-5 * want


def test_prepare_warns_of_what_does_not_fit():
    mp = bind("mixed_bfloat16", rules=(Rule(module="**nrom*", dtype="float32"),))
    with mp.scope():
        model = small_model(norm=True)
    with pytest.warns(PrecisionWarning, match=r"rule '\*\*nrom\*' matched nothing in the model's layers: .*norm"):
        mp.prepare(model)
    with pytest.warns(PrecisionWarning, match=r"no layer of the model computes in bfloat16, only in float32: create"):
        bind("mixed_bfloat16").prepare(small_model())


def test_prepare_refuses_what_it_cannot_do():
    mp = bind("mixed_bfloat16")
    with pytest.raises(PolicyError, match="takes a keras.Model, not Dense"):
        mp.prepare(keras.layers.Dense(1))
    with pytest.raises(PolicyError, match="needs a built model"):
        mp.prepare(keras.Sequential([keras.layers.Dense(1)]))
    with mp.scope():
        model = small_model()
    model.compile("sgd", "mse")
    with pytest.raises(PolicyError, match="prepare, then compile"):
        mp.prepare(model)


def test_a_named_output_layer_and_the_rules_survive_saving(tmp_path):
    mp = bind("mixed_bfloat16", rules=(Rule(module="fc", dtype="float32"),))
    with mp.scope():
        model = mp.prepare(small_model())
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    assert [(layer.name, layer.compute_dtype) for layer in loaded.layers[1:]] == [
        ("fc", "float32"), ("head", "bfloat16"), ("head_float32", "float32"),
    ]  # fmt: skip
    assert np.array_equal(model.predict(X, verbose=0), loaded.predict(X, verbose=0))


# ---- watching a run ----------------------------------------------------------------------------------------------


def test_the_callback_logs_scale_and_skips():
    model = compiled(bind("mixed_bfloat16", growth_interval=2))
    mp = bind()
    history = model.fit(np.concatenate([X, BAD]), np.concatenate([Y, Y]), batch_size=16, epochs=2, shuffle=False, verbose=0, callbacks=[mp.callback()]).history  # fmt: skip
    assert history["loss_scale"] == [512.0, 256.0]
    assert history["skipped_steps"] == [1, 2]


@pytest.mark.parametrize("how", ["callback", "end of fit"])
def test_fit_stops_after_too_many_skips_in_a_row(how):
    mp = bind("mixed_bfloat16", max_consecutive_skips=4)
    model = compiled(mp)
    batches = []

    class Count(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            batches.append(batch)

    callbacks = [Count(), mp.callback()] if how == "callback" else [Count()]
    with pytest.raises(
        NonFiniteGradientsError,
        match=r"max_consecutive_skips = 4\).*\nFirst gradients that are not finite: .*/kernel \(",
    ):
        model.fit(BAD[[3] * 40], Y[[3] * 40], batch_size=2, epochs=1, verbose=0, callbacks=callbacks)
    assert len(batches) == (8 if how == "callback" else 20)


def test_the_callback_needs_our_optimizer():
    model = small_model()
    model.compile("sgd", "mse")
    with pytest.raises(PolicyError, match=r"needs a model compiled with mp.optimizer\(...\); this one has SGD"):
        model.fit(X, Y, verbose=0, callbacks=[bind().callback()])


def test_keras_own_callbacks_find_what_they_look_for(tmp_path):
    model = compiled(bind("mixed_bfloat16"))
    rates = []

    class Rates(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            rates.append(round(float(self.model.optimizer.learning_rate), 6))

    model.fit(X, Y, epochs=3, verbose=0, callbacks=[
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5),
        keras.callbacks.ModelCheckpoint(tmp_path / "best.keras", monitor="loss", save_best_only=True), Rates(),
    ])  # fmt: skip
    assert rates == [0.01, 0.005, 0.0025]
    loaded = keras.models.load_model(tmp_path / "best.keras")
    assert float(loaded.optimizer.inner_optimizer.learning_rate) == np.float32(0.0025)
    assert loaded.optimizer.state_dict() == model.optimizer.state_dict()


def test_a_model_class_of_its_own_is_prepared_in_place_and_trains():
    class Mine(keras.Model):
        def __init__(self):
            super().__init__()
            self.fc, self.norm = keras.layers.Dense(3), keras.layers.BatchNormalization()
            self.head = keras.layers.Dense(2)

        def call(self, x, training=False):
            return self.head(self.norm(self.fc(x), training=training))

    mp = bind("mixed_bfloat16")
    with mp.scope():
        model = Mine()
    model(X)
    assert mp.prepare(model) is model
    model.compile(optimizer=mp.optimizer(keras.optimizers.Adam(0.02)), loss="mse")
    losses = model.fit(X, Y, epochs=5, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    before = values(model.weights)
    model.fit(BAD, Y, batch_size=16, verbose=0)
    assert equal(before, values(model.weights))
    assert not np.array_equal(before[4], np.zeros(3))  # the moving mean did move in training mode
    assert model.predict(X, verbose=0).dtype == np.float32


def test_outputs_that_share_a_layer_get_names_of_their_own():
    mp = unscaled("mixed_bfloat16")
    with mp.scope():
        x, y = keras.Input((5, 4)), keras.Input((4,))
        sequence, *states = keras.layers.LSTM(2, return_state=True, name="lstm")(x)
        dense = keras.layers.Dense(2, name="d")
        model = mp.prepare(keras.Model([x, y], [sequence, *states, dense(y), dense(-y)]))
    assert model.output_names == ["lstm_float32", "lstm_float32_1", "lstm_float32_2", "d_float32", "d_float32_1"]
    assert {out.dtype for out in model([np.zeros((2, 5, 4)), np.zeros((2, 4))])} == {tf.float32}


def test_a_guard_needs_variables_to_guard():
    model = keras.Sequential([keras.layers.Dense(2), keras.layers.BatchNormalization()])
    with pytest.raises(PolicyError, match="needs a built model"), bind().guard(model):
        pass
    for wrong in (tf.Variable([1.0, 2.0]), keras.Variable(1.0), [tf.constant(1.0)], 3):
        with pytest.raises(PolicyError, match="a list of variables, not"):
            bind().guard(wrong)


def test_a_guard_is_not_entered_twice_at_once_but_again():
    w = tf.Variable(1.0)
    guard, optimizer, v = bind().guard([w]), bind().optimizer("sgd"), keras.Variable([1.0])
    with guard, pytest.raises(LossScaleError, match="entered already"), guard:
        pass
    for _ in range(2):
        with guard:
            w.assign_add(1.0)
            optimizer.apply([tf.constant([np.nan]) * optimizer.scale], [v])
    assert float(w) == 1.0


def test_a_guard_that_nothing_asked_for_warns():
    """A function traced without a guard cannot restore one that its caller enters later."""
    mp = bind("mixed_bfloat16")
    with mp.scope():
        model = mp.prepare(small_model(norm=True))
    step = tf.function(loop(mp, model, mp.optimizer("sgd"), guard=False))
    step(tf.constant(X), tf.constant(Y))
    with pytest.warns(PrecisionWarning, match="asked for this guard"), mp.guard(model):
        step(tf.constant(X), tf.constant(Y))
    unscaling = unscaled("mixed_bfloat16")
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrecisionWarning)
        loop(unscaling, model, unscaling.optimizer("sgd"))(tf.constant(X), tf.constant(Y))


def test_the_callback_counts_batches_not_executions():
    mp = bind(max_consecutive_skips=2)
    model = mp.prepare(small_model())
    model.compile(optimizer=mp.optimizer("sgd"), loss="mse", steps_per_execution=3)
    bad = np.full((8 * 12, 4), np.nan, np.float32)
    with pytest.raises(NonFiniteGradientsError, match=r"^6 steps in a row"):  # the end of the second execution
        model.fit(bad, bad[:, :2], batch_size=8, verbose=0, callbacks=[mp.callback(every=5)])


@pytest.mark.parametrize("how", HOW)
def test_master_weights_start_from_the_variables_however_fit_runs(how):
    mp = bind("bfloat16")
    with mp.scope():
        model = mp.prepare(small_model())
    start = values(model.trainable_variables)
    model.compile(optimizer=mp.optimizer(keras.optimizers.SGD(0.0), master_weights=True), loss="mse", **HOW[how])
    model.train_on_batch(X, Y)
    masters = [v for v in model.optimizer.variables if v.name.endswith("_master")]
    assert equal(values(masters), start)
    assert equal(values(model.trainable_variables), start)
