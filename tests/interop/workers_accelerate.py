"""What the tests of Accelerate run in processes of their own."""

import os

ENV = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}


def work(rank, world, port):
    """Three steps of two ranks, of which the second overflows at the second step; and what is refused."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import torch
    from accelerate.state import AcceleratorState

    from precision.errors import UnsupportedError
    from precision.names import PRESETS
    from precision_torch.accelerate_policy import PrecisionAccelerator

    def weight():
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        return model, torch.optim.SGD(model.parameters(), lr=0.25)

    def refused(policy, **options):
        AcceleratorState._reset_state(False)
        try:
            PrecisionAccelerator(policy, cpu=True, **options).prepare(*weight())
        except UnsupportedError as error:
            return str(error)

    policy = PRESETS["mixed_float16"].with_(loss_scale={"mode": "dynamic", "initial": 8.0})
    accelerator = PrecisionAccelerator(policy, cpu=True)
    model, optimizer = accelerator.prepare(*weight())
    steps = []
    for step in range(3):
        bad = step == 1 and rank == 1
        accelerator.backward(model(torch.full((1, 1), float("inf") if bad else 1.0 + rank)).sum())
        accelerator.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad()
        value = next(model.parameters()).item()
        steps.append((accelerator.optimizer_step_was_skipped, accelerator.scaler.get_scale(), value))
    told = {
        "steps": steps,
        "reduce": refused(policy.with_(reduce_dtype="float16")),
        "masters": refused("bfloat16", master_weights=True),
    }
    torch.distributed.destroy_process_group()
    return told
