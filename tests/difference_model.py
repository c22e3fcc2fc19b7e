"""A tiny model of two layers over packed sequences of constant difference, and its data."""

import torch
from torch import nn

VOCABULARY, ENDS = 64, (0, 30, 31, 96)  # of the documents of a sequence


class Layer(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.project = nn.Linear(width, 8 * 16), nn.Linear(4 * 16, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x, attention, dtype):
        q, k, v = self.qkv(self.norms[0](x)).to(dtype).unflatten(2, (8, 16)).split([4, 2, 2], 2)
        x = x + self.project(attention(q, k, v).to(x.dtype).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    """Two layers over sequences of constant difference, which need attention."""

    def __init__(self, width=64):
        super().__init__()
        self.text, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(ENDS[-1], width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VOCABULARY))

    def forward(self, text, positions, attention, dtype):
        x = self.text(text) + self.position(positions)
        for layer in self.layers:
            x = layer(x, attention, dtype)
        return self.head(x)


def batch_of(draw):
    """Return documents of 8 sequences: each begins anywhere, with a difference of 1 to 4."""
    documents = []
    for n in torch.tensor(ENDS).diff().tolist():
        start = torch.randint(VOCABULARY, (8, 1), generator=draw)
        speed = torch.randint(1, 5, (8, 1), generator=draw)
        documents.append((start + speed * torch.arange(n)) % VOCABULARY)
    return torch.cat(documents, 1)
