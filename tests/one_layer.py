"""One layer of attention between embeddings and a head, for tests of training."""

from torch import nn


class OneLayer(nn.Module):
    def __init__(self, words, tokens):
        super().__init__()
        self.token, self.position = nn.Embedding(words, 16), nn.Embedding(tokens, 16)
        self.qkv, self.head = nn.Linear(16, 48), nn.Linear(16, words)

    def hidden(self, ids, positions, attend):
        """Return the states (..., t, 16) before the head."""
        x = self.token(ids) + self.position(positions)
        q, k, v = self.qkv(x).unflatten(-1, (6, 8)).split(2, dim=-2)
        return x + attend(q, k, v).flatten(-2)
