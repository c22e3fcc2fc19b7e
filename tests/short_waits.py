"""Let the ranks of a test wait a part of the usual time before they name a missing rank."""

from canon.ranks import agreement

# 5, 1 and 3 seconds in the package
SETTINGS = {"ANSWER_SECONDS": 1.0, "POLL_SECONDS": 0.1, "REPORT_SECONDS": 0.3}


def shorten_waits():
    """Set the waits of this process, which is a rank. It ends with the test."""
    assert all(getattr(agreement, name) > seconds for name, seconds in SETTINGS.items())
    vars(agreement).update(SETTINGS)
