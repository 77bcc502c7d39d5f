"""PyTorch: a training step hand-written with ``torch.amp``, and the same step through precision.

Both compute in bfloat16 under autocast from float32 weights, keep norm layers in float32, and scale the loss dynamically.
The hand-written step lets a skipped step change BatchNorm's statistics; ours restores them, within the time measured.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from case import Case
from torch import nn

import precision

POLICY = precision.PrecisionPolicy(compute_dtype="bfloat16", loss_scale=precision.LossScale(mode="dynamic"))
BATCH = 64


class Block(nn.Module):
    """Pre-norm transformer block of width 64 with 4 heads."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*qkv).transpose(1, 2).reshape(batch, tokens, width)
        x = x + self.proj(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Mean(nn.Module):
    """Mean over the tokens."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1)


def mlp() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(
        nn.Linear(64, 512), nn.LayerNorm(512), nn.ReLU(), nn.Linear(512, 512), nn.LayerNorm(512), nn.ReLU(), nn.Linear(512, 10)
    ), torch.randn(BATCH, 64)  # fmt: skip


def cnn() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, stride=2, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    ), torch.randn(BATCH, 3, 16, 16)  # fmt: skip


def transformer() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(Block(), Block(), nn.LayerNorm(64), Mean(), nn.Linear(64, 10)), torch.randn(BATCH // 2, 16, 64)


class Float32Norm(nn.Module):
    """What one writes by hand to keep a norm in float32 whatever the autocast."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.float())


def by_hand(module: nn.Module) -> nn.Module:
    """The model with its norms wrapped."""
    for name, child in module.named_children():
        if isinstance(child, (nn.LayerNorm, nn.BatchNorm2d)):
            setattr(module, name, Float32Norm(child))
        else:
            by_hand(child)
    return module


def native_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor
) -> Callable[[], object]:
    scaler = torch.amp.GradScaler("cpu")

    def step() -> object:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x).float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    return step


def precision_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor
) -> Callable[[], object]:
    mp = precision.bind(POLICY, backend="torch", device="cpu")
    mp.prepare(model, optimizer)

    def step() -> object:
        optimizer.zero_grad()
        with mp.autocast():
            loss = F.cross_entropy(model(x), y)
        mp.backward(loss)
        mp.step(optimizer)
        return loss

    return step


def cases() -> Iterator[Case]:
    """The three model kinds; plain SGD (which reads the flag on the host) and fused AdamW (which does not) both occur."""
    optimizers: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "mlp": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
        "cnn": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
        "transformer": lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
    }
    for make in (mlp, cnn, transformer):
        torch.manual_seed(0)
        model, x = make()
        y = torch.randint(0, 10, (len(x),))
        hand = by_hand(copy.deepcopy(model))
        build = optimizers[make.__name__]
        yield Case(
            make.__name__,
            native_step(hand, build(hand.parameters()), x, y),
            precision_step(model, build(model.parameters()), x, y),
        )
