"""Test implementations of attention: a judge, process groups, and the cases that `canon check` runs.

    from canon.testing import agreement, oracle, orders, process_groups

Importing it needs torch only.
"""

from canon.testing.judge import Agreement, Attended, agreement, dense, oracle, orders

__all__ = ["Agreement", "Attended", "agreement", "dense", "oracle", "orders"]
