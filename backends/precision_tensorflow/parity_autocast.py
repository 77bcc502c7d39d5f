"""TensorFlow's side of the op cases under ``mp.autocast``: each op as users spell it, and what is seen in the graph that ran."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from precision.parity.adapter import Array, OpResult
from precision_tensorflow.bound import TensorFlowPolicy
from precision_tensorflow.opcast.families import FAMILY


def _padded(x: Any, size: int = 1) -> Any:
    return tf.pad(x, [[0, 0], [size, size], [size, size], [0, 0]])


def _attention(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
    heads = [tf.expand_dims(x, 2) for x in (q, k, v)]
    mask = None if mask is None else mask[None, None]
    return tf.squeeze(keras.ops.dot_product_attention(*heads, mask=mask, scale=0.25), 2)


def _group_norm(x: Any, scale: Any, offset: Any) -> Any:
    groups = (2, x.shape[-1] // 2)
    split = tf.reshape(x, (*x.shape[:-1], *groups))
    mean, variance = tf.nn.moments(split, (1, 2, 4), keepdims=True)
    scale, offset = tf.reshape(scale, groups), tf.reshape(offset, groups)
    return tf.reshape(tf.nn.batch_normalization(split, mean, variance, offset, scale, 1e-5), x.shape)


def _batch_norm(x: Any, scale: Any, offset: Any) -> Any:
    return tf.nn.batch_normalization(x, *tf.nn.moments(x, (0, 1, 2)), offset, scale, 1e-5)


def _instance_norm(x: Any) -> Any:
    mean, variance = tf.nn.moments(x, (1, 2), keepdims=True)
    return tf.nn.batch_normalization(x, mean, variance, None, None, 1e-5)


def _cosine_similarity(a: Any, b: Any) -> Any:
    return -keras.losses.cosine_similarity(a, b)


def _kl(log_p: Any, q: Any) -> Any:
    return tf.reduce_mean(tf.reduce_sum(q * (tf.math.log(q) - log_p), -1))


def _cross_entropy(x: Any, y: Any) -> Any:
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=x))


def _lstm_cell(x: Any, h: Any, c: Any, wx: Any, wh: Any, bias: Any) -> Any:
    i, f, g, o = tf.split(tf.matmul(x, wx) + tf.matmul(h, wh) + bias, 4, -1)
    return tf.sigmoid(o) * tf.tanh(tf.sigmoid(f) * c + tf.sigmoid(i) * tf.tanh(g))


def _gru_cell(x: Any, h: Any, wx: Any, wh: Any, bias: Any) -> Any:
    (xr, xz, xn), (hr, hz, hn) = tf.split(tf.matmul(x, wx) + bias, 3, -1), tf.split(tf.matmul(h, wh), 3, -1)
    z = tf.sigmoid(xz + hz)
    return (1 - z) * tf.tanh(xn + tf.sigmoid(xr + hr) * hn) + z * h


def _pool(x: Any, kind: str) -> Any:
    return tf.nn.pool(x, (2, 2), kind, strides=(2, 2))


OPS: dict[str, Callable[..., Any]] = {
    "matmul": tf.matmul, "batched_matmul": tf.matmul, "matvec": tf.linalg.matvec, "dot": lambda a, b: tf.tensordot(a, b, 1),
    "linear": lambda x, k, b: tf.nn.bias_add(tf.matmul(x, k), b),
    "einsum_batched": lambda a, b: tf.einsum("bij,bjk->bik", a, b),
    "einsum_heads": lambda a, b: tf.einsum("bqhd,bkhd->bhqk", a, b),
    "einsum_three": lambda a, b, c: tf.einsum("ij,jk,kl->il", a, b, c),
    "tensordot": lambda a, b: tf.tensordot(a, b, 2),
    "conv1d": lambda x, k: tf.nn.conv1d(x, k, 1, "SAME"),
    "conv2d": lambda x, k: tf.nn.conv2d(x, k, 1, "SAME"),
    "conv2d_bias": lambda x, k, b: tf.nn.bias_add(tf.nn.conv2d(x, k, 1, "SAME"), b),
    "conv2d_strided": lambda x, k: tf.nn.conv2d(_padded(x), k, 2, "VALID"),
    "conv2d_dilated": lambda x, k: tf.nn.conv2d(x, k, 1, "SAME", dilations=2),
    "conv2d_depthwise": lambda x, k: tf.nn.depthwise_conv2d(x, tf.transpose(k, (0, 1, 3, 2)), (1, 1, 1, 1), "SAME"),
    "conv3d": lambda x, k: tf.nn.conv3d(x, k, (1, 1, 1, 1, 1), "SAME"),
    "conv_transpose2d": lambda x, k: tf.nn.conv2d_transpose(x, tf.transpose(k, (0, 1, 3, 2)), (2, 6, 6, 3), 2, "VALID"),
    "attention": _attention, "attention_masked": _attention,
    "layer_norm": lambda x, s, o: keras.ops.layer_normalization(x, s, o, epsilon=1e-5),
    "rms_norm": lambda x, s: keras.ops.rms_normalization(x, s, epsilon=1e-5),
    "group_norm": _group_norm, "instance_norm": _instance_norm, "batch_norm_train": _batch_norm,
    "batch_norm_eval": lambda x, s, o, m, v: tf.nn.batch_normalization(x, m, v, o, s, 1e-5),
    "l2_normalize": lambda x: tf.nn.l2_normalize(x, -1),
    "softmax": tf.nn.softmax, "log_softmax": tf.nn.log_softmax, "logsumexp": lambda x: tf.reduce_logsumexp(x, -1),
    "cross_entropy": _cross_entropy,
    "nll": lambda p, y: -tf.reduce_mean(tf.gather(p, y, axis=1, batch_dims=1)),
    "binary_cross_entropy": lambda x, y: tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=y, logits=x)),
    "mse": keras.losses.MeanSquaredError(), "l1": keras.losses.MeanAbsoluteError(), "huber": keras.losses.Huber(),
    "kl_divergence": _kl, "cosine_similarity": _cosine_similarity,
    "sum": tf.reduce_sum, "sum_axis": lambda x: tf.reduce_sum(x, 0), "mean": lambda x: tf.reduce_mean(x, -1),
    "prod": lambda x: tf.reduce_prod(x, -1), "cumsum": lambda x: tf.cumsum(x, -1), "cumprod": lambda x: tf.math.cumprod(x, -1),
    "variance": lambda x: tf.math.reduce_variance(x, -1), "vector_norm": lambda x: tf.norm(x, axis=-1),
    "avg_pool2d": lambda x: _pool(x, "AVG"), "global_avg_pool": lambda x: tf.reduce_mean(x, (1, 2)),
    "resize_bilinear": lambda x: tf.image.resize(x, (6, 6), "bilinear"),
    "exp": tf.exp, "expm1": tf.math.expm1, "log": tf.math.log, "log1p": tf.math.log1p, "pow": tf.pow, "cube": lambda x: x**3,
    "square": tf.square, "rsqrt": tf.math.rsqrt, "reciprocal": lambda x: 1 / x, "softplus": tf.nn.softplus, "tan": tf.tan,
    "sinh": tf.sinh, "erfinv": tf.math.erfinv, "lgamma": tf.math.lgamma,
    "add": tf.add, "sub_low": tf.subtract, "mul": tf.multiply, "div": tf.divide, "div_low": tf.divide, "maximum": tf.maximum,
    "where": tf.where, "concat": lambda a, b: tf.concat([a, b], -1), "atan2": tf.atan2, "relu": tf.nn.relu,
    "leaky_relu": lambda x: tf.nn.leaky_relu(x, 0.125), "elu": tf.nn.elu, "gelu": tf.nn.gelu, "silu": tf.nn.silu,
    "sigmoid": tf.sigmoid, "tanh": tf.tanh, "sqrt": tf.sqrt, "sin": tf.sin, "abs": tf.abs,
    "clip": lambda x: tf.clip_by_value(x, -0.5, 0.5),
    "transpose": tf.transpose, "reshape": lambda x: tf.reshape(x, (2, 32)), "slice": lambda x: x[1:3, ::2],
    "pad": lambda x: tf.pad(x, [[1, 1], [0, 2]]), "flip": lambda x: tf.reverse(x, [-1]),
    "embedding": tf.nn.embedding_lookup, "gather": lambda x, i: tf.gather(x, i),
    "max_pool2d": lambda x: _pool(x, "MAX"), "max": lambda x: tf.reduce_max(x, -1), "sort": lambda x: tf.sort(x, -1),
    "top_k": lambda x: tf.math.top_k(x, 3)[0], "resize_nearest": lambda x: tf.image.resize(x, (6, 6), "nearest"),
    "cholesky": tf.linalg.cholesky, "inverse": tf.linalg.inv, "solve": tf.linalg.solve,
    "triangular_solve": tf.linalg.triangular_solve, "determinant": tf.linalg.det,
    "singular_values": lambda x: tf.linalg.svd(x, compute_uv=False), "eigenvalues": tf.linalg.eigvalsh,
    "lstm_cell": _lstm_cell, "lstm_cell_wide": _lstm_cell, "gru_cell": _gru_cell,
}  # fmt: skip


def autocast_ops(mp: TensorFlowPolicy, calls: Sequence[tuple[str, Sequence[Array]]]) -> list[OpResult]:
    """Run the calls under ``mp.autocast``, all in one function; see :class:`precision.parity.ParityAdapter`."""
    addmm = mp.op("matmul")(lambda c, a, b: c + tf.matmul(a, b))

    def run(batches: Any) -> Any:
        results = []
        for (name, _), batch in zip(calls, batches, strict=True):
            with tf.name_scope(name):
                results.append((addmm if name == "addmm" else OPS[name])(*batch))
        return results

    cast = mp.autocast_as_is(tf.autograph.experimental.do_not_convert(run))
    batches = [[tf.constant(array) for array in inputs] for _, inputs in calls]
    concrete = cast.get_concrete_function(batches)
    outputs = concrete(batches)
    placeholders = iter(concrete.inputs)
    found = []
    for batch, output in zip(batches, outputs, strict=True):
        seen = tuple(_seen(next(placeholders)) for _ in batch)
        found.append(OpResult(seen, output.dtype.name, np.asarray(tf.cast(output, tf.float64))))
    return found


def _seen(tensor: Any) -> str:
    """The dtypes in which ops that compute first take a tensor."""
    if not tensor.dtype.is_floating:
        return str(tensor.dtype.name)
    found: set[str] = set()
    moved: set[str] = set()
    waiting = [tensor]
    visited: set[str] = set()
    while waiting:
        tensor = waiting.pop()
        if tensor.name in visited:
            continue
        visited.add(tensor.name)
        for op in tensor.consumers():
            places = [i for i, x in enumerate(op.inputs) if x.name == tensor.name]
            if op.type == "IdentityN":
                waiting.extend(op.outputs[i] for i in places)
            elif op.type == "Cast":
                if "_precision_kernel" in op.node_def.attr and op.node_def.attr["_precision_kernel"].b:
                    found.add(tensor.dtype.name)
                else:
                    waiting.append(op.outputs[0])
            elif FAMILY.get(op.type) == "shape":
                outputs = [t for t in op.outputs if t.dtype.is_floating]
                waiting.extend(outputs)
                moved.update(t.dtype.name for t in outputs)
            else:
                found.add(tensor.dtype.name)
    return "+".join(sorted(found or moved))
