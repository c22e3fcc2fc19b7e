"""The code of "Divide a batch" in paper/in_your_program.md has the gradients of one process."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from one_layer import OneLayer

import canon
from canon import Mask
from canon.testing import process_groups

PAGE = (Path(__file__).parents[2] / "paper" / "in_your_program.md").read_text()
IMPORTS, TRAINING = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)[:2]
ENDS, SIZE = [0, 30, 40, 100], 9


class Model(OneLayer):
    def forward(self, ids, positions):
        return self.head(self.hidden(ids, positions, self.attend))


def gradients(ranks):
    """Run the code on this rank. Add the gradients of all ranks, and divide by their number."""
    drawn = torch.Generator().manual_seed(0)
    model = Model(SIZE, 100).double()
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=drawn, dtype=torch.float64)
    names = {"W": ranks, "rank": dist.get_rank(), "model": model, "cu_seqlens": ENDS}
    names |= {"mask": Mask.documents(ENDS)}
    names["ids"] = torch.randint(SIZE, (1, 100), generator=drawn)
    exec(IMPORTS, names)
    model.attend = lambda q, k, v: names["attn"].magi_attention(
        q, k, v, names["mask"], names["layout"]
    )
    exec(TRAINING, names)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= ranks
    return [parameter.grad for parameter in model.parameters()]


def test_the_code_of_the_page_computes_the_gradients_of_one_process():
    (expected,) = process_groups.threads(lambda: gradients(1), 1)
    for found in process_groups.threads(lambda: gradients(2), 2):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_a_loss_that_is_looked_for_in_canon_is_named():
    with pytest.raises(AttributeError, match=r"canon\.training\.sequence_loss exists"):
        _ = canon.sequence_loss
