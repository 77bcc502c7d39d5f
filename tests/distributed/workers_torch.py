"""What the ranks of PyTorch's tests run: each function ``(rank, world, port, ...)`` returns plain values to be asserted on.

One launch does many things, since starting PyTorch takes longer than any of them.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import pickle
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


_NEED_A_FOLDER = ("resharding", "bad_checkpoints", "resumed_on_four")

# ---- every check is a function of the rank; those of a launch run one after the other ----------------------------------


def run_checks(rank: int, world: int, port: int, names: list[str], folder: str = "") -> dict[str, Any]:
    """Run checks by name; an exception is a result like any other, for the test of that check to fail on."""
    results: dict[str, Any] = {}
    with group(rank, world, port):
        for name in names:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                results[name] = globals()[name](rank, world, *([folder] if name in _NEED_A_FOLDER else []))
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
        self.dtypes: list[str] = []
        self._kept = {name: getattr(dist, name) for name in self.names}
        for name, native in self._kept.items():
            setattr(dist, name, functools.partial(self._call, name, native))
        return self

    def _call(self, name, native, *args, **kwargs):
        tensor = args[0] if args and isinstance(args[0], torch.Tensor) else None
        self.calls.append((name, 0 if tensor is None else tensor.numel()))
        self.dtypes.append("" if tensor is None else str(tensor.dtype).removeprefix("torch."))
        return native(*args, **kwargs)

    def __exit__(self, *_):
        for name, native in self._kept.items():
            setattr(dist, name, native)


class Net(nn.Module):
    """Two layers with BatchNorm between them, and one that is only used if asked for."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second, self.spare = (
            nn.Linear(3, 4, bias=False),
            nn.BatchNorm1d(4),
            nn.Linear(4, 2),
            nn.Linear(2, 2),
        )

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
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    for name in ("native", "ours"):  # one rank's gradient is beyond float16, their mean is not
        ddp = DDP(nn.Linear(1, 1, bias=False))
        if name == "native":
            ddp.register_comm_hook(None, fp16_compress_hook)
        else:
            bind(reduce_dtype="float16").register_comm_hook(ddp)
        ddp(torch.full((1, 1), 98304.0 if rank else 0.0)).sum().backward()
        out[f"mean in float16, {name}"] = gathered(ddp.module.weight.grad.item())
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
        first, second = (
            torch.optim.SGD([param], lr=0.5, fused=fused) for param, fused in ((used, False), (other, True))
        )
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
        ddp = DDP(model, process_group=mine)
        if how == "found from DDP":
            mp.prepare(ddp, optimizer)
        scaler = mp.grad_scaler(process_group=mine) if how == "given to grad_scaler" else mp.scaler
        moved = one_step(scaler, optimizer, model(torch.ones(1, 2)).sum() * (math.inf if rank == world - 1 else 1.0))
        out[how] = gathered((moved, scaler.get_scale()))
    out["wrong"] = trap(bind, process_group="everyone")
    out["pickled"] = trap(pickle.dumps, bind(process_group=mine).scaler)
    out["copied"] = repr(copy.deepcopy(bind(process_group="none").scaler)._group)
    return out


def diverging(rank: int, world: int) -> dict[str, Any]:
    """A run whose gradients stay non-finite ends on every rank at the same step, and says which tensors."""
    out: dict[str, Any] = {}
    for what in ("ddp", "shards", "named by the optimizer"):
        torch.manual_seed(0)
        mp = bind(2.0**10, max_consecutive_skips=3)
        if what == "ddp":
            model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1, bias=False))
            ddp = DDP(model)  # kept: the agreement is over its group
            ddp, optimizer = mp.prepare(ddp, torch.optim.SGD(model.parameters(), lr=0.5))
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


def host_reads(rank: int, world: int) -> dict[str, int]:
    """How often the host reads a value in three steps in DDP, besides what gloo itself waits for."""
    from tests.torch.helpers import HostReads

    out: dict[str, int] = {}
    for name in ("native", "ours"):
        for fused in (False, True):
            torch.manual_seed(0)
            mp = bind()
            model = Net()
            ddp = DDP(model, find_unused_parameters=True)
            ddp, optimizer = mp.prepare(ddp, torch.optim.SGD(model.parameters(), lr=0.1, fused=fused))
            scaler = torch.amp.GradScaler("cpu") if name == "native" else mp.scaler
            with HostReads() as reads:
                for step in range(3):
                    optimizer.zero_grad()
                    scaler.scale(ddp(batch(rank, step)).square().mean()).backward()
                    scaler.step(optimizer)
                    scaler.update()
            out[f"{name} fused={fused}"] = reads.count
    return out


