"""The parity suite's data: scikit-learn's handwritten digits, and the characters of a text this package ships."""

from __future__ import annotations

import functools
import importlib.resources

import numpy as np

from precision.errors import BackendUnavailableError
from precision.parity.adapter import Array
from precision.parity.models import CONTEXT, VOCABULARY

SHAPES = {"mlp": (64,), "cnn": (8, 8, 1), "transformer": (8, 8)}
HELD_OUT = 297


@functools.cache
def _digits() -> tuple[Array, Array]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise BackendUnavailableError(
            "the parity suite trains on scikit-learn's digits: pip install 'precision-policy[all]' (or scikit-learn)."
        ) from error
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    return (images[order] / 16.0).astype(np.float32), labels[order].astype(np.int32)


@functools.cache
def _characters() -> Array:
    text = importlib.resources.files("precision.parity").joinpath("text.txt").read_text(encoding="utf-8")
    common = sorted(sorted(set(text)), key=lambda c: (-text.count(c), c))[: VOCABULARY - 1]
    index = {character: i for i, character in enumerate(common)}
    return np.array([index.get(character, VOCABULARY - 1) for character in text], np.int32)


def batches(model: str, steps: int, batch_size: int, seed: int = 0) -> tuple[Array, Array]:
    """Return inputs ``(steps, batch, ...)`` and int32 labels for a model, drawn at random from the training part."""
    rng = np.random.default_rng(seed + 1)
    if model == "chars":
        text = _characters()[: -len(_characters()) // 10]
        starts = rng.integers(0, len(text) - CONTEXT - 1, (steps, batch_size))
        windows = text[starts[..., None] + np.arange(CONTEXT + 1)]
        return windows[..., :-1], windows[..., 1:]
    images, labels = _digits()
    rows = rng.integers(0, len(labels) - HELD_OUT, (steps, batch_size))
    return images[rows].reshape(steps, batch_size, *SHAPES[model]), labels[rows]


def held_out(model: str) -> tuple[Array, Array]:
    """Return the inputs and labels that no batch is drawn from, in a fixed order."""
    if model == "chars":
        text = _characters()[-len(_characters()) // 10 :]
        count = (len(text) - 1) // CONTEXT
        return text[: count * CONTEXT].reshape(count, CONTEXT), text[1 : count * CONTEXT + 1].reshape(count, CONTEXT)
    images, labels = _digits()
    return images[-HELD_OUT:].reshape(HELD_OUT, *SHAPES[model]), labels[-HELD_OUT:]
