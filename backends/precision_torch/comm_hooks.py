"""The policy's ``reduce_dtype`` in ``DistributedDataParallel``, through a communication hook.

DDP reduces gradients in the dtype of the parameters. The hook casts each bucket to the reduce dtype, in either direction,
divides and sums there, and writes the mean back.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from precision.errors import PolicyError, PrecisionWarning, UnsupportedError
from precision.policy import PrecisionPolicy
from precision_torch.dtypes import LOW, TORCH, castable, dtype_name


@dataclasses.dataclass(frozen=True)
class ReduceIn:
    """The hook's state: the group to average over, and the dtype to do it in."""

    group: Any
    dtype: torch.dtype


def reduce_in(state: Any, bucket: Any):  # type: ignore[no-untyped-def]  # DDP reads a return annotation, if there is one
    """Average a bucket of gradients in a dtype; a value that overflows there becomes infinite, which the flag sees.

    Divided before it is narrowed, so that nothing overflows which the mean would not.
    """
    buffer = bucket.buffer()
    wide = buffer.to(torch.float32) if buffer.dtype in LOW else buffer
    narrow = (wide / state.group.size()).to(state.dtype)
    future = dist.all_reduce(narrow, group=state.group, async_op=True).get_future()
    return future.then(lambda done: buffer.copy_(done.value()[0]))


# DDP compares the annotation with the class, not with its name
reduce_in.__annotations__ = {"bucket": dist.GradBucket} if dist.is_available() else {}


def register_comm_hook(policy: PrecisionPolicy, ddp: Any, *, insist: bool = True) -> bool:
    """Make a DDP model reduce its gradients in the policy's reduce dtype. Returns whether a hook was needed.

    Args:
        policy: the policy.
        ddp: the model.
        insist: whether a hook of the user's own in this place is an error, or a warning.
    """
    if not isinstance(ddp, DistributedDataParallel):
        raise PolicyError(
            f"mp.register_comm_hook takes a DistributedDataParallel model, not {type(ddp).__name__}. FSDP2 takes the reduce "
            "dtype from mp.fsdp_policy()."
        )
    dtype = TORCH[policy.reduce_dtype]
    params = [param for param in ddp.parameters() if param.requires_grad and castable(param)]
    require_checked(policy)
    for param in params:
        if param.dtype in LOW and param.grad_dtype is torch.float32:
            # DDP's buckets have the parameters' dtype. It takes no float32 gradient of a low parameter, not even for masters:
            # those get the mean, summed in the reduce dtype and rounded once.
            param.grad = None
            param.grad_dtype = None
    if all(param.dtype is dtype for param in params):
        return False
    ours = [state for hook, state in ddp._comm_hooks if hook is reduce_in]
    if ours:
        if ours[0].dtype is not dtype:
            raise PolicyError(
                f"this DDP model reduces in {dtype_name(ours[0].dtype)} already, for another policy; a hook cannot be "
                "replaced. Wrap the model in a new DistributedDataParallel."
            )
        return True
    if ddp.mixed_precision is not None:
        raise UnsupportedError(
            "this DDP model has a mixed_precision of its own, which cannot be combined with another. Leave that argument out."
        )
    if ddp._comm_hooks:
        message = (
            f"reduce_dtype {policy.reduce_dtype} has no effect: this DDP model has a communication hook already, "
            f"{getattr(ddp._comm_hooks[0][0], '__qualname__', 'a callable')}, and takes one only."
        )
        if insist:
            raise PolicyError(message)
        warnings.warn(message, PrecisionWarning, stacklevel=4)
        return False
    ddp.register_comm_hook(ReduceIn(ddp.process_group, dtype), reduce_in)
    return True


def require_checked(policy: PrecisionPolicy) -> None:
    """Refuse to reduce in float16 where nobody looks for the infinities that makes of large gradients."""
    if policy.reduce_dtype == "float16" and policy.loss_scale.mode == "none":
        raise PolicyError(
            "reduce_dtype float16 with loss_scale.mode 'none': gradients beyond 65504 become infinite, and nothing looks at "
            "them before the step. Set loss_scale.mode to 'dynamic' or 'static', or reduce in bfloat16.",
            [("reduce_dtype", "must not be 'float16' when loss_scale.mode is 'none'")],
        )
