"""Restoring a model's non-trainable state when a step is skipped: a forward pass that overflowed leaves inf or NaN in
BatchNorm's running statistics, and the skipped step alone would not take them back. Done on the device, without a read.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch.nn.modules.batchnorm import _NormBase

from precision.errors import PolicyError
from precision.policy import Rule
from precision_torch.engines import canonical

Which: TypeAlias = Literal["batch_norm", "buffers", "nothing"] | Sequence[str]
"""What a skipped step takes back; a sequence names buffers by pattern, and may have ``"batch_norm"`` among them."""


def require_which(which: Any) -> None:
    """Refuse what says of no buffers whether they come back. Raises ``PolicyError``."""
    names = isinstance(which, (list, tuple)) and which and all(isinstance(name, str) and name for name in which)
    if not names and which not in ("batch_norm", "buffers", "nothing"):
        raise PolicyError(
            f"restore_on_skip is 'batch_norm', 'buffers', 'nothing' or a list of buffer names or patterns, not {which!r}."
        )


class SkippedState:
    """A copy of a model's buffers as they were after the last settled step.

    It is refreshed by every update of the loss scale and when the model loads a state dict. Statistics that were
    changed otherwise between two steps (``torch.optim.swa_utils.update_bn``) come back if the next step is skipped.

    Args:
        model: the model.
        which: ``"batch_norm"`` (running statistics of BatchNorm and InstanceNorm), ``"buffers"`` (all buffers), or names
            and patterns of buffers as module rules have them (``"queue"``, ``"encoder.*.ema"``), ``"batch_norm"`` among
            them if statistics shall come back as well.

    Raises:
        PolicyError: a pattern matches no buffer; names those there are.
    """

    def __init__(self, model: torch.nn.Module, which: Which) -> None:
        self.model = weakref.ref(model)
        chosen = _chosen(model, which)
        self._where = [
            (module, name)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and not _expanded(buffer) and (id(module), name) in chosen
        ]
        self._saved: dict[tuple[torch.device, torch.dtype], tuple[tuple[int, ...], torch.Tensor]] = {}
        self.refresh()
        # where the buffers are, not on the model: a part may load a state dict of its own
        for module in {id(module): module for module, _ in self._where}.values():
            module.register_load_state_dict_post_hook(_RefreshOnLoad(self))

    def __len__(self) -> int:
        return len(self._where)

    @torch.no_grad()
    def refresh(self, only: torch.nn.Module | None = None) -> None:
        """Take the state as it is now (of one module, if given) for the one to go back to."""
        if only is not None:
            self._refresh_module(only)
            return
        self._saved = {key: (indices, _flat(tensors).clone()) for key, (indices, tensors) in self._current().items()}

    @torch.no_grad()
    def settle(self, finite: torch.Tensor, skipped: bool | None) -> None:
        """Go back to the saved state if the step was skipped, and save the state as it is then.

        Args:
            finite: 0-d bool tensor.
            skipped: the same on the host (the other way round), where it is known; spares the restoring.
        """
        current = self._current()
        if {key: indices for key, (indices, _) in current.items()} != {k: i for k, (i, _) in self._saved.items()}:
            self._move(current)
        for key, (indices, tensors) in current.items():
            flat = _flat(tensors)
            if flat.numel() != self._saved[key][1].numel():
                names = ", ".join(sorted({self._where[i][1] for i in indices}))
                raise PolicyError(
                    f"a buffer changed its shape since the last step (one of {names}), so a skipped step cannot restore "
                    "it. Use mp.prepare(model, optimizer, restore_on_skip='batch_norm')."
                )
            if skipped is not False:
                flat = torch.where(finite.to(device=key[0], non_blocking=True), flat, self._saved[key][1])
                pieces = flat.split([tensor.numel() for tensor in tensors])
                torch._foreach_copy_(tensors, [p.view(t.shape) for p, t in zip(pieces, tensors, strict=True)])
            self._saved[key] = (indices, flat)

    def _refresh_module(self, module: torch.nn.Module) -> None:
        current = self._current()
        for key, (indices, saved) in self._saved.items():
            if key not in current or current[key][0] != indices:  # moved meanwhile
                self.refresh()
                return
            pieces = saved.split([t.numel() for t in current[key][1]])
            for index, piece, tensor in zip(indices, pieces, current[key][1], strict=True):
                if self._where[index][0] is module:
                    piece.copy_(tensor.reshape(-1))

    def _current(self) -> dict[tuple[torch.device, torch.dtype], tuple[tuple[int, ...], list[torch.Tensor]]]:
        groups: dict[tuple[torch.device, torch.dtype], tuple[list[int], list[torch.Tensor]]] = {}
        for index, (module, name) in enumerate(self._where):
            buffer = module._buffers[name]
            if buffer is None:  # taken out since
                continue
            indices, tensors = groups.setdefault((buffer.device, buffer.dtype), ([], []))
            indices.append(index)
            tensors.append(buffer)
        return {key: (tuple(indices), tensors) for key, (indices, tensors) in groups.items()}

    def _move(self, current: dict[Any, tuple[tuple[int, ...], list[torch.Tensor]]]) -> None:
        """The model was moved to another device or dtype: move the saved state after it."""
        sizes = [module._buffers[name].numel() for module, name in self._where]  # type: ignore[union-attr]
        saved: dict[int, torch.Tensor] = {}
        for indices, flat in self._saved.values():
            saved.update(zip(indices, flat.split([sizes[i] for i in indices]), strict=True))
        self._saved = {
            (device, dtype): (indices, torch.cat([saved[i].to(device=device, dtype=dtype) for i in indices]))
            for (device, dtype), (indices, _) in current.items()
        }


def _chosen(model: torch.nn.Module, which: Which) -> set[tuple[int, str]]:
    """The buffers that come back, by module and name."""
    paths = {
        (id(module), name): canonical(f"{prefix}.{name}" if prefix else name)
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    }
    if which == "buffers":
        return set(paths)
    patterns = ["batch_norm"] if isinstance(which, str) else list(which)
    found: set[tuple[int, str]] = set()
    for pattern in patterns:
        if pattern == "batch_norm":
            found |= {(id(m), name) for m in model.modules() if isinstance(m, _NormBase) for name in m._buffers}
            continue
        rule = Rule(module=pattern, dtype="float32")
        matched = {key for key, path in paths.items() if rule.matches(path)}
        if not matched:
            have = ", ".join(paths.values()) or "none"
            raise PolicyError(f"restore_on_skip: no buffer matches {pattern!r}. The model's buffers: {have}.")
        found |= matched
    return found


def _expanded(tensor: torch.Tensor) -> bool:
    """Whether elements share memory: nothing can write to such a tensor in place."""
    return tensor.layout is torch.strided and any(
        size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


class _RefreshOnLoad:
    """A load-state-dict hook that does not follow the model into its copies and pickles."""

    def __init__(self, guard: SkippedState | None) -> None:
        self._guard = None if guard is None else weakref.ref(guard)

    def __call__(self, module: torch.nn.Module, incompatible_keys: Any) -> None:
        guard = None if self._guard is None else self._guard()
        if guard is not None:
            guard.refresh(module)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_RefreshOnLoad, (None,))