def dtensor_loss(rank: int, world: int) -> list[Any]:
    """A loss that is a ``DTensor`` itself, as with loss parallel."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = init_device_mesh("cpu", (world,))
    mp = bind()
    param = nn.Parameter(DTensor.from_local(torch.ones(2), mesh, (Shard(0),), run_check=False))
    inputs = DTensor.from_local(torch.full((2 * world,), 3.0), mesh, (Replicate(),), run_check=False)
    optimizer = torch.optim.SGD([param], lr=0.5)
    mp.backward((param * inputs).sum())
    return gathered((mp.step(optimizer, clip_value=2.0).taken, _local(param).tolist()))


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
        PrecisionPolicy(compute_dtype="bfloat16", rules=({"module": "0", "dtype": "float32"},)),
        backend="torch",
        device="cpu",
    )
    model = DDP(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)))
    seen: list[Any] = []
    rules.prepare(model, torch.optim.SGD(model.parameters()))
    for layer in model.module:
        layer.register_forward_hook(lambda module, args, output: seen.append(str(output.dtype)))
    with rules.autocast():
        model(torch.ones(1, 2))
    return {"cast": trap(mp.prepare, ddp, optimizer, master_weights=True), "rules": seen}


def masters_in_ddp(rank: int, world: int) -> dict[str, Any]:
    """Low parameters with masters under DDP: what the hook adds up in, if there is one, and what the masters come to."""
    out: dict[str, Any] = {}
    for dtype in ("float32", "bfloat16"):
        policy = PrecisionPolicy(param_dtype="bfloat16", compute_dtype="bfloat16", reduce_dtype=dtype)
        mp = precision.bind(policy, backend="torch", device="cpu")
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        model, optimizer = mp.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), master_weights=True)
        ddp, optimizer = mp.prepare(DDP(model), optimizer, master_weights=True)
        for _ in range(2):
            optimizer.zero_grad()
            with mp.autocast():
                loss = ddp(torch.full((1, 1), 1.0 if rank else 256.0)).sum()
            with Counted() as counted:
                mp.backward(loss)
            mp.step(optimizer)
        master = optimizer.param_groups[0]["params"][0]
        out[dtype] = gathered((counted.dtypes, master.item(), model.weight.item(), str(master.dtype)))
    return out


class Block(nn.Module):
    """A residual block with a norm."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class Stack(nn.Module):
    """Two blocks, a norm and a head; with a buffer that nobody casts."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 3)
        self.register_buffer("table", torch.ones(8))

    def forward(self, x):
        x = x * self.table
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def inputs(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def full_weights(model: nn.Module) -> list[float]:
    """All parameters, gathered."""
    parts = [param.full_tensor() if hasattr(param, "full_tensor") else param for param in model.parameters()]
    return torch.cat([part.detach().flatten() for part in parts]).tolist()


def fsdp2_dtypes(rank: int, world: int) -> dict[str, Any]:
    """What runs, is gathered, reduced and leaves in which dtype."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (world,))
    out: dict[str, Any] = {}
    rules = ({"module": "head", "dtype": "float32"},)
    for how in ("compute float32", "mixed", "mixed, autocast", "mixed, reduce bfloat16", "rules"):
        torch.manual_seed(0)
        low = "float32" if how == "compute float32" else "bfloat16"
        reduce = "bfloat16" if how.endswith("reduce bfloat16") else "float32"
        mp = bind(compute_dtype=low, reduce_dtype=reduce, rules=rules if how == "rules" else ())
        model = Stack()
        mp.fully_shard(model, model.blocks, mesh=mesh)
        model, optimizer = mp.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01))
        seen: dict[str, tuple[str, ...]] = {}
        for name, module in model.named_modules():
            if isinstance(module, (nn.Linear, nn.LayerNorm)):
                module.register_forward_hook(functools.partial(_note, seen, name))
        with mp.autocast() if how.endswith("autocast") else contextlib.nullcontext():
            result = model(inputs(rank, 0))
        mp.backward(result.square().mean())
        stored = {str(param.dtype) for param in model.parameters()} | {str(p.grad.dtype) for p in model.parameters()}
        out[how] = {
            "modules": seen, "result": str(result.dtype), "stored": sorted(stored), "buffer": str(model.table.dtype),
            "taken": mp.step(optimizer).taken,
        }  # fmt: skip
    policy = bind(compute_dtype="bfloat16").fsdp_policy(root=True)
    out["policy"] = tuple(
        map(str, (policy.param_dtype, policy.reduce_dtype, policy.output_dtype, policy.cast_forward_inputs))
    )
    out["inner policy"] = str(bind(compute_dtype="bfloat16").fsdp_policy(cast_forward_inputs=False))
    out["low parameters"] = trap(precision.bind("bfloat16", backend="torch", device="cpu").fsdp_policy)
    unchecked = PrecisionPolicy(compute_dtype="bfloat16", reduce_dtype="float16")
    out["unchecked"] = trap(precision.bind(unchecked, backend="torch", device="cpu").fsdp_policy)
    mp = bind(compute_dtype="bfloat16")
    out["own policy"] = trap(mp.fully_shard, Stack(), mp_policy=policy)
    out["foreign unit"] = trap(mp.fully_shard, Stack(), [nn.Linear(1, 1)])
    model = mp.fully_shard(Stack(), mesh=mesh)
    out["twice"] = trap(mp.fully_shard, model)
    low = fully_shard(nn.Linear(2, 2).bfloat16(), mesh=mesh)
    adam = torch.optim.Adam(low.parameters())
    masters = precision.bind("bfloat16", backend="torch", device="cpu")
    out["masters"] = trap(masters.prepare, low, adam, master_weights=True)
    other = fully_shard(nn.Linear(2, 2), mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mp.prepare(other, torch.optim.Adam(other.parameters()))
    out["another reduce dtype"] = [str(w.message) for w in caught]
    return out


def _note(seen, name, module, args, output):
    seen[name] = tuple(str(tensor.dtype).removeprefix("torch.") for tensor in (args[0], module.weight, output))


def fsdp2_training(rank: int, world: int) -> dict[str, Any]:
    """FSDP2 through overflows on one rank's shard: fused, unfused; clipped natively and by mp.step; 1-D and 2-D meshes."""
    from torch.distributed.device_mesh import init_device_mesh

    out: dict[str, Any] = {}
    steps, bad_step = 4, 1
    meshes = {
        "1d": init_device_mesh("cpu", (world,)),
        "2d": init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicas", "shards")),
    }
    for kind, mesh in meshes.items():
        for fused in (False, True):
            for clipping in ("native", "ours"):
                torch.manual_seed(0)
                mp = bind()
                model = Stack()
                mp.fully_shard(model, model.blocks, mesh=mesh)
                model, optimizer = mp.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01, fused=fused))
                taken = []
                for step in range(steps):
                    optimizer.zero_grad()
                    mp.backward(model(inputs(rank, step)).square().mean())
                    if step == bad_step and rank == world - 1:
                        shard = model.head.weight.grad._local_tensor
                        (shard if shard.numel() else model.blocks[0].up.weight.grad._local_tensor).fill_(math.nan)
                    if clipping == "native":
                        mp.scaler.unscale_(optimizer)
                        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                        taken.append(mp.step(optimizer).taken)
                    else:
                        with Counted() as counted:
                            taken.append(mp.step(optimizer, clip_norm=0.1).taken)
                calls = [call for call in counted.calls if call[0] == "all_reduce"] if clipping == "ours" else []
                out[f"{kind} fused={fused} {clipping}"] = {
                    "taken": gathered(taken), "scale": gathered(mp.scaler.get_scale()),
                    "weights": gathered(full_weights(model))[0], "collectives": len(calls),
                }  # fmt: skip
    torch.manual_seed(0)
    model = Stack()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(steps):
        if step == bad_step:
            continue
        optimizer.zero_grad()
        for other in range(world):
            (model(inputs(other, step)).square().mean() / world).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    out["reference"] = full_weights(model)
    return out


