"""What shows that an implementation is right: the judge, the worlds, and the cases that `canon check` runs.

    from canon.testing import agreement, oracle, orders, process_groups

Needs torch alone.
"""

from canon.testing.judge import Agreement, Attended, agreement, dense, oracle, orders

__all__ = ["Agreement", "Attended", "agreement", "dense", "oracle", "orders"]
