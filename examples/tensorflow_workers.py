"""TensorFlow on two workers: run without arguments, it starts itself as two processes on this machine's loopback address.

Worker 1 alone overflows at one step. Both skip that step, and hold the same weights and loss scale after each.
"""

import json
import os
import subprocess
import sys
import tempfile

STEPS, BATCH, OVERFLOW_AT = 40, 64, 5


def start() -> int:
    """Start both workers; each finds the other through ``TF_CONFIG``, which a cluster's scheduler would set."""
    from precision.testing import free_port

    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    started = []
    with tempfile.TemporaryDirectory() as folder:
        for index in range(2):
            config = json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}})
            environment = {**os.environ, "TF_CONFIG": config, "CUDA_VISIBLE_DEVICES": ""}
            environment |= {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "2"}
            started.append(subprocess.Popen([sys.executable, __file__, folder], env=environment))
        try:
            return max(abs(worker.wait(timeout=200)) for worker in started)
        finally:
            for worker in started:
                worker.kill()


def work(folder: str) -> None:
    """Train as one of the workers, with checkpoints in a folder that all of them see."""
    import keras
    import numpy as np
    import tensorflow as tf
    from sklearn.datasets import load_digits

    import precision
    from precision.testing import Fault, FaultPlan

    strategy = tf.distribute.MultiWorkerMirroredStrategy()  # before anything else of TensorFlow
    me = strategy.cluster_resolver.task_id
    mp = precision.bind("mixed_float16", backend="tensorflow")
    plan = FaultPlan([Fault("overflow", OVERFLOW_AT, rank=1)])

    images, labels = load_digits(return_X_y=True)
    data = tf.data.Dataset.from_tensor_slices(((images / 16).astype("float32"), labels)).repeat().batch(BATCH)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA

    keras.utils.set_random_seed(0)
    with strategy.scope():  # model and optimizer belong inside
        with mp.scope():
            x = keras.Input((64,))
            h = keras.layers.BatchNormalization()(keras.layers.Dense(32, activation="relu")(x))
            model = mp.prepare(keras.Model(x, keras.layers.Dense(10)(h)))
        optimizer = mp.optimizer(keras.optimizers.Adam(1e-2), global_clipnorm=1.0)
        optimizer.build(model.trainable_variables)

    checkpoints = mp.checkpoints(folder, keep=2)

    @tf.function
    def train_step(batch, poison):
        def on_replica(images, labels):
            with mp.guard(model):
                with tf.GradientTape() as tape:
                    logits = model(images, training=True)
                    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
                    loss = tf.nn.compute_average_loss(losses, global_batch_size=BATCH) * poison
                    scaled = optimizer.scale_loss(loss)
                gradients = tape.gradient(scaled, model.trainable_variables)
                optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        return strategy.reduce("SUM", strategy.run(on_replica, args=batch), axis=None)

    restored = checkpoints.restore(model, optimizer)  # None: this run is new
    batches = iter(strategy.experimental_distribute_dataset(data.with_options(options)))
    for step in range(restored.step if restored else 0, STEPS):
        loss = train_step(next(batches), tf.constant(plan.factor(step, me)))
        if (step + 1) % 20 == 0:
            checkpoints.save(step + 1, model, optimizer)

    state = optimizer.state_dict()
    total = sum(float(np.abs(v.numpy()).sum()) for v in model.trainable_variables)
    sys.stdout.write(  # line and end at once: two processes write to the same terminal
        f"worker {me}: loss {loss:.4f}, {state['skipped']} skipped, loss scale {state['scale']:g}, weights {total:.6f}, "
        f"checkpoints {checkpoints.steps()}\n"
    )
    sys.stdout.flush()


if __name__ == "__main__":
    if "TF_CONFIG" in os.environ:
        work(sys.argv[1])
    else:
        sys.exit(start())
