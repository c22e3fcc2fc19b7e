"""Run a sample of the marked sweeps, unless CANON_CASES=all is set. The sample is the same in every
run.

@pytest.mark.sweep        so many cases that each value of each parameter comes at least once
@pytest.mark.sweep(10)    10 cases
"""

import hashlib
import os


def chosen(items):
    """Return the items without the cases of sweeps that are not in the sample."""
    if os.environ.get("CANON_CASES") == "all":
        return items
    sweeps, left_out = {}, set()
    for item in items:
        if item.get_closest_marker("sweep") and hasattr(item, "callspec"):
            sweeps.setdefault((item.path, item.originalname), []).append(item)
    for cases in sweeps.values():
        left_out |= set(cases) - set(sample(cases, *cases[0].get_closest_marker("sweep").args))
    return [item for item in items if item not in left_out]


def sample(cases, number=0):
    """Return ``number`` of the cases, chosen by the digest of their names. For 0, each value of
    each parameter comes once.
    """
    kept, seen = [], set()
    for case in sorted(cases, key=lambda case: hashlib.sha256(case.name.encode()).digest()):
        # the same objects in all cases
        values = {(name, id(value)) for name, value in case.callspec.params.items()}
        if len(kept) < number if number else not values <= seen:
            kept.append(case)
            seen |= values
    return kept
