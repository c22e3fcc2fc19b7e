"""What several ranks do together: process groups, comparing the arguments of a call, moving tensors
between layouts.
"""
