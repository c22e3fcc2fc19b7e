"""Test implementations of attention: a judge, ranks as threads and processes, and recordings of
messages.

from canon.testing import agreement, oracle, orders, process_groups
"""

from canon.testing.judge import Agreement, Attended, agreement, dense, oracle, orders

__all__ = ["Agreement", "Attended", "agreement", "dense", "oracle", "orders"]
