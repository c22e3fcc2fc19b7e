"""The Hopper kernels agree in random cases of `canon check`: masks, shapes, strides, scales,
methods, sinks, soft-caps and schedules.
"""

import sampling

from canon.check import draws

FUNCTIONS = (
    "attention",
    "attention_forward",
    "attention_backward",
    "ring_attention",
    "strided_attention",
    "magi_attention",
)


def test_random_cases_agree(run, monkeypatch):
    monkeypatch.setattr(draws, "WEIGHTS", {name: draws.WEIGHTS[name] for name in FUNCTIONS})
    number = 80 if sampling.ALL else 10
    words = ("canon.fast", "--backend", "gluon", "--ranks", 3, "--random", number, "--seed", 3)
    status, printed, record = run(*words)
    assert status == 0, printed.out
    verdicts = [verdict for _, _, verdict, *_ in record["runs"][0]["cases"]]
    assert len(verdicts) == number
    assert verdicts.count("agrees") > number / 2
