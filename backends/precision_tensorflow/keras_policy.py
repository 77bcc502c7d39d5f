"""A policy as Keras's own ``DTypePolicy``, or ``DTypePolicyMap`` where it has module rules.

Only Keras's classes are used, so a model saved with them loads anywhere Keras does.

No rule is added for norm layers: Keras's own take their statistics and normalise in float32 under any policy, with
parameters in ``param_dtype``, and hand their result on in the compute dtype. The rule ``**norm*`` (which matches the names
Keras gives them) makes all of it float32. Keras's losses compute in float32 whatever comes in.
"""

from __future__ import annotations

import keras

from precision.errors import UnsupportedError
from precision.policy import PrecisionPolicy
from precision_tensorflow.paths import rule_patterns


def keras_policy(policy: PrecisionPolicy) -> keras.DTypePolicy:
    """Return the Keras policy for layers: a ``DTypePolicyMap`` with the module rules, or a plain ``DTypePolicy``.

    Raises:
        UnsupportedError: Keras has no name for this pair of parameter and compute dtype.
    """
    default = keras.DTypePolicy(_name(policy.param_dtype, policy.compute_dtype))
    patterns = rule_patterns(policy)
    if not patterns:
        return default
    rules = {pattern: keras.DTypePolicy(dtype) for pattern, dtype in patterns}
    return keras.dtype_policies.DTypePolicyMap(default_policy=default, policy_map=rules)


def _name(param: str, compute: str) -> str:
    if param == compute:
        return param
    if param == "float32" and compute in ("float16", "bfloat16"):
        return f"mixed_{compute}"
    raise UnsupportedError(
        f"Keras has no dtype policy with param_dtype {param} and compute_dtype {compute}. It has equal dtypes, and "
        "float32 parameters with float16 or bfloat16 compute."
    )
