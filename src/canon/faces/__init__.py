"""The public functions of both halves: signatures, docstrings and defaults."""
