"""``mp.prepare``: checks a model and its optimizers against the policy, and mends what can be mended.

Everything is checked before anything is changed.
"""

from __future__ import annotations

import dataclasses
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from precision.backend import warn_unmatched
from precision.errors import MasterWeightsError, PolicyError, PrecisionWarning
from precision.ops import family_dtype
from precision.policy import PrecisionPolicy
from precision_torch.attachments import attach, attachments
from precision_torch.autocast_mode import mode_for
from precision_torch.comm_hooks import register_comm_hook
from precision_torch.dtypes import LOW, TORCH, castable, dtype_name
from precision_torch.engines import (
    canonical,
    ddp_of,
    distributed,
    fsdp2_modules,
    is_fsdp1,
    parameter_names,
    unwrapped,
    wrappers_of,
)
from precision_torch.fsdp import differences
from precision_torch.masters import AdoptOnLoad, MasterWeights
from precision_torch.pins import NORMS, cast_output, pin
from precision_torch.skipped_state import SkippedState, Which, require_which


@dataclasses.dataclass
class _Plan:
    """What each parameter will be."""

    names: dict[torch.nn.Parameter, str]
    dtypes: dict[torch.nn.Parameter, torch.dtype]


def prepare(
    policy: PrecisionPolicy,
    device_type: str,
    model: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    master_weights: bool | None,
    restore_on_skip: Which,
) -> None:
    """Prepare a model and its optimizers in place; see ``TorchPolicy.prepare``."""
    if not isinstance(model, torch.nn.Module):
        raise PolicyError(f"mp.prepare takes a torch.nn.Module, not {type(model).__name__}.")
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise PolicyError(f"mp.prepare takes torch.optim optimizers, not {type(optimizer).__name__}.")
    require_which(restore_on_skip)
    if optimizers:
        policy.require_trainable()
    whole, model = model, unwrapped(model)
    paths = [canonical(name) for name, _ in (*model.named_modules(), *model.named_parameters()) if name]
    warn_unmatched(policy, paths, type(model).__name__)
    _require_initialized(model)
    plan = _plan(policy, model)
    _require_one_dtype(policy, model, plan)
    _require_own_parameters(model, optimizers)
    low = _low_and_trained(plan, optimizers)
    if low and master_weights and not optimizers:
        raise MasterWeightsError("master_weights=True needs the optimizer: mp.prepare(model, optimizer, ...).")
    _require_masters(plan, low, master_weights)
    _require_castable(whole, plan, low)
    ddp = ddp_of(whole)
    if ddp is not None and optimizers:
        register_comm_hook(policy, ddp, insist=False)

    originals = _cast_parameters(plan, optimizers)
    _pin_modules(policy, device_type, model)
    for called in _called(model):
        cast_output(called, TORCH[policy.output_dtype])
    for optimizer in optimizers:
        if low and master_weights:
            _keep_masters(model, optimizer, low, originals)
        attached = attach(optimizer)
        attached.names.update(parameter_names(model))
        attached.wrappers = [weakref.ref(each) for each in wrappers_of(whole)] or attached.wrappers
    if optimizers and ddp is None:
        _warn_of_reduction(policy, whole)
    if optimizers and policy.loss_scale.mode != "none":
        _guard(model, optimizers, restore_on_skip)


def _plan(policy: PrecisionPolicy, model: torch.nn.Module) -> _Plan:
    plan = _Plan({}, {})
    for path, module in model.named_modules(remove_duplicate=False):
        for leaf, param in module._parameters.items():
            if param is None or not castable(param):
                continue
            name = canonical(f"{path}.{leaf}" if path else leaf)
            rule = policy.rule_for(name)
            if rule is not None:
                dtype = TORCH[rule.dtype]
            elif isinstance(module, NORMS):
                dtype = torch.float32
            elif policy.param_dtype != "float32":
                dtype = TORCH[policy.param_dtype]
            else:
                dtype = param.dtype  # float16 under a float32 policy is the user's doing: reported, not undone
            plan.names.setdefault(param, name)
            if plan.dtypes.get(param) is not torch.float32:  # a tied weight is as wide as its widest user
                plan.dtypes[param] = dtype
    return plan


