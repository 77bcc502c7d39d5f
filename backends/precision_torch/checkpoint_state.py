"""What a checkpoint of a training run consists of in PyTorch: tensors by name, and plain values that go through JSON.

Parameters and optimizer state are named after the model's parameters, without the names that wrappers put in, so that DDP,
FSDP2 and a single process write and read the same names, and a sharded tensor may be sharded anew.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from precision.errors import CheckpointError
from precision_torch.attachments import attachments
from precision_torch.dtypes import dtype_name
from precision_torch.engines import canonical, is_dtensor, is_fsdp1, unwrapped

Tensors = dict[str, torch.Tensor]

_HOW = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Settings of an optimizer that say how it computes, not what."""


def require_supported_model(model: Any) -> None:
    """Refuse what the state of cannot be named. Raises ``CheckpointError``."""
    if not isinstance(model, torch.nn.Module):
        raise CheckpointError(f"a checkpoint takes a torch.nn.Module, not {type(model).__name__}.")
    if any(map(is_fsdp1, model.modules())):
        raise CheckpointError(
            "this model is wrapped by FSDP1, whose shards are pieces of flattened parameters without names. Shard it with "
            "FSDP2 (mp.fully_shard), or save it with torch.distributed.checkpoint and FSDP1's own state dicts."
        )


def model_tensors(model: torch.nn.Module, rank: int) -> Tensors:
    """The tensors of a model's state dict, detached; they share memory with the model.

    Parameters, and what is a ``DTensor``, are ``model/NAME``. Other buffers are each rank's own (BatchNorm's statistics come
    from its batches): ``buffer/RANK/NAME``.
    """
    inner = unwrapped(model)
    params = {id(param) for param in inner.parameters()}
    state: Tensors = {}
    for name, value in inner.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"the model's state dict holds {name}, which is no tensor but a {type(value).__name__}: it cannot be saved "
                "here. Put it into extra, as JSON values."
            )
        shared = id(value) in params or is_dtensor(value)
        state[f"model/{canonical(name)}" if shared else f"buffer/{rank}/{canonical(name)}"] = value.detach()
    return state


def model_templates(
    model: torch.nn.Module, rank: int, saved: Mapping[str, tuple[Sequence[int], torch.dtype]]
) -> dict[str, tuple[str, torch.Tensor]]:
    """For each tensor of a model, the name it was saved under and a fresh tensor to read it into.

    A rank that did not save takes the first one's buffers.

    Raises:
        CheckpointError: the checkpoint is of another model.
    """
    own = model_tensors(model, rank)
    if any(name.startswith("buffer/") and name not in saved for name in own):
        renamed = {name: name.replace(f"buffer/{rank}/", "buffer/0/", 1) for name in own}
    else:
        renamed = {name: name for name in own}
    there = {name for name in saved if name.startswith(("model/", "buffer/0/"))}
    here = {name.replace(f"buffer/{rank}/", "buffer/0/", 1) for name in own}
    for what, names in (("lacks", here - there), ("has, and this model has not,", there - here)):
        if names:
            shown = ", ".join(sorted(name.removeprefix("model/").removeprefix("buffer/0/") for name in names)[:6])
            raise CheckpointError(f"the checkpoint {what} {shown}. Nothing was loaded.")
    for name, tensor in own.items():
        shape, dtype = saved[renamed[name]]
        if tuple(shape) != tuple(tensor.shape) or dtype is not tensor.dtype:
            raise CheckpointError(
                f"the checkpoint holds {name.partition('/')[2]} as {dtype_name(dtype)} {list(shape)}; this model's is "
                f"{dtype_name(tensor.dtype)} {list(tensor.shape)}. Nothing was loaded."
            )
    return {name: (renamed[name], torch.empty_like(tensor)) for name, tensor in own.items()}


def load_model(model: torch.nn.Module, rank: int, tensors: Tensors) -> None:
    """Load tensors by the names of :func:`model_tensors`, through the model's own ``load_state_dict``."""
    inner = unwrapped(model)
    content = {}
    for name in inner.state_dict():
        key = f"model/{canonical(name)}"
        content[name] = tensors[key if key in tensors else f"buffer/{rank}/{canonical(name)}"]
    inner.load_state_dict(content)


