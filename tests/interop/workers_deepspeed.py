"""What the tests of DeepSpeed run in processes of their own: its engine is one to a process, and chooses its device on import."""

import gc
import json
import os
import random
import warnings

ENV = {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
DICT = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True}
SMALL = {"reduce_bucket_size": 4096, "allgather_bucket_size": 4096}


def start(rank, world, port):
    """DeepSpeed in this process, on the CPU, without compiling its shared-memory operator."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    import logging

    import deepspeed
    import deepspeed.ops
    import torch
    from deepspeed.utils import logger

    torch.set_num_threads(1)
    logger.setLevel(logging.ERROR)
    gc.freeze()  # DeepSpeed collects garbage at every turn
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", verbose=False)
    return deepspeed


def toy():
    """A model whose gradients are known: the weight's is ``k`` in every element, for an input of ones."""
    import torch

    class Toy(torch.nn.Module):
        k = 1.0

        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 4, bias=False)
            torch.nn.init.zeros_(self.linear.weight)
            self.norm = torch.nn.LayerNorm(4)

        def forward(self, x):
            y = self.linear(x)
            z = self.norm(y)
            self.seen = {"linear": name(y.dtype), "norm": name(z.dtype), "softmax": name(torch.softmax(y, -1).dtype)}
            return (y.float().sum() + 0 * z.float().sum()) * self.k

    return Toy()


def name(dtype):
    return str(dtype).removeprefix("torch.")


def steps(engine, model, factors):
    """Train on ones; what each step saw and did."""
    import torch

    out = []
    for factor in factors:
        model.k = factor
        weight = model.linear.weight
        before = weight.detach().float().clone()
        loss = engine(torch.ones(1, 4, dtype=weight.dtype))
        engine.backward(loss)
        used = scale_of(engine)
        engine.step()
        update = (weight.detach().float() - before)[0, 0].item()
        out.append({"scale": used, "next": scale_of(engine, True), "update": update, "applied": engine.was_step_applied(),
                    "skipped": engine.skipped_steps, "loss": name(loss.dtype), **model.seen})  # fmt: skip
    return out


def scale_of(engine, after=False):
    optimizer = engine.optimizer
    for scaler in (engine.torch_autocast_z0_gradscaler, getattr(optimizer, "torch_autocast_gradscaler", None)):
        if scaler is not None:
            return scaler.get_scale()
    scaler = getattr(optimizer, "loss_scaler", None)
    if after and hasattr(scaler, "state"):
        return float(scaler.state.scale)
    return None if scaler is None else float(scaler.cur_scale)


def native(deepspeed, config, factors, stage=0, lr=1.0):
    """Train with DeepSpeed alone under a config."""
    import torch
    from deepspeed.runtime import torch_autocast

    torch_autocast.TORCH_AUTOCAST_INITIALIZED = (
        False  # kept for the whole process; each run here stands for one of its own
    )
    model = toy()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config={**DICT, "zero_optimization": {"stage": stage, **SMALL}, **config}
    )
    out = {"optimizer": type(engine.optimizer).__name__, "param": name(model.linear.weight.dtype),
           "communication": name(engine.communication_data_type), "steps": steps(engine, model, factors)}  # fmt: skip
    out["buckets"] = sorted(name(dtype) for dtype in getattr(engine.optimizer, "ipg_buckets", {}))
    masters = getattr(engine.optimizer, "single_partition_of_fp32_groups", None) or getattr(
        engine.optimizer, "fp32_groups_flat_partition", None
    )
    masters = masters or [group for groups in getattr(engine.optimizer, "fp32_groups", []) for group in groups]
    out["masters"] = sorted({name(m.dtype) for m in masters})
    engine.destroy()
    return out


def ours(policy, factors, stage=0, lr=1.0, config=None, keep=False, **options):
    """Train with the drop-in."""
    import torch
    from deepspeed.runtime import torch_autocast

    import precision
    from precision_torch.deepspeed_engine import initialize

    torch_autocast.TORCH_AUTOCAST_INITIALIZED = False
    model = toy()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    mp = precision.bind(policy, backend="torch", device="cpu")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine, *_ = initialize(
            mp, model, optimizer, {**DICT, "zero_optimization": {"stage": stage, **SMALL}, "gradient_clipping": 0.0, **(config or {})},
            **options,
        )  # fmt: skip
    told = [str(w.message) for w in caught if issubclass(w.category, precision.PrecisionWarning)]
    out = {"told": told, "steps": steps(engine, model, factors), "param": name(model.linear.weight.dtype)}
    if keep:
        return out, engine, model
    engine.destroy()
    return out


