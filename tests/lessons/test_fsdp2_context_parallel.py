"""The script `notebooks/fsdp2_context_parallel.py`: FSDP2 and Canon on a mesh give the losses of
one process.
"""

import pytest
import torch
from folders import NOTEBOOKS
from programs import losses_of, on_forked_ranks

pytest.importorskip("transformers", reason="the extra transformers is not installed")
import fsdp2_context_parallel

SCRIPT = NOTEBOOKS / "fsdp2_context_parallel.py"


def losses_of_one_process(steps, rows):
    """Train on the packs of all rows with eager attention, without Canon and FSDP2."""
    model, losses = fsdp2_context_parallel.llama("eager"), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        total, valid = 0.0, 0
        for ids, ends in (fsdp2_context_parallel.pack(step, row) for row in range(rows)):
            positions = torch.cat([torch.arange(length) for length in ends.diff()])[None]
            logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
            last = torch.zeros(ids.shape[1], dtype=torch.bool)
            last[ends[1:] - 1] = True  # of a document: it predicts nothing
            labels = ids[0].roll(-1).masked_fill(last, -100)
            total = total + torch.nn.functional.cross_entropy(logits[0], labels, reduction="sum")
            valid += int((~last).sum())
        optimizer.zero_grad()
        (total / valid).backward()
        optimizer.step()
        losses.append((total / valid).item())
    return losses


def test_a_mesh_of_data_and_context_ranks_gives_the_losses_of_one_process():
    expected = losses_of_one_process(steps=4, rows=2)
    found = losses_of(on_forked_ranks(SCRIPT, 4, "--context", "2", "--steps", "4"))
    assert found[0] == pytest.approx(expected[0], abs=1e-4)  # printed with 4 decimals
    # Adam may turn a rounding into a step of the learning rate
    assert found == pytest.approx(expected, abs=2e-3)
    assert expected[3] < expected[0] - 0.2