def tensor_parallel(rank: int, world: int) -> dict[str, Any]:
    """Tensor parallel over one dimension of a mesh and FSDP2 over the other, with plain parameters left over."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
    out: dict[str, Any] = {}
    for how in ("tp", "tp and fsdp"):
        for bad in (None, "up", "norm"):
            torch.manual_seed(0)
            mp = bind()
            model = Stack()
            for block in model.blocks:
                parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            if how == "tp and fsdp":
                fully_shard(model, mesh=mesh["dp"], mp_policy=mp.fsdp_policy(root=True))
            model, optimizer = mp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, foreach=False))
            # tensor parallel alone computes the same on every rank of "tp", from the same batch
            mp.backward(model(inputs(mesh.get_local_rank("dp") if how != "tp" else 0, 0)).square().mean())
            if bad is not None and rank == world - 1:
                grad = {"up": model.blocks[1].up.weight, "norm": model.norm.weight}[bad].grad
                (grad._local_tensor if hasattr(grad, "_local_tensor") else grad).fill_(math.inf)
            result = mp.step(optimizer, clip_norm=0.05)
            out[f"{how}, bad={bad}"] = gathered((result.taken, mp.scaler.get_scale(), full_weights(model)))
    torch.manual_seed(0)
    for how, batches in (("tp", [0]), ("tp and fsdp", [0, 1])):
        torch.manual_seed(0)
        model = Stack()
        for other in batches:
            (model(inputs(other, 0)).square().mean() / len(batches)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        out[f"{how}, reference"] = full_weights(model)
    return out


# ---- saving and resuming -------------------------------------------------------------------------------------------------


class Small(nn.Module):
    """A little of everything: BatchNorm, dropout (the random generators), a buffer."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.drop, self.last = (
            nn.Linear(8, 8),
            nn.BatchNorm1d(8),
            nn.Dropout(0.2),
            nn.Linear(8, 4),
        )

    def forward(self, x):
        return self.last(self.drop(self.norm(self.first(x)).relu()))


