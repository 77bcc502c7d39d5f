"""Functions made of several ops that are recognised as one op of a family: by their code, or by their name scope.

Inside they compute in the family's dtype. Those of ``elementwise`` compute in float32, as fused kernels do, and round once.
"""

from __future__ import annotations

import os
from types import CodeType, FrameType
from typing import NamedTuple

_KERAS_NORM = "keras/src/layers/normalization/"
FUNCTIONS: dict[str, dict[str, str]] = {
    "tensorflow/python/ops/nn_impl.py": {
        **dict.fromkeys(("moments", "moments_v2", "weighted_moments", "weighted_moments_v2", "batch_normalization",
                         "l2_normalize", "normalize_moments"), "norm"),
        "normalize": "reduction", "swish": "elementwise",
        **dict.fromkeys(("sigmoid_cross_entropy_with_logits", "sigmoid_cross_entropy_with_logits_v2", "log_poisson_loss",
                         "weighted_cross_entropy_with_logits", "weighted_cross_entropy_with_logits_v2"), "loss"),
    },
    "tensorflow/python/ops/nn_ops.py": {"gelu": "elementwise"},
    "tensorflow/python/ops/math_ops.py": {
        "reduce_logsumexp": "softmax", "reduce_variance": "reduction", "reduce_std": "reduction",
        "reduce_euclidean_norm": "reduction",
    },
    "tensorflow/python/ops/linalg_ops.py": {"norm": "reduction", "norm_v2": "reduction"},
    "keras/src/ops/nn.py": dict.fromkeys(("_layer_normalization", "_rms_normalization", "_normalize", "moments"), "norm"),
    "keras/src/ops/math.py": {"logsumexp": "softmax", "norm": "reduction"},
    "keras/src/backend/tensorflow/math.py": {"logsumexp": "softmax", "norm": "reduction"},
    "keras/src/backend/tensorflow/numpy.py": {"var": "reduction", "std": "reduction", "logaddexp": "transcendental"},
    "keras/src/backend/tensorflow/nn.py": {
        **dict.fromkeys(("moments", "batch_normalization"), "norm"),
        **dict.fromkeys(("categorical_crossentropy", "sparse_categorical_crossentropy", "binary_crossentropy", "ctc_loss"),
                        "loss"),
        **dict.fromkeys(("gelu", "silu", "celu", "selu", "hard_silu", "hard_sigmoid", "squareplus", "log_sigmoid", "glu",
                         "tanh_shrink", "softsign", "elu"), "elementwise"),
        "sparsemax": "softmax", "_dot_product_attention_xla": "attention",
    },
    "keras/src/layers/attention/multi_head_attention.py": {"_compute_attention": "attention"},
    "keras/src/layers/attention/grouped_query_attention.py": {"_compute_attention": "attention"},
    "keras/src/activations/activations.py": {"mish": "elementwise"},
    _KERAS_NORM + "group_normalization.py": {"_apply_normalization": "norm"},
    _KERAS_NORM + "unit_normalization.py": {"call": "norm"},
    _KERAS_NORM + "batch_normalization.py": {"_moments": "norm"},
}  # fmt: skip
_FILES = {"keras/src/losses/losses.py": "loss", "keras/src/losses/loss.py": "loss"}
_SCOPES = {
    "moments": "norm", "batchnorm": "norm", "l2_normalize": "norm", "Gelu": "elementwise", "logistic_loss": "loss",
    "ReduceLogSumExp": "softmax",
}  # fmt: skip
_codes: dict[int, tuple[CodeType, str | None]] = {}


class Known(NamedTuple):
    """A call of a known function.

    Attributes:
        family: its family.
        call: tells apart two calls of it in a row.
    """

    family: str
    call: tuple[object, ...]


def family_of(code: CodeType) -> str | None:
    """The family of a function, if it is known."""
    found = _codes.get(id(code))
    if found is None:
        found = _codes[id(code)] = (code, _look_up(code))  # the code is kept, and with it its id
    return found[1]


def _look_up(code: CodeType) -> str | None:
    path = code.co_filename.replace(os.sep, "/")
    for file, family in _FILES.items():
        if path.endswith(file):
            return family
    for file, names in FUNCTIONS.items():
        if code.co_name in names and path.endswith(file):
            return names[code.co_name]
    return None


def from_frames(frame: FrameType | None, stop: CodeType, held: dict[int, FrameType]) -> Known | None:
    """The outermost known function on the stack, up to the function being traced.

    Args:
        frame: where to begin.
        stop: the code of the function that calls what is traced.
        held: takes the frames of known calls: while they are alive, no other call can have the identity of one of them.
    """
    outermost: FrameType | None = None
    while frame is not None and frame.f_code is not stop:
        if family_of(frame.f_code) is not None:
            outermost = frame
        frame = frame.f_back
    if outermost is None:
        return None
    held[id(outermost)] = outermost
    return Known(str(family_of(outermost.f_code)), (id(outermost.f_code), id(outermost)))


def from_scope(name: str) -> Known | None:
    """The innermost known name scope of an op, for graphs that were not traced here."""
    parts = name.split("/")[:-1]
    for i in range(len(parts) - 1, -1, -1):
        family = _SCOPES.get(parts[i].rstrip("0123456789").rstrip("_"))
        if family is not None:
            return Known(family, tuple(parts[: i + 1]))
    return None
