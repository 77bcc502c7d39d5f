"""Torch's side of the parity suite: reports what torch does; :mod:`precision.parity.tiers` judges."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F

from precision.formats import canonical_dtype
from precision.loss_scale import LossScale
from precision.parity.adapter import (
    Array,
    NetworkResult,
    NetworkSpec,
    OpResult,
    ParityAdapter,
    ReplicaResult,
    ReplicaSpec,
    TrainResult,
    TrainSpec,
)
from precision.policy import PrecisionPolicy
from precision_torch.dtypes import TORCH, dtype_name
from precision_torch.parity_models import build, dump

if TYPE_CHECKING:
    from precision_torch.backend import TorchBackend

_OPS: dict[str, Callable[..., torch.Tensor]] = {
    "matmul": torch.matmul,
    "linear": lambda x, kernel, bias: F.linear(x, kernel.T, bias),
    "conv2d": lambda x, kernel: F.conv2d(x.permute(0, 3, 1, 2), kernel.permute(3, 2, 0, 1), padding=1).permute(
        0, 2, 3, 1
    ),
    "attention": F.scaled_dot_product_attention,
    "layer_norm": lambda x, scale, offset: F.layer_norm(x, x.shape[-1:], scale, offset, 1e-5),
    "softmax": lambda x: F.softmax(x, -1),
    "cross_entropy": lambda logits, labels: F.cross_entropy(logits, labels.long()),
    "mse": F.mse_loss,
    "sum": torch.sum,
    "mean": lambda x: x.mean(-1),
    "exp": torch.exp,
    "log": torch.log,
    "add": torch.add,
    "relu": torch.relu,
    "transpose": lambda x: x.T,
    "cholesky": torch.linalg.cholesky,
}


class TorchParity(ParityAdapter):
    """The adapter; runs on the CPU, where all three frameworks meet."""

    name = "torch"
    engines = ("ddp", "fsdp2", "all_reduce")
    saturates = frozenset({"float8_e4m3fn"})  # since 2.13: no NaN from overflow, not even from infinity

    def __init__(self, backend: TorchBackend, device: str = "cpu") -> None:
        self._backend = backend
        self._device = device

    def tensor(self, array: Array) -> torch.Tensor:
        """A tensor on the adapter's device."""
        return to_torch(array).to(self._device)

    def array(self, tensor: Any) -> Array:
        """Values and dtype, those of ``ml_dtypes`` included."""
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        return flat.view(torch.uint8).numpy().view(np.dtype(dtype_name(tensor.dtype))).reshape(tuple(tensor.shape))

    def run_op(self, mp: Any, case: str, family: str, inputs: Sequence[Array]) -> OpResult:
        """Run one op wrapped in ``mp.op(family)``, inside ``mp.autocast()``, and note the dtypes it saw."""
        seen: list[tuple[str, ...]] = []

        def op(*tensors: torch.Tensor) -> torch.Tensor:
            seen.append(tuple(dtype_name(tensor.dtype) for tensor in tensors))
            return _OPS[case](*tensors)

        with mp.autocast():
            result = mp.op(family)(op)(*(to_torch(array).to(self._device) for array in inputs))
        return OpResult(seen[0], dtype_name(result.dtype), result.detach().double().cpu().numpy())

    def autocast_ops(self, mp: Any, calls: Sequence[tuple[str, Sequence[Array]]]) -> list[OpResult]:
        """Run each op eagerly under ``mp.autocast()``, watched by a dispatch mode below the casts."""
        from precision_torch.parity_autocast import run_case

        return [run_case(mp, name, [to_torch(array).to(self._device) for array in inputs]) for name, inputs in calls]

    def autocast_network(self, spec: NetworkSpec) -> NetworkResult:
        """One pass through a network; see :mod:`precision_torch.parity_networks`."""
        from precision_torch.parity_networks import run_network

        return run_network(self._backend.bind(spec.policy, device=self._device), spec, self._device)

    def round_to(self, values: Array, dtype: str) -> Array:
        """Cast to a low dtype and back."""
        low = torch.from_numpy(np.array(values, np.float32)).to(self._device).to(TORCH[canonical_dtype(dtype)])
        return low.to(torch.float32).cpu().numpy()

    def trajectory(
        self,
        config: LossScale,
        finite: Sequence[bool],
        form: Literal["neutral", "native"],
        start: Mapping[str, float | int] | None = None,
    ) -> list[dict[str, float | int]]:
        """Drive the explicit-state scaler, or the ``GradScaler`` with an optimizer, over a pattern."""
        mp = self._backend.bind(PrecisionPolicy(loss_scale=config), device=self._device)
        return _neutral(mp, finite, start) if form == "neutral" else _native(mp, finite, start)

    def train(self, spec: TrainSpec) -> TrainResult:
        """Train with ``prepare``, ``autocast``, ``backward`` and ``step``."""
        mp = self._backend.bind(spec.policy, device=self._device)
        model = build(mp, spec.model, spec.weights).to(self._device)
        optimizer = torch.optim.SGD(model.parameters(), lr=spec.learning_rate, momentum=spec.momentum)
        mp.prepare(model, optimizer, master_weights=True)
        cross_entropy = mp.op("loss")(F.cross_entropy)
        run = TrainResult([], [], [], 0.0, {}, [], {})
        for i in range(spec.steps):
            inputs = torch.from_numpy(spec.inputs[i]).to(self._device)
            labels = torch.from_numpy(spec.labels[i]).long().to(self._device)
            run.scales.append(mp.scaler.get_scale())
            start = time.perf_counter()
            optimizer.zero_grad()
            with mp.autocast():
                logits = model(inputs)
                loss = cross_entropy(logits.flatten(0, -2), labels.flatten())
            mp.backward(loss * float(spec.poison[i]))
            taken = mp.step(optimizer).taken
            run.losses.append(float(loss.detach()))
            run.step_seconds.append(time.perf_counter() - start)
            run.skipped.append(not taken)
        model.eval()
        with torch.no_grad(), mp.autocast():
            predicted = model(torch.from_numpy(spec.eval_inputs).to(self._device)).argmax(-1).cpu().numpy()
        return TrainResult(
            run.losses, run.scales, run.skipped, float((predicted == spec.eval_labels).mean()),
            mp.scaler.state_dict(), run.step_seconds, dump(model, list(spec.weights)),
        )  # fmt: skip

    def replicated(self, engine: str, specs: Sequence[ReplicaSpec]) -> list[ReplicaResult]:
        """Several ranks, a process each; see :mod:`precision_torch.parity_replicas` for the engines."""
        if engine not in self.engines:
            return super().replicated(engine, specs)
        from precision_torch.parity_replicas import replicated

        return replicated(engine, specs)


