"""What the tests of FSDP run in processes of their own."""

import os


def name(dtype):
    return str(dtype).removeprefix("torch.")


def arguments(values):
    """Keyword arguments for PyTorch: dtypes by name become dtypes."""
    import torch

    return {key: getattr(torch, value) if isinstance(value, str) else value for key, value in values.items()}


def wrap(module, config, values):
    """Shard a module with a ``mixed_precision``."""
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard

    if config["fsdp_version"] == 2:
        return fully_shard(module, mp_policy=MixedPrecisionPolicy(**arguments(values)))
    return FullyShardedDataParallel(
        module, mixed_precision=MixedPrecision(**arguments(values)), use_orig_params=True, device_id=torch.device("cpu")
    )


def mean(config):
    """The gradient that ranks with gradients 256 and 1 come to: 128.5, or 128 if they are reduced in bfloat16."""
    import torch

    layer = torch.nn.Linear(2, 1, bias=False).to(getattr(torch, config["model_dtype"]))
    layer = wrap(layer, config, config["mixed_precision"])
    layer(torch.full((1, 2), 1.0 if torch.distributed.get_rank() else 256.0)).float().sum().backward()
    grads = [p.grad for p in layer.parameters() if p.grad is not None and p.grad.numel()]
    found = torch.zeros(1)
    for grad in grads:
        local = grad.to_local() if hasattr(grad, "to_local") else grad
        if local.numel():
            found = local.detach().float().flatten()[:1].clone()
    torch.distributed.broadcast(found, 0)
    return found.item()


def model_for(config, policy):
    """A model sharded as a config says, with what its layers see recorded in ``model.seen``."""
    import torch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body = torch.nn.Linear(4, 4)
            self.norm = torch.nn.LayerNorm(4)
            self.head = torch.nn.Linear(4, 2)
            self.register_buffer("table", torch.ones(4))

        def forward(self, x):
            y = self.body(x)
            z = self.norm(y)
            seen.update(body=name(y.dtype), norm=name(z.dtype), weight=name(self.body.weight.dtype))
            seen.update(table=name(self.table.dtype), norm_weight=name(self.norm.weight.dtype))
            return self.head(z + self.table.to(z.dtype))

    seen = {}
    torch.manual_seed(0)
    model = Net().to(getattr(torch, config["model_dtype"]))
    for path, module in list(model.named_children()):
        rule = policy.rule_for(path)
        entry = next((entry for entry in config["modules"] if rule and entry["module"] == rule.module), None)
        if entry is not None:
            setattr(
                model, path, wrap(module.to(getattr(torch, entry["model_dtype"])), config, entry["mixed_precision"])
            )
    return wrap(model, config, config["mixed_precision"]), seen


def one(config, policy):
    """What a step of a model sharded by a config does."""
    import torch

    model, seen = model_for(config, policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = 2 + torch.distributed.get_rank()  # unlike batches: the reduction counts
    losses = []
    for _ in range(3):
        out = model(torch.ones(rows, 4))
        loss = (out.float() - 1.0).square().mean()
        loss.backward()
        grads = {name(p.grad.dtype) for p in model.parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {
        **seen, "output": name(out.dtype), "losses": losses, "grads": sorted(grads), "mean": mean(config),
        "stored": sorted({name(p.dtype) for p in model.parameters()}),
    }  # fmt: skip


def work(rank, world, port, cases):
    """Each (config, policy) in turn, in one process group."""
    import torch

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world)
    out = []
    for config, policy in cases:
        try:
            out.append(one(config, policy))
        except Exception as error:
            out.append(f"{type(error).__name__}: {error}")
            raise
    torch.distributed.destroy_process_group()
    return out
