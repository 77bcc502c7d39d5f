"""What the ranks of PyTorch's tests run: each function ``(rank, world, port, ...)`` returns plain values to be asserted on.

One launch does many things, since starting PyTorch takes longer than any of them.
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import precision
from precision import LossScale, PrecisionPolicy
from precision.testing import FaultPlan


@contextlib.contextmanager
def group(rank: int, world: int, port: int):
    """The default process group, on the loopback address, with bounded waits."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def bind(initial: float = 8.0, *, process_group: Any = None, **fields: Any) -> Any:
    """A float32 policy with a dynamic scale; ``fields`` are the policy's, or the loss scale's."""
    scale = {key: fields.pop(key) for key in list(fields) if key in LossScale.model_fields}
    policy = PrecisionPolicy(**fields, loss_scale=LossScale(**{"mode": "dynamic", "initial": initial, **scale}))
    return precision.bind(policy, backend="torch", device="cpu", process_group=process_group)


def gathered(value: Any) -> list[Any]:
    """A value of each rank, on each rank."""
    out: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(out, value)
    return out


def trap(fn: Any, *args: Any, **kwargs: Any) -> str:
    """The type and message of what a call raises."""
    try:
        fn(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


# ---- every check is a function of the rank; those of a launch run one after the other ----------------------------------


def run_checks(rank: int, world: int, port: int, names: list[str]) -> dict[str, Any]:
    """Run checks by name; an exception is a result like any other, for the test of that check to fail on."""
    results: dict[str, Any] = {}
    with group(rank, world, port):
        for name in names:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                results[name] = globals()[name](rank, world)
            results[f"{name}:warnings"] = [str(w.message) for w in caught if w.category is precision.PrecisionWarning]
            dist.barrier()
    return results


def one_step(scaler: Any, optimizer: Any, loss: torch.Tensor) -> bool:
    """Backward, step and update with any GradScaler; whether the parameters moved."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    before = [_local(param).detach().clone() for param in params]
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return any(not torch.equal(old, _local(new)) for old, new in zip(before, params, strict=True))


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local().detach() if hasattr(tensor, "to_local") else tensor.detach()


def shards_of_one_model(rank: int, world: int) -> dict[str, Any]:
    """Plain tensors that hold a shard each, as FSDP1's do: one rank's shard overflows."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    def scalers():
        return {
            "native": torch.amp.GradScaler("cpu", init_scale=8.0),
            "sharded": ShardedGradScaler("cpu", init_scale=8.0),
            "ours": bind().grad_scaler(),
        }

    out: dict[str, Any] = {}
    for fused in (False, True):
        for name, scaler in scalers().items():
            shard = nn.Parameter(torch.ones(2))
            optimizer = torch.optim.SGD([shard], lr=0.5, fused=fused)
            factor = math.inf if rank == world - 1 else 1.0
            moved = one_step(scaler, optimizer, (shard * factor).sum())
            out[f"{name} fused={fused}"] = gathered((moved, scaler.get_scale(), bool(shard.isfinite().all())))
    # the loss of a low dtype is scaled in it
    loss = torch.tensor(3.0, dtype=torch.float16)
    out["float16 loss"] = {
        name: math.isfinite(scaler.scale(loss).item())
        for name, scaler in {
            "sharded": ShardedGradScaler("cpu", init_scale=2.0**16),
            "ours": bind(2.0**16).grad_scaler(),
        }.items()
    }
    return out


def mesh_of_placements(rank: int, world: int) -> dict[str, Any]:
    """A 2-D mesh with replicated and sharded parameters in either order; one rank's shard overflows."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
    kinds = {
        "replicated": (Replicate(), Replicate()),
        "sharded": (Replicate(), Shard(0)),
        "sharded twice": (Shard(0), Shard(0)),
        "sharded over dp": (Shard(0), Replicate()),
    }
    orders = {
        "replicated first": ("replicated", "sharded"),
        "sharded first": ("sharded", "replicated"),
        "all kinds": ("replicated", "sharded", "sharded twice", "sharded over dp"),
        "all kinds, plain first": ("plain", "sharded over dp", "replicated", "sharded", "sharded twice"),
    }

    def build(order):
        params = []
        for kind in order:
            if kind == "plain":
                params.append(nn.Parameter(torch.ones(2)))
            else:
                params.append(nn.Parameter(DTensor.from_local(torch.ones(2), mesh, kinds[kind], run_check=False)))
        return params

    out: dict[str, Any] = {}
    for order, members in orders.items():
        for fused in (False, True):
            for name in ("native", "ours"):
                scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if name == "native" else bind().grad_scaler()
                params = build(members)
                # torch has no fused SGD for DTensors, and no foreach or fused steps over plain tensors and DTensors together
                if fused and "plain" not in members:
                    optimizer = torch.optim.Adam(params, lr=0.5, fused=True)
                else:
                    optimizer = torch.optim.SGD(params, lr=0.5, foreach=not fused and "plain" not in members)
                scaler.scale(torch.ones(()))
                for kind, param in zip(members, params, strict=True):
                    grad = torch.full((2,), 8.0)
                    # the last rank's shard overflows; all who hold the same shard have it
                    if kind == "sharded" and mesh.get_local_rank("tp") == mesh.size(1) - 1:
                        grad[0] = math.inf
                    placed = grad if kind == "plain" else DTensor.from_local(grad, mesh, kinds[kind], run_check=False)
                    param.grad = placed
                try:
                    scaler.step(optimizer)
                    scaler.update()
                    state = ([round(_local(p).sum().item(), 3) for p in params], scaler.get_scale())
                except Exception as error:
                    state = f"{type(error).__name__}: {error}"
                out[f"{name}, {order}, fused={fused}"] = gathered(state)
    return out


def partial_gradients(rank: int, world: int) -> dict[str, Any]:
    """A gradient whose parts are finite and whose sum is not; and one whose parts are added up as they should be."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate

    mesh = init_device_mesh("cpu", (world,))
    out: dict[str, Any] = {}
    for what, part in (("overflows", 3e38), ("fits", 8.0 * (rank + 1))):
        mp = bind()
        param = nn.Parameter(DTensor.from_local(torch.ones(2), mesh, (Replicate(),), run_check=False))
        optimizer = torch.optim.SGD([param], lr=0.5)
        mp.scaler.scale(torch.ones(()))
        param.grad = DTensor.from_local(torch.full((2,), part), mesh, (Partial(),), run_check=False)
        result = mp.step(optimizer, clip_norm=1e6)
        state = mp.loss_scaler.init()
        grad = DTensor.from_local(torch.full((2,), part), mesh, (Partial(),), run_check=False)
        tree, finite = mp.loss_scaler.unscale({"a": grad}, state)
        out[what] = gathered((result.taken, _local(param).tolist(), bool(finite), _local(tree["a"]).tolist()))
    return out


def neutral_scaler(rank: int, world: int) -> dict[str, Any]:
    """The explicit-state scaler: a group where one is given, the mesh of DTensors, and nobody otherwise."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (world,))
    scaler = bind().loss_scaler
    state = scaler.init()
    bad = torch.tensor([1.0, math.inf if rank == world - 1 else 1.0])
    sharded = DTensor.from_local(bad, mesh, (Shard(0),), run_check=False)
    others = bind(process_group="none").loss_scaler
    return {
        "given": gathered(bool(scaler.unscale([bad], state, process_group=dist.group.WORLD)[1])),
        "mesh given": gathered(bool(scaler.unscale([bad], state, process_group=mesh)[1])),
        "bound": gathered(bool(bind(process_group=dist.group.WORLD).loss_scaler.unscale([bad], state)[1])),
        "alone": gathered(bool(scaler.unscale([bad], state)[1])),
        "dtensor": gathered(bool(scaler.unscale([sharded], state)[1])),
        "dtensor, none": gathered(bool(others.unscale([sharded], state)[1])),
        "no gradients here": gathered(
            bool(scaler.unscale([bad] if rank else [], state, process_group=dist.group.WORLD)[1])
        ),
    }


class Counted:
    """Counts calls of ``torch.distributed``'s collectives while it is entered."""

    names = ("all_reduce", "all_gather_object", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor")

    def __enter__(self):
        self.calls: list[tuple[str, int]] = []
        self._kept = {name: getattr(dist, name) for name in self.names}
        for name, native in self._kept.items():
            setattr(dist, name, functools.partial(self._call, name, native))
        return self

    def _call(self, name, native, *args, **kwargs):
        tensor = args[0] if args and isinstance(args[0], torch.Tensor) else None
        self.calls.append((name, 0 if tensor is None else tensor.numel()))
        return native(*args, **kwargs)

    def __exit__(self, *_):
        for name, native in self._kept.items():
            setattr(dist, name, native)


class Net(nn.Module):
    """Two layers with BatchNorm between them, and one that is only used if asked for."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second, self.spare = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2), nn.Linear(2, 2)

    def forward(self, x, spare=False):
        x = self.second(self.norm(self.first(x)).relu())
        return self.spare(x) if spare else x


def batch(rank: int, step: int, rows: int = 4) -> torch.Tensor:
    return torch.randn(rows, 3, generator=torch.Generator().manual_seed(100 * step + rank))


def ddp_training(rank: int, world: int) -> dict[str, Any]:
    """DDP through overflows at random ranks, against one process that has all the ranks' batches."""
    out: dict[str, Any] = {}
    steps = 8
    plan = FaultPlan.random(3, steps, world, rate=0.2)
    for fused in (False, True):
        for compiled in (False, True) if fused else (False,):
            torch.manual_seed(0)
            mp = bind(growth_interval=2)
            model = Net()
            ddp = DDP(model, find_unused_parameters=True)
            ddp, optimizer = mp.prepare(ddp, torch.optim.Adam(model.parameters(), lr=0.1, fused=fused))
            call = torch.compile(ddp, backend="eager") if compiled else ddp
            states, stats = [], []
            for step in range(steps):
                optimizer.zero_grad()
                loss = call(batch(rank, step)).square().mean() * plan.factor(step, rank)
                mp.backward(loss)
                mp.step(optimizer, clip_norm=0.5)
                states.append(mp.scaler.state_dict())
                stats.append([float(model.norm.running_mean.sum()), int(model.norm.num_batches_tracked)])
            weights = torch.cat([param.detach().flatten() for param in model.parameters()])
            out[f"fused={fused} compiled={compiled}"] = {
                "states": gathered(states),
                "weights": gathered(weights.tolist()),
                "stats": gathered(stats),
            }
    out["expected"] = plan.trajectory(mp.policy.loss_scale, steps)
    return out


def single_process_reference(rank: int, world: int) -> list[float]:
    """The same run without faults' steps, by hand in one process: gradients averaged over the ranks' batches, float64 free."""
    steps, plan = 8, FaultPlan.random(3, 8, world, rate=0.2)
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for step in range(steps):
        if not plan.finite(steps)[step]:
            continue
        optimizer.zero_grad()
        for other in range(world):
            (model(batch(other, step)).square().mean() / world).backward()
        used = [param for param in model.parameters() if param.grad is not None]
        nn.utils.clip_grad_norm_(used, 0.5)
        optimizer.step()
    return torch.cat([param.detach().flatten() for param in model.parameters()]).tolist()


def where_ddp_does_not_spread_it(rank: int, world: int) -> dict[str, Any]:
    """DDP's own reduction usually spreads an overflow; here it does not reach all: native beside ours."""
    from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

    def scalers():
        return {"native": torch.amp.GradScaler("cpu", init_scale=8.0), "ours": bind().grad_scaler()}

    out: dict[str, Any] = {}
    factor = math.inf if rank == world - 1 else 1.0
    for name, scaler in scalers().items():  # reduced as usual
        torch.manual_seed(0)
        ddp = DDP(nn.Linear(2, 1, bias=False))
        moved = one_step(scaler, torch.optim.SGD(ddp.parameters(), lr=0.5), ddp(torch.ones(1, 2)).sum() * factor)
        out[f"{name}, reduced"] = gathered((moved, scaler.get_scale()))
    for name, scaler in scalers().items():  # a hook that does not reduce (local SGD)
        torch.manual_seed(0)
        ddp = DDP(nn.Linear(2, 1, bias=False))
        ddp.register_comm_hook(None, noop_hook)
        moved = one_step(scaler, torch.optim.SGD(ddp.parameters(), lr=0.5), ddp(torch.ones(1, 2)).sum() * factor)
        out[f"{name}, local hook"] = gathered((moved, scaler.get_scale()))
    for name, scaler in scalers().items():  # parameters that DDP was told to leave alone
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
        DDP._set_params_and_buffers_to_ignore_for_model(model, ["1.weight"])
        ddp = DDP(model)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
        optimizer.zero_grad()
        scaler.scale(ddp(torch.ones(1, 2)).sum()).backward()
        model[1].weight.grad.mul_(factor)
        before = model[0].weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        out[f"{name}, ignored parameter"] = gathered((not torch.equal(before, model[0].weight), scaler.get_scale()))
    for name, scaler in scalers().items():  # used in a no_sync micro-batch, and not in the one that reduces
        torch.manual_seed(0)
        model = Net().eval()
        ddp = DDP(model, find_unused_parameters=True)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
        with ddp.no_sync():
            scaler.scale(ddp(torch.ones(1, 3), spare=True).sum() * 1.0).backward()
        if rank == world - 1:
            model.spare.weight.grad[0, 0] = math.inf
        scaler.scale(ddp(torch.ones(1, 3)).sum()).backward()
        before = model.first.weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        out[f"{name}, no_sync"] = gathered((not torch.equal(before, model.first.weight), scaler.get_scale()))
    return out


def accumulation(rank: int, world: int) -> dict[str, Any]:
    """Micro-batches under ``no_sync``: any of them that overflows on any rank skips the step on all."""
    out: dict[str, Any] = {}
    for bad in (None, (0, world - 1), (1, 0), (2, world - 1)):
        torch.manual_seed(0)
        mp = bind()
        model = nn.Linear(3, 2)
        ddp, optimizer = mp.prepare(DDP(model), torch.optim.SGD(model.parameters(), lr=0.5))
        for micro in range(3):
            last = micro == 2
            with contextlib.nullcontext() if last else ddp.no_sync():
                loss = ddp(batch(rank, micro)).square().mean() / 3
                mp.backward(loss * (math.inf if bad == (micro, rank) else 1.0))
        result = mp.step(optimizer)
        out[str(bad)] = gathered((result.taken, mp.scaler.get_scale(), model.weight.flatten().tolist()))
    return out


def reduce_dtypes(rank: int, world: int) -> dict[str, Any]:
    """What DDP's reduction gives in each reduce dtype, and what overflows there."""
    out: dict[str, Any] = {}
    value = 1 + 2.0**-10 if rank else 2.0**-11  # their mean needs 12 bits: bfloat16 has 8, float16 has 11
    for dtype in ("float32", "bfloat16", "float16"):
        for what, scale in (("fits", 1.0), ("too large", 2.0**17)):
            mp = bind(scale, reduce_dtype=dtype)
            model = nn.Linear(1, 1, bias=False)
            nn.init.ones_(model.weight)
            ddp, optimizer = mp.prepare(DDP(model), torch.optim.SGD(model.parameters(), lr=1.0))
            mp.backward(ddp(torch.full((1, 1), value)).sum())
            hooks = len(ddp._comm_hooks)
            reduced = model.weight.grad.item()
            result = mp.step(optimizer)
            out[f"{dtype}, {what}"] = gathered((hooks, reduced, result.taken, mp.scaler.get_scale()))
    # low parameters with masters, added up in float32
    for dtype in ("float32", "bfloat16"):
        policy = PrecisionPolicy(param_dtype="bfloat16", compute_dtype="bfloat16", reduce_dtype=dtype)
        mp = precision.bind(policy, backend="torch", device="cpu")
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        model, optimizer = mp.prepare(model, torch.optim.SGD(model.parameters(), lr=2.0**-9), master_weights=True)
        ddp = DDP(model)
        ddp, optimizer = mp.prepare(ddp, optimizer, master_weights=True)
        for _ in range(2):
            for micro in range(2):
                with contextlib.nullcontext() if micro else ddp.no_sync():
                    with mp.autocast():
                        loss = ddp(torch.full((1, 1), 0.5 if rank else 1.0)).sum()
                    mp.backward(loss)
            mp.step(optimizer, clip_norm=100.0)
            optimizer.zero_grad()
        master = optimizer.param_groups[0]["params"][0]
        out[f"masters, {dtype}"] = gathered((len(ddp._comm_hooks), master.item(), model.weight.item(), str(master.dtype)))
    mp = bind(reduce_dtype="bfloat16")
    own = DDP(nn.Linear(1, 1))
    own.register_comm_hook(None, lambda state, bucket: dist.all_reduce(bucket.buffer(), async_op=True).get_future())
    out["own hook"] = trap(mp.register_comm_hook, own)
    out["not DDP"] = trap(mp.register_comm_hook, nn.Linear(1, 1))
    ddp = DDP(nn.Linear(1, 1))
    out["twice"] = (mp.register_comm_hook(ddp), mp.register_comm_hook(ddp), len(ddp._comm_hooks))
    out["another policy"] = trap(bind(reduce_dtype="float16").register_comm_hook, ddp)
    unchecked = precision.bind(PrecisionPolicy(reduce_dtype="float16"), backend="torch", device="cpu")
    out["unchecked"] = trap(unchecked.register_comm_hook, DDP(nn.Linear(1, 1)))
    return out


def idle_reduce_dtypes(rank: int, world: int) -> None:
    """Warned of, with a plain model among several ranks; and with a DDP model whose hook is another's."""
    mp = bind(reduce_dtype="bfloat16")
    model = nn.Linear(1, 1)
    mp.prepare(model, torch.optim.SGD(model.parameters()))
    ddp = DDP(nn.Linear(1, 1))
    ddp.register_comm_hook(None, lambda state, bucket: dist.all_reduce(bucket.buffer(), async_op=True).get_future())
    mp.prepare(ddp, torch.optim.SGD(ddp.parameters()))
    honoured = DDP(nn.Linear(1, 1))
    mp.prepare(honoured, torch.optim.SGD(honoured.parameters()))


def uneven_gradients(rank: int, world: int) -> dict[str, Any]:
    """Ranks without gradients for an optimizer take part, and none waits for ever; no rank with any is an error on all."""
    out: dict[str, Any] = {}
    for bad in (False, True):
        mp = bind()
        used, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        first, second = (torch.optim.SGD([param], lr=0.5, fused=fused) for param, fused in ((used, False), (other, True)))
        mp.backward((used * 1.0).sum())
        if rank == world - 1:
            mp.backward((other * (math.inf if bad else 1.0)).sum())
        with Counted() as counted:
            results = mp.step(first, second, clip_norm=10.0)
        out[f"bad={bad}"] = gathered(
            ([each.taken for each in results], mp.scaler.get_scale(), other.tolist(), counted.calls)
        )
    mp = bind()
    param = nn.Parameter(torch.ones(2))
    mp.scaler.scale(torch.ones(()))
    out["none anywhere"] = gathered(trap(mp.step, torch.optim.SGD([param], lr=0.5)))
    mp = bind(process_group="none")
    params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    mp.backward((params[0] * (math.inf if rank else 1.0)).sum())
    with Counted() as counted:
        mp.step(torch.optim.SGD(params, lr=0.5))
    out["each for itself"] = gathered((mp.scaler.get_scale(), counted.calls))
    return out


def groups_given_and_found(rank: int, world: int) -> dict[str, Any]:
    """Halves of the ranks train models of their own: the group is found from DDP, or given."""
    halves = [dist.new_group(list(range(start, world, 2))) for start in (0, 1)]
    mine = halves[rank % 2]
    out: dict[str, Any] = {}
    for how in ("found from DDP", "given to bind", "given to grad_scaler"):
        torch.manual_seed(0)
        mp = bind(process_group=mine if how == "given to bind" else None)
        model = nn.Linear(2, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        if how == "found from DDP":
            mp.prepare(DDP(model, process_group=mine), optimizer)
        scaler = mp.grad_scaler(process_group=mine) if how == "given to grad_scaler" else mp.scaler
        moved = one_step(scaler, optimizer, model(torch.ones(1, 2)).sum() * (math.inf if rank == world - 1 else 1.0))
        out[how] = gathered((moved, scaler.get_scale()))
    out["wrong"] = trap(bind, process_group="everyone")
    return out


def diverging(rank: int, world: int) -> dict[str, Any]:
    """A run whose gradients stay non-finite ends on every rank at the same step, and says which tensors."""
    out: dict[str, Any] = {}
    for what in ("ddp", "shards", "named by the optimizer"):
        torch.manual_seed(0)
        mp = bind(2.0**10, max_consecutive_skips=3)
        if what == "ddp":
            model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1, bias=False))
            call, optimizer = mp.prepare(DDP(model), torch.optim.SGD(model.parameters(), lr=0.5))
            params = list(model.parameters())
        else:
            shards = [("a", nn.Parameter(torch.ones(2))), ("b", nn.Parameter(torch.ones(3)))]
            optimizer = torch.optim.SGD(shards if what != "shards" else [param for _, param in shards], lr=0.5)
            params = [param for _, param in shards]
        error, steps = None, 0
        for step in range(12):
            optimizer.zero_grad()
            mp.scaler.scale(torch.ones(()))
            for param in params:
                param.grad = torch.ones_like(param)
            if step >= 2 and what == "ddp":
                params[2].grad[0], params[4].grad.fill_(math.nan)  # on all ranks, as DDP leaves it
                params[2].grad[0] = math.inf
            if step >= 2 and what != "ddp" and rank == world - 1:
                params[1].grad[0] = math.nan
            try:
                mp.step(optimizer, clip_norm=1.0)
            except precision.NonFiniteGradientsError as raised:
                error, steps = raised, step
                break
        found = [] if error is None else [(t.name, t.nan, t.inf, t.size, t.rank) for t in error.tensors]
        out[what] = gathered((steps, found, [] if error is None else list(error.scales), str(error)))
    return out


def joined(rank: int, world: int) -> str:
    """``ddp.join()`` is told that it cannot be had with the agreement."""
    mp = bind()
    model = nn.Linear(2, 1)
    ddp, optimizer = mp.prepare(DDP(model), torch.optim.SGD(model.parameters(), lr=0.5))
    with ddp.join():
        mp.backward(ddp(torch.ones(1, 2)).sum())
        return trap(mp.step, optimizer)


def statistics(rank: int, world: int) -> dict[str, Any]:
    """BatchNorm's statistics, and buffers on request: an overflow on the last rank restores them on all."""
    out: dict[str, Any] = {}
    for which in ("batch_norm", "buffers", "nothing"):
        torch.manual_seed(0)
        mp = bind()
        model = Net()
        model.register_buffer("calls", torch.zeros(()))
        model.register_forward_pre_hook(lambda module, args: module.calls.add_(1) and None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ddp, optimizer = mp.prepare(DDP(model, find_unused_parameters=True), optimizer, restore_on_skip=which)
        seen = []
        for step in range(3):
            optimizer.zero_grad()
            x = batch(rank, step)
            if step == 1 and rank == world - 1:
                x[0, 0] = math.inf
            mp.backward(ddp(x).square().mean())
            mp.step(optimizer)
            norm = model.norm
            seen.append((int(norm.num_batches_tracked), float(norm.running_var.sum()), float(model.calls)))
        out[which] = gathered(seen)
    synced = nn.SyncBatchNorm.convert_sync_batchnorm(Net())
    mp, optimizer = bind(), torch.optim.SGD(synced.parameters(), lr=0.1)
    mp.prepare(synced, optimizer)
    synced.norm.running_mean.fill_(math.nan)  # its forward wants an accelerator; what is restored does not
    mp.scaler.scale(torch.ones(()))
    for param in synced.parameters():
        param.grad = torch.full_like(param, math.inf if rank == world - 1 else 1.0)
    mp.step(optimizer)
    out["sync"] = gathered((type(synced.norm).__name__, synced.norm.running_mean.tolist()))
    return out


def wrapped_too_early(rank: int, world: int) -> dict[str, Any]:
    """What cannot be mended once a model is wrapped."""
    mp = precision.bind("bfloat16", backend="torch", device="cpu")
    ddp = DDP(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
    rules = precision.bind(
        PrecisionPolicy(compute_dtype="bfloat16", rules=({"module": "0", "dtype": "float32"},)), backend="torch", device="cpu"
    )
    model = DDP(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)))
    seen: list[Any] = []
    rules.prepare(model, torch.optim.SGD(model.parameters()))
    for layer in model.module:
        layer.register_forward_hook(lambda module, args, output: seen.append(str(output.dtype)))
    with rules.autocast():
        model(torch.ones(1, 2))
    return {"cast": trap(mp.prepare, ddp, optimizer, master_weights=True), "rules": seen}