def engine(how: str, rank: int, world: int, seed: int = 0) -> tuple[Any, nn.Module, Any, Any]:
    """``(mp, model, what to call, optimizer)`` of an engine: alone, ddp, fsdp2 or masters (low parameters)."""
    torch.manual_seed(seed)
    if how == "masters":
        policy = PrecisionPolicy(
            param_dtype="bfloat16", compute_dtype="bfloat16", loss_scale=LossScale(mode="dynamic", initial=8.0)
        )
        mp = precision.bind(policy, backend="torch", device="cpu")
    else:
        mp = bind(growth_interval=2, hysteresis=2)
    model = Small()
    call: Any = model
    if how.startswith("ddp"):
        call = DDP(model, find_unused_parameters=how == "ddp, buckets as they are")
    elif how == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh

        mp.fully_shard(model, [model.first], mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(
        [{"params": [*model.first.parameters(), *model.norm.parameters()]}, {"params": list(model.last.parameters()), "lr": 0.02}],
        lr=0.01, betas=(0.8, 0.95), fused=how.startswith("ddp"),
    )  # fmt: skip
    call, optimizer = mp.prepare(call, optimizer, master_weights=True if how == "masters" else None)
    return mp, model, call, optimizer


def train_on(mp, call, optimizer, rank: int, start: int, stop: int, plan: FaultPlan, after=lambda step: None) -> None:
    """Steps from ``start`` up to ``stop``, with dropout from the process's generator."""
    for step in range(start, stop):
        plan.wait(step, rank)
        optimizer.zero_grad()
        with mp.autocast():
            loss = call(torch.randn(4, 8)).square().mean()
        mp.backward(loss * plan.factor(step, rank))
        mp.step(optimizer, clip_norm=1.0)
        after(step)


def everything(mp, model, optimizer) -> dict[str, Any]:
    """Weights, buffers, optimizer state and loss-scale state, bit for bit."""
    tensors = {name: _local(value) for name, value in model.state_dict().items()}
    for i, param in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        tensors[f"param {i}"] = _local(param)
        tensors |= {f"state {i} {key}": _local(value) for key, value in optimizer.state[param].items()}
    bits = {name: value.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name, value in tensors.items()}
    return {"bits": bits, "scale": mp.scaler.state_dict(), "random": torch.get_rng_state().numpy().tobytes()}


def resharding(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Saved by this many ranks under several engines, loaded at once into others."""
    out: dict[str, Any] = {}
    plan = FaultPlan.from_finite([[True] * world, [True, False] + [True] * (world - 2)])
    for how in ("ddp", "fsdp2"):
        mp, model, call, optimizer = engine(how, rank, world)
        torch.manual_seed(10 + rank)
        train_on(mp, call, optimizer, rank, 0, 3, plan)
        checkpoints = mp.checkpoints(f"{folder}/{how}-{world}")
        checkpoints.save(3, model, optimizer, extra={"batch": 3})
        saved = full_weights(model), moments(optimizer), mp.scaler.state_dict(), float(model.norm.running_mean.sum())
        other = {"ddp": "fsdp2", "fsdp2": "ddp"}[how]
        for again in (how, other):
            mp, model, call, optimizer = engine(again, rank, world, seed=99)
            restored = checkpoints_of(mp, checkpoints).restore(call, optimizer)
            now = full_weights(model), moments(optimizer), mp.scaler.state_dict(), float(model.norm.running_mean.sum())
            out[f"{how} to {again}"] = gathered((tuple(restored), now == saved))
        out[f"{how} saved"] = saved
    return out


def checkpoints_of(mp, other):
    return mp.checkpoints(other.store.directory)


def moments(optimizer) -> list[float]:
    """The optimizer's state, gathered."""
    parts = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            for _, value in sorted(optimizer.state[param].items()):
                full = value.full_tensor() if hasattr(value, "full_tensor") else value
                parts.append(full.detach().flatten())
    return torch.cat(parts).tolist()


def loading(rank: int, world: int, port: int, folder: str, saved: list[str], engines: list[str]) -> dict[str, Any]:
    """What another number of ranks (one without a process group) gets from checkpoints; then it trains and saves in turn."""
    out: dict[str, Any] = {}
    with contextlib.nullcontext() if world == 1 else group(rank, world, port):
        for how in saved:
            for again in engines:
                mp, model, call, optimizer = engine(again, rank, world, seed=99)
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    restored = mp.checkpoints(f"{folder}/{how}").restore(call, optimizer)
                now = (
                    full_weights(model),
                    moments(optimizer),
                    mp.scaler.state_dict(),
                    float(model.norm.running_mean.sum()),
                )
                told = [str(w.message) for w in caught if w.category is precision.PrecisionWarning]
                train_on(mp, call, optimizer, rank, 3, 4, FaultPlan())
                out[f"{how} to {again}"] = (tuple(restored), now, told, bool(mp.scaler.state_dict()["skipped"] == 1))
        mp.checkpoints(f"{folder}/{again}-{world}").save(4, call, optimizer)
        out["saved"] = (
            full_weights(model),
            moments(optimizer),
            mp.scaler.state_dict(),
            float(model.norm.running_mean.sum()),
        )
    return out


def bad_checkpoints(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Errors are on all ranks, and change nothing."""
    from pathlib import Path

    out: dict[str, Any] = {}
    mp, model, call, optimizer = engine("ddp", rank, world)
    train_on(mp, call, optimizer, rank, 0, 1, FaultPlan())
    checkpoints = mp.checkpoints(f"{folder}/bad")
    out["none"] = gathered(checkpoints.restore(call, optimizer))
    out["none of that step"] = gathered(trap(checkpoints.restore, call, optimizer, step=7))
    checkpoints.save(1, call, optimizer)
    out["not JSON"] = gathered(trap(checkpoints.save, 2, call, optimizer, extra={1, 2}))
    out["one rank fails"] = gathered(trap(checkpoints.save, 2, call if rank else "a model", optimizer))
    other = nn.Linear(8, 4)
    before = everything(mp, model, optimizer)
    out["another model"] = gathered(trap(checkpoints.restore, other, torch.optim.AdamW(other.parameters())))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    out["another optimizer"] = gathered(trap(checkpoints.restore, call, sgd))
    ungrouped = torch.optim.AdamW(model.parameters())
    out["other groups"] = gathered(trap(checkpoints.restore, call, ungrouped))
    out["several"] = gathered(trap(checkpoints.restore, call, [optimizer, sgd]))
    narrow = bind(maximum=4.0, initial=2.0)
    out["scale out of bounds"] = gathered(trap(narrow.checkpoints(f"{folder}/bad").restore, call, optimizer))
    dist.barrier()
    part = next(Path(folder, "bad", "step-00000001").glob("*.distcp"))
    if rank == 0:
        kept = part.read_bytes()
        part.write_bytes(kept[: len(kept) // 2])
    dist.barrier()
    out["truncated"] = gathered(trap(checkpoints.restore, call, optimizer))
    dist.barrier()
    if rank == 0:
        part.write_bytes(kept)
    out["unchanged"] = gathered(everything(mp, model, optimizer) == before)
    dist.barrier()
    out["mended"] = gathered(tuple(checkpoints.restore(call, optimizer)))
    return out


def resumed_on_four(rank: int, world: int, folder: str) -> dict[str, list[bool]]:
    """Whether a run that is put back to an earlier step comes to the same bits, on more than two ranks."""
    out: dict[str, list[bool]] = {}
    for how in ("fsdp2", "ddp, buckets as they are"):
        mp, model, call, optimizer = engine(how, rank, world)
        torch.manual_seed(rank)
        checkpoints = mp.checkpoints(f"{folder}/four-{how[:4]}")
        train_on(mp, call, optimizer, rank, 0, 3, FaultPlan())
        checkpoints.save(3, call, optimizer)
        train_on(mp, call, optimizer, rank, 3, 6, FaultPlan())
        first = everything(mp, model, optimizer)
        mp, model, call, optimizer = engine(how, rank, world, seed=5)
        checkpoints_of(mp, checkpoints).restore(call, optimizer)
        train_on(mp, call, optimizer, rank, 3, 6, FaultPlan())
        out[how] = gathered(everything(mp, model, optimizer) == first)
    return out
