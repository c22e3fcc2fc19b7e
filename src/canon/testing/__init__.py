"""Test implementations of attention: a judge, and ranks as threads and processes.

from canon.testing import agreement, oracle, orders, process_groups
"""

from canon.testing.judge import Agreement, Attended, agreement, dense, oracle, orders

__all__ = ["Agreement", "Attended", "agreement", "dense", "oracle", "orders"]
