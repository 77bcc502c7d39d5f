"""Keras ``fit``: a convolutional network on handwritten digits, in the precision of ``precision.toml``."""

import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

from pathlib import Path

import keras
from keras import layers
from sklearn.datasets import load_digits

import precision

mp = precision.bind(Path(__file__).parent / "precision.toml", backend="keras")

images, labels = load_digits(return_X_y=True)
images = (images / 16.0).astype("float32").reshape(-1, 8, 8, 1)
train, test = slice(0, 1500), slice(1500, None)

keras.utils.set_random_seed(0)
with mp.scope():  # the policy for every layer created here
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )
model = mp.prepare(model)  # logits leave in float32; a skipped step leaves BatchNorm's statistics alone

model.compile(
    optimizer=mp.optimizer(keras.optimizers.Adam(3e-3)),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
history = model.fit(images[train], labels[train], batch_size=50, epochs=5, verbose=0, callbacks=[mp.callback()]).history
_, accuracy = model.evaluate(images[test], labels[test], verbose=0)

print(", ".join(f"{layer.name}: {layer.compute_dtype}" for layer in model.layers))
print(f"loss {history['loss'][0]:.3f} -> {history['loss'][-1]:.3f}, accuracy {accuracy:.3f}")
print(f"loss scale {history['loss_scale'][-1]:g}, skipped steps {history['skipped_steps'][-1]}")
