"""Mapping over nested containers of tensors: dicts, lists, tuples, named tuples, dataclasses and registered pytrees.

Small and recursive, so that ``torch.compile`` traces through it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree

from precision.backend import check_leaf
from precision_torch.dtypes import cast


def map_tensors(fn: Callable[[torch.Tensor, str], Any], tree: Any, path: str = "") -> Any:
    """Apply ``fn(tensor, path)`` to the tensors of a tree; everything else comes back as it is.

    Args:
        fn: gets a tensor and its dotted path (keys, positions and field names).
        tree: any nesting of mappings, lists, tuples, named tuples, dataclasses and pytree-registered types.
        path: the path of ``tree`` itself.

    Raises:
        MixedFrameworksError: a leaf is another framework's tensor.
    """
    if isinstance(tree, torch.Tensor):
        return fn(tree, path)
    if tree is None or isinstance(tree, (str, bytes, bool, int, float)):
        return tree
    if isinstance(tree, (list, tuple)):
        items = [map_tensors(fn, item, _join(path, str(i))) for i, item in enumerate(tree)]
        if isinstance(tree, tuple) and hasattr(tree, "_fields"):
            return type(tree)(*items)
        return tuple(items) if type(tree) is tuple else items if type(tree) is list else type(tree)(items)
    if type(tree) is dict:
        return {key: map_tensors(fn, value, _join(path, str(key))) for key, value in tree.items()}
    return _map_other(fn, tree, path)


def _map_other(fn: Callable[[torch.Tensor, str], Any], tree: Any, path: str) -> Any:
    """The rarer containers: other mappings, dataclasses, types registered with torch's pytrees."""
    if isinstance(tree, torch.nn.Module):  # the self of a decorated method
        return tree
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        changed = copy.copy(tree)
        for field in dataclasses.fields(tree):
            value = getattr(tree, field.name)
            new = map_tensors(fn, value, _join(path, field.name))
            if new is not value:
                object.__setattr__(changed, field.name, new)
                if isinstance(changed, dict):  # Hugging Face's ModelOutput is both
                    dict.__setitem__(changed, field.name, new)
        return changed
    if isinstance(tree, Mapping):
        same_kind: Any = copy.copy(tree)
        for key, value in tree.items():
            new = map_tensors(fn, value, _join(path, str(key)))
            if new is not value:
                same_kind[key] = new
        return same_kind
    if type(tree) in _pytree.SUPPORTED_NODES:
        leaves, spec = _pytree.tree_flatten(tree)
        return _pytree.tree_unflatten([map_tensors(fn, leaf, path) for leaf in leaves], spec)
    check_leaf(tree, "torch")
    return tree


def cast_tree(tree: Any, dtype: torch.dtype) -> Any:
    """Cast the floating tensors (not float64) of a tree to a dtype."""
    if isinstance(tree, torch.Tensor):
        return cast(tree, dtype)
    return map_tensors(lambda tensor, _: cast(tensor, dtype), tree)


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """The tensors of a tree, in order."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor, _: str) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, tree)
    return found


def _join(path: str, part: str) -> str:
    return f"{path}.{part}" if path else part
