"""The parity suite's models in torch; the maths is fixed in :mod:`precision.parity.models`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from precision.parity.adapter import Array
from precision.parity.models import BLOCKS, HEADS, WIDTH


class Dense(nn.Module):
    """``x @ kernel + bias``, the product rounded before the bias is added; family ``matmul``."""

    def __init__(self, mp: Any, fan_in: int, fan_out: int) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.empty(fan_in, fan_out))
        self.bias = nn.Parameter(torch.empty(fan_out))
        self._affine = mp.op("matmul")(lambda x, kernel, bias: x @ kernel + bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._affine(x, self.kernel, self.bias)


class Conv(nn.Module):
    """3x3, padding 1, no bias, NCHW inside; family ``conv``. The kernel is kept in the canonical layout."""

    def __init__(self, mp: Any, fan_in: int, fan_out: int) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.empty(3, 3, fan_in, fan_out))
        self._conv = mp.op("conv")(lambda x, kernel: F.conv2d(x, kernel.permute(3, 2, 0, 1), padding=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._conv(x, self.kernel)


class Mlp(nn.Module):
    """``mlp`` of the suite."""

    def __init__(self, mp: Any) -> None:
        super().__init__()
        self.fc1, self.norm1 = Dense(mp, 64, 128), nn.LayerNorm(128)
        self.fc2, self.norm2 = Dense(mp, 128, 128), nn.LayerNorm(128)
        self.head = Dense(mp, 128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm1(self.fc1(x).relu())
        x = self.norm2(self.fc2(x).relu())
        return self.head(x)


class Cnn(nn.Module):
    """``cnn`` of the suite."""

    def __init__(self, mp: Any) -> None:
        super().__init__()
        self.conv1, self.norm1 = Conv(mp, 1, 16), nn.BatchNorm2d(16)
        self.conv2, self.norm2 = Conv(mp, 16, 32), nn.BatchNorm2d(32)
        self.head = Dense(mp, 32, 10)
        self._mean = mp.op("reduction")(lambda x: x.mean((2, 3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm1(self.conv1(x.permute(0, 3, 1, 2))).relu()
        x = self.norm2(self.conv2(F.max_pool2d(x, 2))).relu()
        return self.head(self._mean(x))


class Attention(nn.Module):
    """Two heads of 16; scores and mixing are ``matmul``, the probabilities ``softmax``."""

    def __init__(self, mp: Any, causal: bool, tokens: int, qkv: Dense, proj: Dense) -> None:
        super().__init__()
        self._qkv, self._proj = [qkv], [proj]  # in lists: they belong to the block, under the canonical names
        self._causal = torch.ones(tokens, tokens, dtype=torch.bool).tril() if causal else None
        self._scores = mp.op("matmul")(lambda q, k: (q @ k.transpose(-1, -2).contiguous()) * 0.25)
        self._softmax = mp.op("softmax")(lambda s: s.softmax(-1))
        self._mix = mp.op("matmul")(lambda p, v: p @ v)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        q, k, v = (
            part.view(batch, tokens, HEADS, width // HEADS).transpose(1, 2) for part in self._qkv[0](x).chunk(3, -1)
        )
        scores = self._scores(q, k)
        if self._causal is not None:
            scores = torch.where(self._causal, scores, torch.tensor(-30000.0, dtype=scores.dtype))
        mixed = self._mix(self._softmax(scores), v)
        return self._proj[0](mixed.transpose(1, 2).reshape(batch, tokens, width))


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, mp: Any, causal: bool, tokens: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = Dense(mp, WIDTH, 3 * WIDTH), Dense(mp, WIDTH, WIDTH)
        self.fc1, self.fc2 = Dense(mp, WIDTH, 2 * WIDTH), Dense(mp, 2 * WIDTH, WIDTH)
        self._attention = [Attention(mp, causal, tokens, self.qkv, self.proj)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self._attention[0](self.norm1(x))
        return x + self.fc2(self.fc1(self.norm2(x)).relu())


class Table(nn.Module):
    """An embedding table, used as it is."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(rows, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.embedding(x.long(), self.table)


class Transformer(nn.Module):
    """``transformer`` and ``chars`` of the suite."""

    def __init__(self, mp: Any, model: str, weights: dict[str, Array]) -> None:
        super().__init__()
        self.chars = model == "chars"
        tokens = len(weights["position"])
        self.embed = Table(*weights["embed.table"].shape) if self.chars else Dense(mp, 8, WIDTH)
        self.position = nn.Parameter(torch.empty(tokens, WIDTH))
        for i in range(BLOCKS[model]):
            self.add_module(f"block{i}", Block(mp, self.chars, tokens))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = Dense(mp, WIDTH, len(weights["head.bias"]))
        self._mean = mp.op("reduction")(lambda x: x.mean(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) + self.position
        for name, block in self.named_children():
            if name.startswith("block"):
                x = block(x)
        x = self.norm(x)
        return self.head(x if self.chars else self._mean(x))


def build(mp: Any, model: str, weights: dict[str, Array]) -> nn.Module:
    """A model of the suite with the given weights."""
    kinds: dict[str, Any] = {"mlp": Mlp, "cnn": Cnn}
    module: nn.Module = kinds[model](mp) if model in kinds else Transformer(mp, model, weights)
    load(module, weights)
    return module


_TORCH_NAMES = {"scale": "weight", "offset": "bias", "mean": "running_mean", "var": "running_var"}


def torch_name(name: str) -> str:
    """The torch name of a canonical weight."""
    module, _, leaf = name.rpartition(".")
    leaf = _TORCH_NAMES.get(leaf, leaf)
    return f"{module}.{leaf}" if module else leaf


@torch.no_grad()
def load(module: nn.Module, weights: dict[str, Array]) -> None:
    """Put canonical weights into a model."""
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, value in weights.items():
        own[torch_name(name)].copy_(torch.from_numpy(np.ascontiguousarray(value)))


def dump(module: nn.Module, names: list[str]) -> dict[str, Array]:
    """Take canonical weights out of a model, as float32."""
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: own[torch_name(name)].detach().float().cpu().numpy().copy() for name in names}