def failing(function, *args, **options):
    """The type's name and the text of what a call raises."""
    try:
        function(*args, **options)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def parsed(deepspeed, configs):
    """What DeepSpeed's own parser makes of configs."""
    from deepspeed.runtime.config import DeepSpeedConfig

    out = []
    for config in configs:
        found = DeepSpeedConfig({**DICT, **json.loads(json.dumps(config))})
        out.append({
            "fp16": found.float16_config.model_dump(), "bf16": found.bfloat16_config.model_dump(),
            "autocast": found.torch_autocast_enabled, "dtype": name(found.torch_autocast_dtype),
            "listed": found.torch_autocast_lower_precision_safe_modules,
            "communication": name(found.communication_data_type), "accumulate": found.grad_accum_dtype,
            "param": found.param_dtype, "clip": found.gradient_clipping, "stage": int(found.zero_optimization_stage),
        })  # fmt: skip
    return out


def trajectories(patterns):
    """Scales of DeepSpeed's scaler objects, made from an export's fields, over patterns of finite steps.

    Each pattern is (fields, stage, finite flags); a run that DeepSpeed ends gives its message in place of further scales.
    """
    import torch
    from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
    from deepspeed.runtime.precision_config import DeepSpeedFP16Config

    out = []
    for fields, stage, flags in patterns:
        config = DeepSpeedFP16Config(**fields)
        if stage == 0:
            p = torch.nn.Parameter(torch.zeros(1, dtype=torch.float16))
            scaler = FP16_UnfusedOptimizer(
                torch.optim.SGD([p], lr=1.0), dynamic_loss_scale=config.loss_scale == 0, static_loss_scale=config.loss_scale,
                dynamic_loss_args=config.dynamic_loss_scale_args(), verbose=False,
            )  # fmt: skip
            update, scale = scaler._update_scale, lambda scaler=scaler: scaler.loss_scale
        else:
            scaler = CreateLossScaler(
                torch.float16, config.loss_scale, config.loss_scale == 0, config.dynamic_loss_scale_args()
            )
            update, scale = scaler.update_scale, lambda scaler=scaler: scaler.loss_scale
        scales = [float(scale())]
        for finite in flags:
            try:
                update(not finite)
            except Exception as error:
                scales.append(str(error))
                break
            scales.append(float(scale()))
        out.append(scales)
    return out


def grown_step():
    """Updates of constant gradients by DeepSpeed's fp16 optimizer at stage 0, beside the scales before and after."""
    import torch
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

    p = torch.nn.Parameter(torch.zeros(1, dtype=torch.float16))
    args = {"init_scale": 8.0, "scale_window": 2, "delayed_shift": 1, "consecutive_hysteresis": False, "min_scale": 1}
    optimizer = FP16_UnfusedOptimizer(
        torch.optim.SGD([p], lr=1.0), dynamic_loss_scale=True, dynamic_loss_args=args, verbose=False
    )
    out, last = [], 0.0
    for _ in range(6):
        before = optimizer.loss_scale
        optimizer.backward(p.float().sum())
        optimizer.step()
        optimizer.zero_grad()
        now = optimizer.fp32_groups[0][0].item()
        out.append((before, optimizer.loss_scale, last - now))
        last = now
    return out


def adam_before_training(deepspeed):
    """Adam's step count in an engine in bfloat16 that has not trained yet, by stage of ZeRO."""
    import torch

    out = {}
    for stage in (0, 1, 2):
        model = toy()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.5)
        torch.nn.init.ones_(model.linear.weight)
        config = {**DICT, "zero_optimization": {"stage": stage, **SMALL}, "bf16": {"enabled": True}}
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        masters = [p for group in optimizer.param_groups for p in group["params"]]
        counts = [int(optimizer.state[p]["step"]) for p in masters if p in optimizer.state]
        out[stage] = max(counts, default=0), float(masters[0].flatten()[0])
        engine.destroy()
    return out


