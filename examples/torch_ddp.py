"""Two processes train one model with DistributedDataParallel, survive overflows on either, and resume where they stopped.

    torchrun --nproc-per-node 2 examples/torch_ddp.py --steps 30 --folder /tmp/run
    torchrun --nproc-per-node 2 examples/torch_ddp.py --steps 60 --folder /tmp/run     # goes on from step 30

It runs on CPUs (gloo) as well as on GPUs (NCCL).
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import precision
from precision.testing import Fault, FaultPlan

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--folder", required=True, help="where the checkpoints go; both processes must see it")
args = parser.parse_args()

cuda = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if cuda else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()

policy = precision.PrecisionPolicy(
    compute_dtype="bfloat16",
    reduce_dtype="bfloat16",  # gradients travel in 16 bits
    loss_scale=precision.LossScale(mode="dynamic", initial=2.0**10, growth_interval=10, max_consecutive_skips=20),
)
mp = precision.bind(policy, backend="torch", device=device)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2)).to(device)
ddp = DistributedDataParallel(model, device_ids=[device.index] if cuda else None)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
ddp, optimizer = mp.prepare(ddp, optimizer)  # finds the group, and registers the reduce dtype's hook

checkpoints = mp.checkpoints(args.folder, keep=2)
torch.manual_seed(rank + 1)  # each rank has data of its own
restored = checkpoints.restore(ddp, optimizer)
start = 0 if restored is None else restored.step

# Something goes wrong at step 7 on the last rank only, and at step 12 on the first.
plan = FaultPlan([Fault("overflow", step=7, rank=world - 1), Fault("nan", step=12, rank=0)])
for step in range(start, args.steps):
    x = torch.randn(64, 8, device=device)
    y = (x.sum(1) > 0).long()
    optimizer.zero_grad()
    with mp.autocast():
        loss = nn.functional.cross_entropy(ddp(x), y)
    mp.backward(loss * plan.factor(step, rank))
    result = mp.step(optimizer, clip_norm=1.0)
    if not result.taken:
        print(f"rank {rank}: step {step} skipped, scale now {mp.scaler.get_scale():g}", flush=True)
    if (step + 1) % 10 == 0:
        checkpoints.save(step + 1, ddp, optimizer, extra={"seen": 64 * (step + 1)})

print(f"rank {rank}: from step {start} to {args.steps}, loss {loss.item():.3f}, {mp.scaler.state_dict()}", flush=True)
dist.destroy_process_group()
