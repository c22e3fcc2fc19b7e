"""Claims about the experiment of detection: each test finds a gross fault and passes honest code,
the worst token needs the judge, and the record is of the faults as they are.
"""

import json

import detection
import pytest
import torch
from folders import DATA
from planted_faults import FAULTS, with_fault

from canon import reference

RECORD = DATA / "detection_cpu.json"


@pytest.fixture(scope="module")
def suite():
    return detection.Suite("float32", "normal", 0)


def test_no_test_finds_a_fault_in_the_reference(suite):
    row = suite.run(reference)
    assert row["found"] == dict.fromkeys(detection.TESTS, False)
    assert not row["changed"]
    assert row["size"] < 1e-6


def test_every_test_finds_a_dropped_hop_and_only_the_ring_changes(suite):
    row = suite.run(with_fault(*FAULTS["a hop is dropped"][1:]))
    assert row["found"] == dict.fromkeys(detection.TESTS, True)
    assert set(row["changed"]) == {"ring"}


def test_a_small_fault_passes_the_wide_tolerance_alone(suite):
    row = suite.run(with_fault(*detection.GRADED["gradient"]["dk is off by 0.1 %"][1:]))
    assert [name for name, found in row["found"].items() if not found] == ["transformer engine"]
    assert row["size"] == pytest.approx(1e-3, rel=0.1)


def test_the_loss_of_honest_runs_does_not_depend_on_ranks_or_schedule(monkeypatch):
    monkeypatch.setattr(detection, "STEPS", 4)
    one, *others = (
        detection.losses(reference, schedule, "float32", 0, ranks)
        for schedule, ranks in (("ring", 1), ("ring", 3), ("magi", 2))
    )
    assert one[-1] < one[0]
    for other in others:
        torch.testing.assert_close(torch.tensor(other), torch.tensor(one), rtol=1e-5, atol=0)
    hop = with_fault(*FAULTS["a hop is dropped"][1:])
    assert abs(detection.losses(hop, "ring", "float32", 0, 2)[-1] - one[-1]) > 1e-4


@pytest.mark.parametrize("loss", [float("inf"), float("nan")])
def test_both_loss_tests_find_a_run_that_diverges(loss, monkeypatch):
    monkeypatch.setattr(detection, "last_loss", lambda _, schedule, *given, **more: 1.0 + given[1])
    training = detection.Training("float32")
    assert training.judged(1.0, "ring", 0) == {
        "loss, same seed": False,
        "loss, other seeds": False,
    }
    assert all(training.judged(loss, "ring", 0).values())


def test_the_record_has_every_fault():
    rows = json.loads(RECORD.read_text())["results"]
    faults = {row["fault"] for row in rows if row["what"] == "tensors"}
    assert faults == {*FAULTS, *(name for of in detection.GRADED.values() for name in of)}
    for kind in ("tensors", "honest tensors"):
        suites = {(r["dtype"], r["inputs"], r["seed"]) for r in rows if r["what"] == kind}
        assert len(suites) == len(detection.INPUTS) * len(detection.SEEDS)
