"""PyTorch: a convolutional network with BatchNorm on handwritten digits, in the precision of ``precision.toml``."""

from collections import OrderedDict
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

import precision

mp = precision.bind(Path(__file__).parent / "precision.toml", backend="torch")

images, labels = load_digits(return_X_y=True)
images = torch.tensor(images / 16.0, dtype=torch.float32, device=mp.device).reshape(-1, 1, 8, 8)
labels = torch.tensor(labels, device=mp.device)
train, test = slice(0, 1500), slice(1500, None)

torch.manual_seed(0)
model = nn.Sequential(
    OrderedDict(
        conv=nn.Conv2d(1, 16, 3, padding=1, bias=False),
        norm=nn.BatchNorm2d(16),
        relu=nn.ReLU(),
        pool=nn.MaxPool2d(2),
        flat=nn.Flatten(),
        head=nn.Linear(16 * 4 * 4, 10),
    )
).to(mp.device)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, fused=True)
model, optimizer = mp.prepare(model, optimizer)  # norms in float32; logits leave in float32

for epoch in range(5):
    losses = []
    for rows in torch.randperm(1500).to(mp.device).split(50):
        optimizer.zero_grad()
        with mp.autocast():
            loss = nn.functional.cross_entropy(model(images[rows]), labels[rows])
        mp.backward(loss)  # scaled
        mp.step(optimizer, clip_norm=1.0)  # unscaled, clipped; left out if a gradient is not finite
        losses.append(loss.detach())
    print(f"epoch {epoch}: loss {torch.stack(losses).mean():.3f}, loss scale {mp.scaler.get_scale():g}")

dtypes = {}
for name, layer in model.named_children():
    layer.register_forward_hook(lambda layer, inputs, output, name=name: dtypes.update({name: output.dtype}))
model.eval()
with torch.no_grad(), mp.autocast():
    predicted = model(images[test]).argmax(-1)
print(f"accuracy {(predicted == labels[test]).float().mean():.3f}")
print(f"skipped steps {mp.scaler.state_dict()['skipped']}")
print(", ".join(f"{name}: {dtypes[name]}".replace("torch.", "") for name in ("conv", "norm", "head")))