def gpt(deepspeed, policy, stage, count=4, **options):
    """Losses of a tiny GPT trained with the drop-in, and the dtypes of its parameters."""
    import torch
    from deepspeed.runtime import torch_autocast
    from transformers import GPT2Config, GPT2LMHeadModel

    import precision
    from precision_torch.deepspeed_engine import initialize

    torch_autocast.TORCH_AUTOCAST_INITIALIZED = False
    torch.manual_seed(0)
    shape = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 16, "n_positions": 8}
    model = GPT2LMHeadModel(GPT2Config(**shape, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    mp = precision.bind(policy, backend="torch", device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", precision.PrecisionWarning)
        engine, *_ = initialize(
            mp, model, optimizer, {**DICT, "zero_optimization": {"stage": stage, **SMALL}}, **options
        )
    tokens = torch.arange(8)[None] % 4
    losses = []
    for _ in range(count):
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    out = {
        "losses": losses,
        "params": sorted({name(p.dtype) for p in model.parameters()}),
        "scale": scale_of(engine, True),
    }
    engine.destroy()
    return out


def checkpoint(folder, stage):
    """The loss-scale state before saving, and after loading into another engine."""
    from precision import LossScale
    from precision.names import PRESETS
    from precision_torch.deepspeed_engine import load_loss_scale_state, loss_scale_state

    policy = PRESETS["mixed_float16"].with_(loss_scale=LossScale(mode="dynamic", initial=256.0, growth_interval=3))
    _, engine, _ = ours(policy, [0.01, 0.01, float("inf"), 0.01], stage, keep=True)
    saved = loss_scale_state(engine)
    engine.save_checkpoint(folder, tag="t", client_state={"loss_scale": saved}, exclude_frozen_parameters=False)
    engine.destroy()
    _, other, _ = ours(policy, [], stage, keep=True)
    fresh = loss_scale_state(other)
    _, client = other.load_checkpoint(folder, tag="t")
    loaded = loss_scale_state(other)
    load_loss_scale_state(other, client["loss_scale"])
    by_hand = loss_scale_state(other)
    other.destroy()
    return {"saved": saved, "fresh": fresh, "loaded": loaded, "by_hand": by_hand}


def one(rank, world, port, configs, patterns, folder):
    """All that one process does, by name."""
    import torch

    from precision import LossScale
    from precision.names import PRESETS
    from precision_torch.deepspeed_engine import initialize

    deepspeed = start(rank, world, port)
    inf, f16 = float("inf"), {"torch_autocast": {"enabled": True, "dtype": "float16"}, "gradient_clipping": 0.0}
    bf16 = {"bf16": {"enabled": True}, "gradient_clipping": 0.0}
    mixed, quick = PRESETS["mixed_float16"], LossScale(mode="dynamic", initial=4.0, growth_interval=2, maximum=16.0)
    counted = LossScale(mode="dynamic", initial=8.0, backoff_factor=0.25, hysteresis=2, max_consecutive_skips=2)
    out = {
        "parsed": parsed(deepspeed, configs),
        "trajectories": trajectories(patterns),
        "grown": grown_step(),
        "both": failing(parsed, deepspeed, [{"fp16": {"enabled": True}, "bf16": {"enabled": True}}]),
        "half power": failing(parsed, deepspeed, [{"fp16": {"enabled": True, "initial_scale_power": 15.5}}]),
        "half minimum": failing(parsed, deepspeed, [{"fp16": {"enabled": True, "min_loss_scale": 0.5}}]),
        "auto": parsed(deepspeed, [{"bf16": {"enabled": "auto"}, "torch_autocast": {"enabled": True, "dtype": "fp32"},
                                    "communication_data_type": "fp32"}])[0]["bf16"]["enabled"],
        "default clip": None, "default check": None,
    }  # fmt: skip
    from deepspeed.runtime.config import DeepSpeedConfig

    plain = DeepSpeedConfig(dict(DICT))
    out["default clip"], out["default check"] = plain.gradient_clipping, plain.bfloat16_config.check_grad_overflow
    for stage in (0, 1, 2):
        out["native f16", stage] = native(deepspeed, f16, [1.0, 1.0, 1.0], stage)
        out["native f16 clipped", stage] = native(deepspeed, {**f16, "gradient_clipping": 1.0}, [0.01], stage)
        out["ours f16", stage] = ours(mixed, [1.0, 1.0, inf, 0.01], stage)
        out["ours f16 clipped", stage] = ours(mixed, [0.01], stage, config={"gradient_clipping": 1.0})
        out["ours quick", stage] = ours(mixed.with_(loss_scale=quick), [0.01] * 8, stage)
        out["ours bf16", stage] = ours("mixed_bfloat16", [1.0, 1.0], stage)
        out["ours low bf16", stage] = ours("bfloat16", [1.0, 1.0], stage)
        out["native low bf16", stage] = native(deepspeed, bf16, [1.0, inf, 1.0], stage)
        out["counted", stage] = failing(ours, mixed.with_(loss_scale=counted), [inf] * 4, stage)
        out["check off", stage] = native(
            deepspeed, {**bf16, "bf16": {"enabled": True, "check_grad_overflow": False}}, [1.0, inf, 1.0], stage
        )
        out["gpt", stage] = {
            "bf16": gpt(deepspeed, "mixed_bfloat16", stage), "low bf16": gpt(deepspeed, "bfloat16", stage),
            "f16": gpt(deepspeed, "mixed_float16", stage), "float32": gpt(deepspeed, "float32", stage),
            "low option": gpt(deepspeed, "mixed_bfloat16", stage, low_params=True),
        }  # fmt: skip
        out["checkpoint", stage] = checkpoint(f"{folder}/{stage}", stage)
    listed = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}, "communication_data_type": "fp32"}
    none = {**listed, "torch_autocast": {**listed["torch_autocast"], "lower_precision_safe_modules": []}}
    out["listed"] = native(deepspeed, listed, [1.0], 1)["buckets"], native(deepspeed, none, [1.0], 1)["buckets"]
    out["no dtype"] = native(deepspeed, {"torch_autocast": {"enabled": True}, "gradient_clipping": 0.0}, [1.0])
    out["accumulate"] = failing(
        native,
        deepspeed,
        {**bf16, "data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"},
        [1.0],
    )
    out["fp16 mode"] = failing(native, deepspeed, {"fp16": {"enabled": True}}, [1.0])
    out["ours fp16 mode"] = failing(ours, "float16", [1.0], 1)
    out["ours fp16 option"] = failing(ours, "mixed_float16", [1.0], 1, low_params=True)
    out["strict"] = failing(ours, "bfloat16", [1.0], 0, strict=True)
    out["not scaled"] = failing(ours, mixed.with_(loss_scale=LossScale()), [1.0])

    import precision

    low = toy().bfloat16()
    mp = precision.bind("mixed_bfloat16", backend="torch", device="cpu")
    out["low model"] = failing(initialize, mp, low, torch.optim.SGD(low.parameters(), lr=1.0), dict(DICT))
    engine, *_ = deepspeed.initialize(
        model=low, optimizer=torch.optim.SGD(low.parameters(), lr=1.0), config={**DICT, **listed}
    )
    out["low model native"] = name(low.linear.weight.dtype)
    engine.destroy()
    out["adam"] = adam_before_training(deepspeed)
    from deepspeed.runtime.fp16.loss_scaler import LossScaler

    from precision_torch.deepspeed_scaler import PolicyLossScaler

    half = torch.tensor(2.0, dtype=torch.float16)
    out["half loss"] = (
        float(LossScaler(65536.0).scale_loss(half)),
        float(PolicyLossScaler(mixed.loss_scale).scale_loss(half)),
    )
    from deepspeed.runtime import torch_autocast

    torch_autocast.TORCH_AUTOCAST_INITIALIZED = True  # as after the engine above
    model = toy()
    mp = precision.bind("float32", backend="torch", device="cpu")
    out["earlier engine"] = failing(
        initialize,
        mp,
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        {**DICT, "zero_optimization": {"stage": 1, **SMALL}},
    )
    return out


def two(rank, world, port):
    """Two ranks, of which the second overflows at the second step."""
    start(rank, world, port)
    from precision.names import PRESETS

    out = {}
    for stage in (0, 1, 2):
        factors = [0.01, float("inf") if rank == 1 else 0.01, 0.01]
        found, engine, model = ours(PRESETS["mixed_float16"], factors, stage, keep=True)
        out[stage] = [(s["scale"], s["next"]) for s in found["steps"]], model.linear.weight.detach().tolist()
        engine.destroy()
    return out


def random_flags(seed, count=60):
    rng = random.Random(seed)
    risk = rng.choice([0.02, 0.1, 0.3])
    return [rng.random() >= risk for _ in range(count)]
