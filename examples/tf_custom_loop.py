"""TensorFlow, a training loop of one's own: a small network on handwritten digits, in the precision of ``precision.toml``."""

import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

from pathlib import Path

import keras
import tensorflow as tf
from keras import layers
from sklearn.datasets import load_digits

import precision

mp = precision.bind(Path(__file__).parent / "precision.toml", backend="tensorflow")

images, labels = load_digits(return_X_y=True)
images = (images / 16.0).astype("float32")
train, test = slice(0, 1500), slice(1500, None)

keras.utils.set_random_seed(0)
with mp.scope():
    x = keras.Input((64,))
    h = layers.Dense(128, activation="relu", name="fc")(x)
    h = layers.BatchNormalization(name="norm")(h)
    model = mp.prepare(keras.Model(x, layers.Dense(10, name="head")(h)))

optimizer = mp.optimizer(keras.optimizers.SGD(0.1, momentum=0.9), global_clipnorm=1.0)


@tf.function
def train_step(images, labels):
    with mp.guard(model):  # BatchNorm's statistics are put back if the step is skipped
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
            scaled = optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))  # unscales, clips, skips
    return loss


batches = tf.data.Dataset.from_tensor_slices((images[train], labels[train])).shuffle(1500, seed=0).batch(50)
for epoch in range(5):
    losses = [train_step(*batch) for batch in batches]
    print(f"epoch {epoch}: loss {tf.reduce_mean(losses):.3f}, loss scale {optimizer.scale:g}")

predicted = tf.argmax(model(images[test]), axis=-1)
print(f"accuracy {tf.reduce_mean(tf.cast(predicted == labels[test], tf.float32)):.3f}")
print(f"skipped steps {optimizer.state_dict()['skipped']}")