def _neutral(mp: Any, finite: Sequence[bool], start: Any) -> list[dict[str, float | int]]:
    scaler, out = mp.loss_scaler, []
    state = scaler.load_state_dict(start) if start else scaler.init()
    for flag in finite:
        grads = {"w": torch.tensor([1.0, 1.0 if flag else float("inf")], device=mp.device)}
        _, agreed = mp.loss_scaler.unscale(grads, state)
        state = mp.loss_scaler.update(state, agreed)
        out.append(mp.loss_scaler.state_dict(state))
    return out


def _native(mp: Any, finite: Sequence[bool], start: Any) -> list[dict[str, float | int]]:
    scaler, out = mp.grad_scaler(), []
    if start:
        scaler.load_state_dict(start)
    weight = torch.nn.Parameter(torch.zeros(2, device=mp.device))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for flag in finite:
        optimizer.zero_grad()
        scaler.scale(weight.sum() * (0.0 if flag else float("inf"))).backward()
        scaler.step(optimizer)
        scaler.update()
        out.append(scaler.state_dict())
    return out


def to_torch(array: Array) -> torch.Tensor:
    """A tensor of a NumPy array's dtype, those of ``ml_dtypes`` included."""
    array = np.asarray(array, order="C")  # ascontiguousarray would add an axis to a scalar
    if array.dtype.name in TORCH and array.dtype.name not in ("float32", "float16"):
        bits = torch.from_numpy(array.view(f"u{array.dtype.itemsize}"))
        return bits.view(TORCH[array.dtype.name])
    return torch.from_numpy(array.copy())
