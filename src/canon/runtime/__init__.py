"""The machinery that both halves share: checks, calls, agreement between ranks, autograd, operators, and moves of tensors."""
