"""The route of a call, which both halves share: checks, calls, autograd, operators, plans made
ahead. It names no function.
"""
