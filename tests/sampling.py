"""Run a sample of the marked sweeps, unless CANON_CASES=all is set. The sample is the same in every
run.

@pytest.mark.sweep        so many cases that each value of each parameter comes at least once
@pytest.mark.sweep(10)    10 cases
covering(cases, values)   inside a test: so many that each of their values comes
"""

import hashlib
import os

ALL = os.environ.get("CANON_CASES") == "all"


def chosen(items):
    """Return the items without the cases of sweeps that are not in the sample."""
    if ALL:
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
    if number:
        return _shuffled(cases, lambda case: case.name)[:number]
    # the same objects in all cases
    values = lambda case: {(name, id(value)) for name, value in case.callspec.params.items()}
    return _covering(_shuffled(cases, lambda case: case.name), values)


def covering(cases, values):
    """Return so many of the cases that each of ``values(case)`` comes, in their order."""
    kept = cases if ALL else _covering(_shuffled(cases, str), values)
    return [case for case in cases if case in kept]


def _shuffled(cases, name):
    return sorted(cases, key=lambda case: hashlib.sha256(name(case).encode()).digest())


def _covering(cases, values):
    """Choose the case with the most values that none has yet, until each value has a case."""
    of, kept = {case: values(case) for case in cases}, []
    left = set().union(*of.values())
    while left:
        kept.append(max(of, key=lambda case: len(of[case] & left)))
        left -= of[kept[-1]]
    return kept
