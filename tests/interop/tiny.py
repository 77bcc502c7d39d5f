"""Models small enough to train in float16 on a CPU in a test: a GPT of one block, and a net with BatchNorm."""

import torch
from torch import nn

VOCABULARY, LENGTH, WIDTH = 7, 4, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.mlp(self.norm2(x))


class TinyGPT(nn.Module):
    """Tokens [batch, LENGTH] to logits [batch, LENGTH, VOCABULARY]."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.block = Block()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.block(self.embed(tokens)))


class NormNet(nn.Module):
    """Vectors [batch, 3] to numbers [batch, 1], through BatchNorm."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


def tokens(batches, seed=0):
    """Batches of sequences that count up, so that the next token can be learnt."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, VOCABULARY, (batches, 4, 1), generator=generator)
    return [(start + torch.arange(LENGTH + 1)) % VOCABULARY for start in starts]


def next_token_loss(model, batch):
    logits = model(batch[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


def flat(model):
    """All parameters as one float32 vector."""
    return torch.cat([param.detach().float().flatten() for param in model.parameters()])
