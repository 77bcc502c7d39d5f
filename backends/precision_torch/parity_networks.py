"""The parity suite's whole networks as torch modules, and one pass through them under ``mp.autocast``.

The maths and the names are fixed in :mod:`precision.parity.networks`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from precision.parity.adapter import Array, NetworkResult, NetworkSpec
from precision.parity.networks import CHANNELS, CONTEXT, HEADS, VOCABULARY, WIDTH, network_modules
from precision_torch.dtypes import dtype_name


def _conv(fan_in: int, fan_out: int, size: int = 3, stride: int = 1, bias: bool = False) -> nn.Conv2d:
    return nn.Conv2d(fan_in, fan_out, size, stride, padding=size // 2, bias=bias)


class Stem(nn.Module):
    """Convolution, norm, relu."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = _conv(3, CHANNELS), nn.BatchNorm2d(CHANNELS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x)).relu()


class ResidualBlock(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, fan_in: int, fan_out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = _conv(fan_in, fan_out, stride=stride), nn.BatchNorm2d(fan_out)
        self.conv2, self.norm2 = _conv(fan_out, fan_out), nn.BatchNorm2d(fan_out)
        self.strided = stride == 2
        if self.strided:
            self.proj, self.projnorm = _conv(fan_in, fan_out, 1, 2), nn.BatchNorm2d(fan_out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(self.conv1(x)).relu()
        y = self.norm2(self.conv2(y))
        return (y + (self.projnorm(self.proj(x)) if self.strided else x)).relu()


class Pool(nn.Module):
    """The mean over height and width."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3))


class ResNet(nn.Module):
    """``resnet``; x NHWC."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = Stem()
        fan_in = CHANNELS
        for stage in range(4):
            fan_out = CHANNELS * 2**stage
            first = ResidualBlock(fan_in, fan_out, 2 if stage else 1)
            blocks = nn.ModuleDict({"block0": first, "block1": ResidualBlock(fan_out, fan_out, 1)})
            self.add_module(f"stage{stage}", blocks)
            fan_in = fan_out
        self.pool, self.head = Pool(), nn.Linear(fan_in, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x.permute(0, 3, 1, 2))
        for stage in (self.stage0, self.stage1, self.stage2, self.stage3):
            for block in stage.values():
                x = block(x)
        return self.head(self.pool(x))


class Embed(nn.Module):
    """Rows of a table, and the positions'."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(torch.empty(CONTEXT, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x) + self.position


class Attention(nn.Module):
    """Causal attention of some heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        return self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Two linear maps and a gelu between them."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class TransformerBlock(nn.Module):
    """Attention and mlp, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2, self.mlp = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """``transformer``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block0, self.block1 = Embed(), TransformerBlock(), TransformerBlock()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.block1(self.block0(self.embed(x)))))