def _require_initialized(model: torch.nn.Module) -> None:
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            if torch.nn.parameter.is_lazy(tensor):
                raise PolicyError(
                    f"{kind} {name} is not initialised yet (a lazy module). Run the model once on a batch, then make the "
                    "optimizer and call mp.prepare."
                )


def _require_one_dtype(policy: PrecisionPolicy, model: torch.nn.Module, plan: _Plan) -> None:
    """Refuse a rule that a tied weight cannot follow: its module would compute in a dtype that the weight has not."""
    for path, module in model.named_modules(remove_duplicate=False):
        for leaf, param in module._parameters.items():
            name = canonical(f"{path}.{leaf}" if path else leaf)
            if param not in plan.dtypes or (rule := policy.rule_for(name)) is None:
                continue
            if plan.dtypes[param] is not TORCH[rule.dtype]:
                raise PolicyError(
                    f"rule {rule.module!r} asks for {rule.dtype}, but {name} is the same tensor as {plan.names[param]}, "
                    f"which is {dtype_name(plan.dtypes[param])}. Give both modules the same rule, or none."
                )


def _require_own_parameters(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuse an optimizer that would train something else, such as a copy of one whose parameters were the model's."""
    own = {id(param) for param in model.parameters()}
    for optimizer in optimizers:
        masters = attachments(optimizer).masters
        held = {id(param) for group in optimizer.param_groups for param in group["params"]}
        if masters is not None:
            held |= {id(param) for param in masters.low}
        if own and not own & held:
            raise PolicyError(
                f"this {type(optimizer).__name__} holds none of the model's parameters, so it would not train it. Make it "
                "from model.parameters(), after copying or moving the model."
            )


def _low_and_trained(plan: _Plan, optimizers: Sequence[torch.optim.Optimizer]) -> dict[torch.nn.Parameter, str]:
    """The parameters that will be low precision, are trained, and have no masters yet; with their names."""
    kept = {id(p) for optimizer in optimizers if (m := attachments(optimizer).masters) for p in m.low}
    low = {
        param: plan.names[param]
        for param, dtype in plan.dtypes.items()
        if dtype in LOW and param.requires_grad and id(param) not in kept
    }
    for optimizer in optimizers:
        for g, group in enumerate(optimizer.param_groups):
            for i, param in enumerate(group["params"]):
                if param.dtype in LOW and param.requires_grad and param not in plan.dtypes and id(param) not in kept:
                    low[param] = f"param_groups[{g}]['params'][{i}]"
    return low


def _require_masters(plan: _Plan, low: dict[torch.nn.Parameter, str], master_weights: bool | None) -> None:
    """Refuse to train low-precision parameters without masters, unless they are bfloat16 and the caller insists."""
    dtypes = {plan.dtypes.get(param, param.dtype) for param in low}
    if not low or master_weights or (master_weights is False and torch.float16 not in dtypes):
        return
    names = list(low.values())
    shown = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
    kinds = " and ".join(sorted(dtype_name(dtype) for dtype in dtypes))
    raise MasterWeightsError(
        f"{len(names)} trainable parameters are {kinds} and have no float32 master weights: {shown}. Updates smaller than "
        "their spacing would be lost (bfloat16(0.999) is 1). Pass the optimizer and master_weights=True to keep float32 "
        "masters, or keep the parameters in float32 (param_dtype = 'float32'); for inference call "
        "model.requires_grad_(False) first."
    )


def _require_castable(model: torch.nn.Module, plan: _Plan, low: dict[torch.nn.Parameter, str]) -> None:
    """Refuse to change what an engine around the model has taken note of: the dtypes of parameters, or who updates them."""
    changed = [plan.names[param] for param, dtype in plan.dtypes.items() if param.dtype is not dtype]
    sharded = bool(fsdp2_modules(model)) or any(map(is_fsdp1, model.modules()))
    engine = "FSDP" if sharded else "DistributedDataParallel" if ddp_of(model) is not None else None
    if engine is not None and changed:
        raise PolicyError(
            f"{len(changed)} parameters would change their dtype inside {engine}, which does not expect it: "
            f"{', '.join(changed[:4])}. Call mp.prepare on the model first, then wrap it, then call mp.prepare on what came of "
            "it."
        )
    if sharded and low:
        raise MasterWeightsError(
            f"{len(low)} trainable parameters are low precision and sharded by FSDP: {', '.join(list(low.values())[:4])}. "
            "FSDP updates the parameters it shards, and casts them for compute as it gathers them: shard them in float32, as "
            "their own masters, with mp.fully_shard or mp_policy=mp.fsdp_policy()."
        )


def _warn_of_reduction(policy: PrecisionPolicy, model: torch.nn.Module) -> None:
    """Warn where the policy's reduce dtype has no effect."""
    message = ""
    if fsdp2_modules(model):
        differing = differences(policy, model)
        if differing:
            message = f"{'; '.join(differing[:3])}. Shard with mp.fully_shard, or with mp_policy=mp.fsdp_policy()."
    elif policy.reduce_dtype == "float32":
        return
    elif any(map(is_fsdp1, model.modules())):
        message = f"reduce_dtype {policy.reduce_dtype} has no effect on FSDP1: give it to its own MixedPrecision."
    elif distributed():
        message = (
            f"reduce_dtype {policy.reduce_dtype} has no effect on this model as it is. Once it is wrapped in "
            "DistributedDataParallel call mp.prepare on that too, or mp.register_comm_hook(ddp)."
        )
    else:
        message = (
            f"reduce_dtype {policy.reduce_dtype} has no effect here: on one device gradients accumulate in the dtype of the "
            "parameters (float32 with master weights)."
        )
    if message:
        warnings.warn(message, PrecisionWarning, stacklevel=4)


def _cast_parameters(
    plan: _Plan, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[torch.nn.Parameter, torch.Tensor]:
    """Cast parameters in place (they stay the same objects, so tied weights stay tied); returns the values before."""
    originals: dict[torch.nn.Parameter, torch.Tensor] = {}
    for param, dtype in plan.dtypes.items():
        originals[param] = param.data
        if param.dtype is dtype:
            continue
        param.grad = None
        param.data = param.data.to(dtype)
        for optimizer in optimizers:
            for key, value in optimizer.state.get(param, {}).items():
                if isinstance(value, torch.Tensor) and value.shape == param.shape and castable(value):
                    optimizer.state[param][key] = value.to(dtype)
    return originals


def _never_called(module: torch.nn.Module) -> bool:
    """Whether it is a container without a forward, such as a ``ModuleList``."""
    return type(module).forward is torch.nn.Module.forward


def _called(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The models whose results leave: the model, or those in it where it is but a container of several."""
    if not _never_called(model):
        yield model
        return
    for child in model.children():
        yield from _called(child)


def _pin_modules(policy: PrecisionPolicy, device_type: str, model: torch.nn.Module) -> None:
    for path, module in model.named_modules():
        if _never_called(module):
            continue
        rule = policy.rule_for(canonical(path)) if path else None
        if rule is not None:
            earlier = frozenset(str(r.family) for r in policy.rules[: policy.rules.index(rule)] if r.family)
            # no norm is autocast from float32, so it needs no region around it
            bare = isinstance(module, NORMS) and rule.dtype == "float32" and "norm" not in earlier
            mode = mode_for(policy, device_type, earlier) if earlier else None
            pin(module, TORCH[rule.dtype], None if bare else device_type, mode)
        elif isinstance(module, NORMS) and policy.compute_dtype != "float32" == family_dtype(policy, "norm"):
            pin(module, torch.float32, None)  # under a rule of their family they are cast where the op runs


def _keep_masters(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    low: dict[torch.nn.Parameter, str],
    originals: dict[torch.nn.Parameter, torch.Tensor],
) -> None:
    held = {param for group in optimizer.param_groups for param in group["params"]}
    mine = {param: originals.get(param, param.data) for param in low if param in held}
    if mine:
        attached = attach(optimizer)
        masters = attached.masters = attached.masters or MasterWeights(optimizer)
        masters.add(optimizer, mine, low)
        model.register_load_state_dict_post_hook(AdoptOnLoad(masters))


def _guard(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], which: Which) -> None:
    """One guard for all optimizers, so that a skip goes back no further than the last step of any of them."""
    guard = None if which == "nothing" else SkippedState(model, which)
    for optimizer in optimizers:
        kept: Iterable[Any] = (old for old in attachments(optimizer).guards if old.model() is not model)
        attach(optimizer).guards = [*kept, *([guard] if guard else [])]