class OptimizerState:
    """An optimizer's state by the names of its parameters.

    Args:
        optimizer: a native optimizer.
        model: whose parameters it holds (or masters of them).

    Raises:
        CheckpointError: it holds a parameter that is not the model's.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
        self.optimizer = optimizer
        self.masters = attachments(optimizer).masters
        known = {id(param): canonical(name) for name, param in unwrapped(model).named_parameters()}
        if self.masters is not None:
            for low, high in zip(self.masters.low, self.masters.high, strict=True):
                if id(low) in known:
                    known[id(high)] = known[id(low)]
        self.params: dict[str, torch.nn.Parameter] = {}
        self._groups: list[list[str]] = []
        for g, group in enumerate(optimizer.param_groups):
            for i, param in enumerate(group["params"]):
                if id(param) not in known:
                    raise CheckpointError(
                        f"param_groups[{g}]['params'][{i}] of {type(optimizer).__name__} (shape {tuple(param.shape)}) is no "
                        "parameter of the model given with it. Give the model that holds all of them, such as an "
                        "nn.ModuleList of several."
                    )
                self.params[known[id(param)]] = param
            self._groups.append([known[id(param)] for param in group["params"]])

    def collect(self) -> tuple[Tensors, dict[str, Any]]:
        """The tensors (``state/NAME/KEY``, ``group/N/KEY``, ``master/NAME``), and the rest as JSON values."""
        tensors: Tensors = {}
        values: dict[str, Any] = {"kind": type(self.optimizer).__name__, "state": {}, "groups": []}
        if self.masters is not None:
            self.masters.adopt()
        for name, param in self.params.items():
            for key, value in self.optimizer.state.get(param, {}).items():
                if isinstance(value, torch.Tensor):
                    tensors[f"state/{name}/{key}"] = value.detach()
                else:
                    values["state"].setdefault(name, {})[key] = to_json(value, f"optimizer state {key} of {name}")
            if self._is_master(param):
                tensors[f"master/{name}"] = param.detach()
        for g, group in enumerate(self.optimizer.param_groups):
            kept: dict[str, Any] = {}
            for key, value in group.items():
                if key in ("params", "param_names"):
                    continue
                if isinstance(value, torch.Tensor):
                    tensors[f"group/{g}/{key}"] = value.detach()
                else:
                    kept[key] = to_json(value, f"param_groups[{g}][{key!r}]")
            values["groups"].append({"params": self._groups[g], "values": kept})
        return tensors, values

    def templates(self, saved: Mapping[str, tuple[Sequence[int], torch.dtype]], values: Mapping[str, Any]) -> Tensors:
        """Fresh tensors to read the saved state into, sharded as this optimizer's parameters are.

        Args:
            saved: global shape and dtype by name, as :meth:`collect` names them.
            values: the rest, as :meth:`collect` gave it.

        Raises:
            CheckpointError: it is another optimizer's state: other groups, parameters or shapes.
        """
        kind = type(self.optimizer).__name__
        if values["kind"] != kind:
            raise CheckpointError(f"the checkpoint holds the state of {values['kind']}, not of {kind}.")
        groups = [list(group["params"]) for group in values["groups"]]
        if groups != self._groups:
            here, there = ([len(group) for group in each] for each in (self._groups, groups))
            raise CheckpointError(
                f"the saved optimizer has other parameter groups than this {kind}: groups of {there} parameters, not of {here}, "
                "or other parameters in them."
            )
        masters = {name for name, param in self.params.items() if self._is_master(param)}
        if masters != {name.removeprefix("master/") for name in saved if name.startswith("master/")}:
            raise CheckpointError(
                "the checkpoint and this optimizer do not keep master weights of the same parameters. Call mp.prepare as the "
                "run that saved it did, before restoring."
            )
        return {name: self._template(name, tuple(shape), dtype) for name, (shape, dtype) in saved.items()}

    def _is_master(self, param: torch.nn.Parameter) -> bool:
        return self.masters is not None and any(param is high for high in self.masters.high)

    def _template(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        kind, _, rest = name.partition("/")
        if kind == "group":
            place, _, key = rest.partition("/")
            own = self.optimizer.param_groups[int(place)].get(key)
            return torch.empty(shape, dtype=dtype, device=own.device if isinstance(own, torch.Tensor) else "cpu")
        param_name = rest.rpartition("/")[0] if kind == "state" else rest
        param = self.params.get(param_name)
        if param is None:
            raise CheckpointError(
                f"the checkpoint holds optimizer state of {param_name}, which this optimizer has not."
            )
        if shape == tuple(param.shape):
            return torch.empty_like(param, dtype=dtype, requires_grad=False)
        if kind == "master":
            raise CheckpointError(f"the saved master of {param_name} has shape {list(shape)}, not {list(param.shape)}.")
        live = self.optimizer.state.get(param, {}).get(rest.rpartition("/")[2])
        if isinstance(live, torch.Tensor) and tuple(live.shape) == shape:
            return torch.empty_like(live, dtype=dtype)
        if shape and is_dtensor(param):
            raise CheckpointError(
                f"how {kind} state {name!r} of shape {list(shape)} is to be sharded is not known before the optimizer has "
                "any: take one step, then restore."
            )
        return torch.empty(shape, dtype=dtype, device=param.device if shape else "cpu")

    def load(self, tensors: Tensors, values: Mapping[str, Any]) -> None:
        """Load what :meth:`collect` gave, through the optimizer's own ``load_state_dict``."""
        order = [name for group in self._groups for name in group]
        state: dict[int, dict[str, Any]] = {}
        for i, name in enumerate(order):
            entries = {key: from_json(value) for key, value in values["state"].get(name, {}).items()}
            prefix = f"state/{name}/"
            entries |= {key.removeprefix(prefix): tensors[key] for key in tensors if key.startswith(prefix)}
            if entries:
                state[i] = entries
        groups, start = [], 0
        for g, (group, own) in enumerate(zip(values["groups"], self.optimizer.param_groups, strict=True)):
            settings = {key: from_json(value) for key, value in group["values"].items()}
            prefix = f"group/{g}/"
            settings |= {key.removeprefix(prefix): tensors[key] for key in tensors if key.startswith(prefix)}
            count = len(group["params"])
            names = {"param_names": own["param_names"]} if "param_names" in own else {}
            # how this optimizer computes stays its own; settings that came in later are as they are
            kept = {key: value for key, value in own.items() if key in _HOW or key not in settings}
            groups.append({**settings, **kept, **names, "params": list(range(start, start + count))})
            start += count
        content: dict[str, Any] = {"state": state, "param_groups": groups}
        if self.masters is not None:
            from precision_torch.masters import STATE_KEY

            by_param = {id(param): name for name, param in self.params.items()}
            content[STATE_KEY] = {
                own_name: tensors[f"master/{by_param[id(high)]}"]
                for own_name, high in zip(self.masters.names, self.masters.high, strict=True)
            }
        self.optimizer.load_state_dict(content)


def to_json(value: Any, what: str) -> Any:
    """A plain value as JSON that :func:`from_json` gives back as it was: tuples and non-finite numbers marked."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, tuple):
        return {"tuple": [to_json(item, what) for item in value]}
    if isinstance(value, list):
        return [to_json(item, what) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: to_json(item, what) for key, item in value.items()}}
    raise CheckpointError(
        f"{what} is a {type(value).__name__}, which cannot be saved: it is neither a tensor nor JSON."
    )


def from_json(value: Any) -> Any:
    """What :func:`to_json` was given."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if isinstance(value, dict):
        ((kind, content),) = value.items()
        if kind == "float":
            return float(content)
        if kind == "tuple":
            return tuple(from_json(item) for item in content)
        return {key: from_json(item) for key, item in content.items()}
    return value