class Lstm(nn.Module):
    """``lstm``: torch's cell, and a loop in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(8, 16), nn.Linear(16, 10)
        nn.init.zeros_(self.cell.bias_hh).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, c = x.new_zeros(len(x), 16), x.new_zeros(len(x), 16)
        for step in x.unbind(1):
            h, c = self.cell(step, (h, c))
        return self.head(h)


class ConvRelu(nn.Module):
    """Convolution and relu."""

    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__()
        self.conv = _conv(fan_in, fan_out, bias=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x).relu()


class UNet(nn.Module):
    """``unet``; x NHWC."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.bottom = ConvRelu(1, 8), ConvRelu(8, 16), ConvRelu(16, 32)
        self.up2, self.up1 = (nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False) for _ in range(2))
        self.dec2, self.dec1, self.head = ConvRelu(48, 16), ConvRelu(24, 8), _conv(8, 3, 1, bias=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down1 = self.down1(x.permute(0, 3, 1, 2))
        down2 = self.down2(F.max_pool2d(down1, 2))
        bottom = self.bottom(F.max_pool2d(down2, 2))
        dec2 = self.dec2(torch.cat([self.up2(bottom), down2], 1))
        dec1 = self.dec1(torch.cat([self.up1(dec2), down1], 1))
        return self.head(dec1).permute(0, 2, 3, 1)


NETWORKS: dict[str, type[nn.Module]] = {"resnet": ResNet, "transformer": Transformer, "lstm": Lstm, "unet": UNet}
_LEAVES = {"weight": "kernel", "bias": "bias"}
_NORM_LEAVES = {"weight": "scale", "bias": "offset", "running_mean": "mean", "running_var": "var"}
_CELL_LEAVES = {"weight_ih": "wx", "weight_hh": "wh", "bias_ih": "bias"}


def canonical_names(model: nn.Module) -> dict[str, str]:
    """The canonical name of each parameter and buffer that has one, by torch's."""
    found: dict[str, str] = {}
    for name, _ in (*model.named_parameters(), *model.named_buffers()):
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        if isinstance(module, nn.Embedding):
            found[name] = "embed.table"
        elif isinstance(module, Embed):
            found[name] = "position"
        else:
            norm = isinstance(module, (nn.LayerNorm, nn.BatchNorm2d))
            cell = isinstance(module, nn.LSTMCell)
            leaves = _NORM_LEAVES if norm else _CELL_LEAVES if cell else _LEAVES
            for inner in ("attention.", "mlp."):  # canonically their layers belong to the block
                path = path.replace(inner, "")
            if isinstance(model, UNet):
                path = path.removesuffix(".conv")
            if leaf in leaves:
                found[name] = f"{path}.{leaves[leaf]}"
    return found


def _to_torch(array: Array, name: str) -> Array:
    """Kernels ``(..., in, out)`` as torch has them: ``(out, in, ...)``."""
    if name.endswith((".kernel", ".wx", ".wh")):
        return np.moveaxis(array, (-1, -2), (0, 1))
    return array


def _canonical(array: Array, name: str) -> Array:
    return np.moveaxis(array, (0, 1), (-1, -2)) if name.endswith((".kernel", ".wx", ".wh")) else array


class Saved:
    """Counts the bytes of the distinct storages kept for the backward pass, but for those given and for casts of weights.

    A weight's low copy is that weight once more, of a size that does not depend on the batch.
    """

    def __init__(self, without: list[torch.Tensor]) -> None:
        self._without = {tensor.untyped_storage().data_ptr() for tensor in without}
        self._kept: dict[int, torch.UntypedStorage] = {}  # alive, so that no address is used again

    @property
    def bytes(self) -> int:
        """Bytes counted so far."""
        return sum(storage.nbytes() for storage in self._kept.values())

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """The context to run the forward pass in."""

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._without and not _is_weight(tensor):
                self._kept[storage.data_ptr()] = storage
            return tensor

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)


def _is_weight(tensor: torch.Tensor) -> bool:
    """Whether a tensor shows a parameter's values, in whatever dtype and shape."""
    node: Any = tensor.grad_fn
    while node is not None and node.name() in ("ToCopyBackward0", "TBackward0", "ViewBackward0", "TransposeBackward0"):
        node = node.next_functions[0][0]
    return hasattr(node, "variable")


def build_network(network: str, weights: Mapping[str, Array]) -> nn.Module:
    """A network with canonical weights."""
    model = NETWORKS[network]()
    tensors = dict((*model.named_parameters(), *model.named_buffers()))
    with torch.no_grad():
        for name, canonical in canonical_names(model).items():
            tensors[name].copy_(torch.from_numpy(_to_torch(weights[canonical], canonical).copy()))
    return model


def run_network(mp: Any, spec: NetworkSpec, device: str) -> NetworkResult:
    """One forward and backward pass; ``compiled`` is what ``torch.compile`` traces, without a code generator."""
    model = build_network(spec.network, spec.weights).to(device)
    mp.prepare(model)
    modules: dict[str, str] = {}
    known = network_modules(spec.network)
    for name, module in model.named_modules():
        if name in known:
            module.register_forward_hook(_record(modules, name), prepend=True)
    inputs = torch.from_numpy(spec.inputs.copy()).to(device)
    labels = torch.from_numpy(spec.labels.copy()).to(device).long()

    def loss_of(inputs: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with mp.autocast():
            out = model(inputs)
            return out, F.cross_entropy(out.flatten(0, -2), labels.flatten())

    torch._dynamo.reset()  # each run is another model, and counts as a recompilation of the same code
    run = torch.compile(loss_of, backend="eager", fullgraph=True) if spec.compiled else loss_of
    saved = Saved([*model.parameters(), *model.buffers(), inputs, labels])
    with saved.hooks():
        out, loss = run(inputs, labels)
    loss.backward()
    names = canonical_names(model)
    gradients = {names[n]: p.grad for n, p in model.named_parameters() if n in names and p.grad is not None}
    return NetworkResult(
        float(loss.detach()),
        out.detach().double().cpu().numpy(),
        {n: np.ascontiguousarray(_canonical(g.float().cpu().numpy(), n)) for n, g in gradients.items()},
        {n: dtype_name(g.dtype) for n, g in gradients.items()},
        dict(modules),
        saved.bytes,
    )


def _record(modules: dict[str, str], name: str) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        modules[name] = dtype_name((output[0] if isinstance(output, tuple) else output).dtype)

    return hook
