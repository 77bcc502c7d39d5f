"""The parity suite's replicas in torch: one rank a process, gloo on the loopback address, three ways to train them.

``ddp`` is ``DistributedDataParallel``, ``fsdp2`` is ``fully_shard``, and ``all_reduce`` a loop that averages unscaled gradients
itself, where nothing but the agreement tells one rank of another's overflow.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import precision
from precision.loss_scale import LossScaleState
from precision.parity.adapter import Array, ReplicaResult, ReplicaSpec
from precision.parity.replicas import LEARNING_RATE
from precision.policy import PrecisionPolicy
from precision.testing import run_ranks
from precision_torch import forks


def replicated(engine: str, specs: Sequence[ReplicaSpec]) -> list[ReplicaResult]:
    """Run specs in one launch of processes; those with fewer replicas run on the first ranks."""
    world, timeout = max(spec.replicas for spec in specs), 90 + 1.0 * len(specs)
    if forks.POSSIBLE:
        ranks = run_ranks(_forked, 1, [engine, list(specs), world, timeout], timeout=timeout + 10)[0]
    else:
        ranks = run_ranks(train, world, [engine, list(specs)], timeout=timeout)
    results = []
    for i, spec in enumerate(specs):
        states, weights = (np.stack([ranks[r][i][part] for r in range(spec.replicas)]) for part in (0, 1))
        results.append(ReplicaResult(states, weights))
    return results


def _forked(
    rank: int, one: int, port: int, engine: str, specs: Sequence[ReplicaSpec], world: int, timeout: float
) -> list[Any] | None:
    forks.preload()
    return forks.fork_ranks(world, lambda r: train(r, world, port, engine, specs), timeout)


def train(
    rank: int, world: int, port: int, engine: str, specs: Sequence[ReplicaSpec]
) -> dict[int, tuple[Array, Array]]:
    """One rank's part: by the spec's place, its state and weights after each step."""
    torch.set_num_threads(1)
    # the last ranks wait for those that also run the specs with fewer replicas
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60 + len(specs)),
    )
    try:
        results: dict[int, tuple[Array, Array]] = {}
        for replicas in sorted({spec.replicas for spec in specs}):
            mesh = DeviceMesh("cpu", list(range(replicas)))  # made by all ranks, used by those in it
            if rank < replicas:
                model, call = _build(engine, mesh)
                for i, spec in enumerate(specs):
                    if spec.replicas == replicas:
                        results[i] = _run(engine, rank, mesh, model, call, spec)
        return results
    finally:
        dist.destroy_process_group()


def _build(engine: str, mesh: DeviceMesh) -> tuple[Vector, nn.Module]:
    model = Vector()
    if engine == "ddp":
        return model, nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group())
    if engine == "fsdp2":
        mp: Any = precision.bind(PrecisionPolicy(), backend="torch", device="cpu")
        mp.fully_shard(model, mesh=mesh)
    return model, model


class Vector(nn.Module):
    """Four zeros; the loss is their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, factor: torch.Tensor) -> torch.Tensor:
        return self.weight.sum() * factor


def _run(
    engine: str, rank: int, mesh: DeviceMesh, model: Vector, call: nn.Module, spec: ReplicaSpec
) -> tuple[Array, Array]:
    by_hand = engine == "all_reduce"
    policy = PrecisionPolicy(loss_scale=spec.config)
    mp: Any = precision.bind(policy, backend="torch", device="cpu", process_group=mesh if by_hand else None)
    with torch.no_grad():
        model.weight.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    mp.prepare(call, optimizer)
    states = np.empty((len(spec.factors), len(LossScaleState._fields)))
    weights = np.empty((len(spec.factors), 4), np.float32)
    for step, factor in enumerate(torch.from_numpy(spec.factors[:, rank].copy())):
        optimizer.zero_grad()
        mp.backward(call(torch.tensor(12.0 * (rank + 1))) * factor)
        if by_hand:
            mp.scaler.unscale_(optimizer)
            grad: Any = model.weight.grad
            dist.all_reduce(grad, group=mesh.get_group())
            grad.div_(mesh.size())
        mp.step(optimizer)
        states[step] = [mp.scaler.state_dict()[name] for name in LossScaleState._fields]
        weight: Any = model.weight.detach()
        weights[step] = (weight.full_tensor() if hasattr(weight, "full_tensor") else weight).numpy()
    return states, weights
