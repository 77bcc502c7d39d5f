"""``mp.checkpoints``: saving and resuming a run, with PyTorch's distributed checkpoint inside a folder that a kill leaves whole."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from precision.checkpoint import CheckpointStore, Manifest
from precision.errors import CheckpointError, PrecisionError, PrecisionWarning
from precision.loss_scale import state_from_dict
from precision_torch.agreement import device_for
from precision_torch.checkpoint_state import (
    OptimizerState,
    Tensors,
    load_model,
    model_templates,
    model_tensors,
    require_supported_model,
)
from precision_torch.grad_scaler import PrecisionGradScaler

LAYOUT = 1
"""Version of the names and values that this module puts into a checkpoint."""


class Restored(NamedTuple):
    """What came back with the weights.

    Attributes:
        step: the step the checkpoint was taken after.
        extra: the JSON values given to ``save``.
    """

    step: int
    extra: Any


class Checkpoints:
    """The checkpoints of a run in a folder; made by ``mp.checkpoints(directory)``.

    All ranks call the same methods together, on a folder that all of them see. Each saves its shards and the state of its
    random generators; the rest is written once. A checkpoint loads into another number of ranks, or into one process.

    Args:
        mp: the policy whose scaler is saved.
        directory: the folder.
        keep: how many to keep; None for all.
        process_group: the ranks that save together; None for all.

    Example:
        >>> import precision, tempfile, torch
        >>> mp = precision.bind("mixed_float16", backend="torch", device="cpu")
        >>> model = torch.nn.Linear(2, 1)
        >>> model, optimizer = mp.prepare(model, torch.optim.Adam(model.parameters()))
        >>> checkpoints = mp.checkpoints(tempfile.mkdtemp(), keep=3)
        >>> checkpoints.restore(model, optimizer) is None
        True
        >>> checkpoints.save(100, model, optimizer, extra={"batch": 100})
        >>> checkpoints.restore(model, optimizer)
        Restored(step=100, extra={'batch': 100})
    """

    def __init__(
        self, mp: Any, directory: str | os.PathLike[str], keep: int | None = None, process_group: Any = None
    ) -> None:
        self._mp = mp
        self._group = process_group
        self.store = CheckpointStore(directory, keep)

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        return self.store.steps()

    def latest(self) -> int | None:
        """The step of the last complete checkpoint; None if there is none."""
        return self.store.latest()

    def save(
        self,
        step: int,
        model: torch.nn.Module,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
        *,
        extra: Any = None,
        scaler: PrecisionGradScaler | None = None,
    ) -> None:
        """Save model, optimizers, loss scale and random generators. Complete when it returns, on disk; before that it is not there.

        Args:
            step: training steps taken so far.
            model: the model, plain, compiled, in DDP, sharded with FSDP2 or tensor parallel.
            optimizers: the optimizer of its parameters, or several in a fixed order.
            extra: JSON values, such as the position in the data or a scheduler's state dict.
            scaler: by default ``mp.scaler``.

        Raises:
            CheckpointError: something cannot be saved, or a rank failed; on all ranks. Earlier checkpoints are as they were.
        """
        import torch.distributed.checkpoint as dcp

        tensors: Tensors = {}
        about: dict[str, Any] = {}

        def gather() -> None:
            require_supported_model(model)
            tensors.update(model_tensors(model, self._rank()))
            kept = []
            for i, optimizer in enumerate(_natives(optimizers)):
                own, values = OptimizerState(optimizer, model).collect()
                tensors.update({f"optimizer/{i}/{name}": tensor for name, tensor in own.items()})
                kept.append(values)
            tensors.update(self._random_states())
            loss_scale = (self._mp.scaler if scaler is None else scaler).state_dict()
            about.update(layout=LAYOUT, optimizers=kept, loss_scale=loss_scale, extra=extra)

        self._together(gather, f"the checkpoint of step {step!r} was not written")
        with self.store.saving(
            step,
            backend="torch",
            world_size=self._world(),
            coordinator=self._rank() == 0,
            agree=self._agree,
            about=about,
        ) as folder:
            writer = dcp.FileSystemWriter(folder, sync_files=False)  # the store forces everything to disk
            with _quiet(self._world()) as alone:
                dcp.save(tensors, storage_writer=writer, process_group=self._group, no_dist=alone)

    def restore(
        self,
        model: torch.nn.Module,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
        *,
        step: int | None = None,
        scaler: PrecisionGradScaler | None = None,
    ) -> Restored | None:
        """Load a checkpoint into a model and optimizers that were made and prepared as those saved.

        Everything is verified and read before anything is changed: it needs room for the model's tensors twice.

        Args:
            model, optimizers, scaler: as given to :meth:`save`; the model may be wrapped or sharded otherwise.
            step: which; None for the last.

        Returns:
            The step and the extra values; None if the folder holds no checkpoint and no step is asked for.

        Raises:
            CheckpointError: damaged, of another kind, or not of this model and optimizer; on all ranks. Nothing was changed.
            StateError: the loss scale does not fit the policy. Nothing was changed.
        """
        import torch.distributed.checkpoint as dcp

        found: dict[str, Any] = {}
        used = self._mp.scaler if scaler is None else scaler

        def verify() -> None:
            require_supported_model(model)
            if step is None and self.store.latest() is None:
                return
            folder, manifest = self.store.open(step, backend="torch")
            about = _read(manifest, folder)
            state_from_dict(used.config, about["loss_scale"])
            saved = _metadata(dcp.FileSystemReader(folder), folder)
            states = [OptimizerState(optimizer, model) for optimizer in _natives(optimizers)]
            of_model = model_templates(model, self._rank(), saved)
            templates = dict(of_model.values())
            if len(states) != len(about["optimizers"]):
                raise CheckpointError(
                    f"{folder} holds {len(about['optimizers'])} optimizers; {len(states)} were given. Nothing was loaded."
                )
            for i, (state, values) in enumerate(zip(states, about["optimizers"], strict=True)):
                prefix = f"optimizer/{i}/"
                own = {name.removeprefix(prefix): entry for name, entry in saved.items() if name.startswith(prefix)}
                templates |= {prefix + name: tensor for name, tensor in state.templates(own, values).items()}
            for name in self._random_states():
                if name in saved:
                    templates[name] = torch.empty(saved[name][0], dtype=saved[name][1])
            found.update(
                folder=folder, manifest=manifest, about=about, states=states, tensors=templates, of_model=of_model
            )

        self._together(verify, "no checkpoint was restored")
        if not self._same(found["manifest"].step if found else None):
            raise CheckpointError(
                f"the ranks see different checkpoints in {self.store.directory}: it must be one folder that all of them share."
            )
        if not found:
            return None
        folder, tensors, about = found["folder"], found["tensors"], found["about"]

        def read() -> None:
            with _quiet(self._world()) as alone:
                reader = dcp.FileSystemReader(folder)
                dcp.load(tensors, storage_reader=reader, process_group=self._group, no_dist=alone)

        self._together(read, f"{folder} could not be read")
        load_model(model, self._rank(), {name: tensor for name, (_, tensor) in found["of_model"].items()})
        for i, (state, values) in enumerate(zip(found["states"], about["optimizers"], strict=True)):
            state.load(_part(tensors, f"optimizer/{i}/"), values)
        used.load_state_dict(about["loss_scale"])
        self._set_random_states(tensors, found["manifest"].world_size)
        return Restored(found["manifest"].step, about["extra"])

    # ---- random generators ---------------------------------------------------------------------------------------

    def _random_states(self) -> Tensors:
        device = self._mp.device
        states = {f"random/{self._rank()}/cpu": torch.get_rng_state()}
        if device.type in ("cuda", "xpu"):
            states[f"random/{self._rank()}/{device.type}"] = torch.get_device_module(device.type).get_rng_state(device)
        return states

    def _set_random_states(self, tensors: Tensors, saved_by: int) -> None:
        device, lacking = self._mp.device, []
        for name in self._random_states():
            state = tensors.get(name)
            if state is None:
                lacking.append(name)
            elif name.endswith("/cpu"):
                torch.set_rng_state(state)
            else:
                torch.get_device_module(device.type).set_rng_state(state, device)
        if lacking:
            warnings.warn(
                f"rank {self._rank()} keeps its random generators as they are: the checkpoint was saved by {saved_by} ranks, "
                "not by this one.",
                PrecisionWarning,
                stacklevel=3,
            )

    # ---- the other ranks -----------------------------------------------------------------------------------------

    def _world(self) -> int:
        return dist.get_world_size(self._group) if dist.is_available() and dist.is_initialized() else 1

    def _rank(self) -> int:
        return dist.get_rank(self._group) if dist.is_available() and dist.is_initialized() else 0

    def _agree(self, well: bool) -> bool:
        return self._extreme(int(well), dist.ReduceOp.MIN) == 1 if self._world() > 1 else well

    def _same(self, step: int | None) -> bool:
        number = -1 if step is None else step
        if self._world() == 1:
            return True
        low, high = (self._extreme(number, op) for op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX))
        return low == high

    def _extreme(self, number: int, op: Any) -> int:
        group = dist.group.WORLD if self._group is None else self._group
        value = torch.tensor(number, dtype=torch.int64, device=device_for(group, self._mp.device))
        dist.all_reduce(value, op=op, group=group)
        return int(value)

    def _together(self, act: Callable[[], None], failed: str) -> None:
        """Do something that may fail on one rank only; then it fails on all."""
        error: Exception | None = None
        try:
            act()
        except Exception as problem:  # noqa: BLE001 - raised below, after the others have been told
            error = problem
        well = self._agree(error is None)
        if isinstance(error, PrecisionError):
            raise error
        if error is not None:
            raise CheckpointError(f"{failed}: {type(error).__name__}: {error}. Nothing was changed.") from error
        if not well:
            raise CheckpointError(f"{failed}: another rank failed. Nothing was changed.")


@contextlib.contextmanager
def _quiet(world: int) -> Iterator[bool]:
    """Give whether this process is alone, without the warning that it is."""
    with warnings.catch_warnings():
        if world == 1:
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield world == 1


def _natives(optimizers: Any) -> list[torch.optim.Optimizer]:
    several = optimizers if isinstance(optimizers, (list, tuple)) else (optimizers,)
    natives = [getattr(each, "_precision_inner", each) for each in several]
    for each in natives:
        if not isinstance(each, torch.optim.Optimizer):
            raise CheckpointError(f"a checkpoint takes torch.optim optimizers, not {type(each).__name__}.")
    return natives


def _read(manifest: Manifest, folder: Any) -> Mapping[str, Any]:
    about = manifest.about
    if about.get("layout") != LAYOUT or not {"optimizers", "loss_scale", "extra"} <= set(about):
        raise CheckpointError(
            f"{folder} was not written by mp.checkpoints, or by another release of it (layout {about.get('layout')!r}, this "
            f"one reads {LAYOUT}). Nothing was loaded."
        )
    return about


def _metadata(reader: Any, folder: Any) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Global shape and dtype of each saved tensor."""
    try:
        entries = reader.read_metadata().state_dict_metadata
        return {name: (tuple(entry.size), entry.properties.dtype) for name, entry in entries.items()}
    except Exception as error:  # the format is another library's
        raise CheckpointError(
            f"{folder} does not hold a checkpoint of torch.distributed.checkpoint: {error}."
        ) from error


def _part(tensors: Tensors, prefix: str) -> Tensors:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
