"""The policy in FSDP2's words: ``MixedPrecisionPolicy``, and ``fully_shard`` with norms and rules in dtypes of their own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from precision.errors import PolicyError, UnsupportedError
from precision.policy import PrecisionPolicy
from precision_torch.comm_hooks import require_checked
from precision_torch.dtypes import TORCH, dtype_name
from precision_torch.engines import fsdp2_modules
from precision_torch.pins import NORMS

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


def fsdp_policy(
    policy: PrecisionPolicy, *, compute: torch.dtype, output: torch.dtype | None, cast_forward_inputs: bool = True
) -> MixedPrecisionPolicy:
    """A ``MixedPrecisionPolicy``: gathered and computed in one dtype, reduced in the policy's.

    Args:
        policy: the policy.
        compute: what the parameters are gathered in, and inputs cast to.
        output: what results leave in; None leaves them.
        cast_forward_inputs: whether inputs are cast.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    require_checked(policy)
    return MixedPrecisionPolicy(
        param_dtype=compute,
        reduce_dtype=TORCH[policy.reduce_dtype],
        output_dtype=output,
        cast_forward_inputs=cast_forward_inputs,
    )


def fully_shard(
    policy: PrecisionPolicy, model: torch.nn.Module, units: Iterable[torch.nn.Module], **kwargs: Any
) -> torch.nn.Module:
    """``torch.distributed.fsdp.fully_shard`` on units and model, with the dtypes of a policy; see ``TorchPolicy.fully_shard``."""
    from torch.distributed.fsdp import fully_shard as native

    if "mp_policy" in kwargs:
        raise PolicyError("mp.fully_shard makes the mp_policy itself. Use torch's fully_shard with mp.fsdp_policy().")
    require_float32_storage(policy)
    if fsdp2_modules(model):
        raise PolicyError("parts of this model are sharded already; mp.fully_shard does all of it, once.")
    paths = {module: path for path, module in model.named_modules()}
    chosen = list(units)
    if unknown := [type(unit).__name__ for unit in chosen if unit not in paths]:
        raise PolicyError(f"units must be modules of the model; {unknown[0]} is not.")
    taken: set[torch.nn.Module] = set()
    # inner units first: fully_shard goes from the bottom up
    for unit in sorted(chosen, key=lambda module: -paths[module].count(".") - (paths[module] != "")):
        if unit is not model:
            _shard_one(policy, unit, paths, taken, None, native, kwargs)
    _shard_one(policy, model, paths, taken, TORCH[policy.output_dtype], native, kwargs)
    return model


def _shard_one(
    policy: PrecisionPolicy,
    unit: torch.nn.Module,
    paths: dict[torch.nn.Module, str],
    taken: set[torch.nn.Module],
    output: torch.dtype | None,
    native: Any,
    kwargs: dict[str, Any],
) -> None:
    """Shard one unit; before it those of its modules that have a dtype of their own, one group (one gather) a dtype."""
    own = _dtype_of(policy, unit, paths[unit])
    apart: dict[tuple[torch.dtype, torch.dtype | None], list[torch.nn.Module]] = {}
    for module in unit.modules():
        if module is unit or module in taken or not list(module.parameters(recurse=False)):
            continue
        dtype = _dtype_of(policy, module, paths[module])
        if dtype is not own:
            # what follows a norm computes low; what a rule keeps in float32 (a head's logits) leaves in it
            ruled = policy.rule_for(paths[module]) is not None
            apart.setdefault((dtype, None if ruled else own), []).append(module)
    for (dtype, leaves), modules in apart.items():
        native(modules, mp_policy=fsdp_policy(policy, compute=dtype, output=leaves), **kwargs)
        taken.update(modules)
    taken.update(unit.modules())
    native(unit, mp_policy=fsdp_policy(policy, compute=own, output=output), **kwargs)


def _dtype_of(policy: PrecisionPolicy, module: torch.nn.Module, path: str) -> torch.dtype:
    rule = policy.rule_for(path) if path else None
    if rule is not None:
        return TORCH[rule.dtype]
    return torch.float32 if isinstance(module, NORMS) else TORCH[policy.compute_dtype]


def require_float32_storage(policy: PrecisionPolicy) -> None:
    """Refuse parameters kept low. Raises ``UnsupportedError``."""
    if policy.param_dtype != "float32":
        raise UnsupportedError(
            f"param_dtype {policy.param_dtype}: FSDP2 updates the parameters it shards, and casts them for compute as it "
            "gathers them: kept in float32 they are the master weights. Set param_dtype = 'float32' (a mixed_ policy); "
            "compute and communication stay in compute_dtype and reduce_dtype."
        )


def differences(policy: PrecisionPolicy, model: torch.nn.Module) -> list[str]:
    """What of a policy the ``fully_shard`` that was applied to a model does not do, in words; nothing if it does all."""
    differing = []
    for name, module in fsdp2_modules(model).items():
        applied = module._get_fsdp_state()._mp_policy
        reduce = applied.reduce_dtype or applied.param_dtype or torch.float32
        if dtype_name(reduce) != policy.reduce_dtype:
            differing.append(
                f"{name or 'the model'} reduces in {dtype_name(reduce)}, not reduce_dtype {policy.reduce_dtype}"
            )
    return differing
