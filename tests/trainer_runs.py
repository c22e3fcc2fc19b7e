"""Four steps of a trainer on packed documents, in float64, with plain gradient descent: a wrong
scale of the loss shows.
"""

import os
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from tiny_models import tiny
from transformers import DataCollatorWithFlattening

ARGUMENTS = dict(
    use_cpu=True,
    max_steps=4,
    per_device_train_batch_size=3,
    per_device_eval_batch_size=2,
    optim="sgd",
    learning_rate=0.003,
    max_grad_norm=0,  # clipping would hide the scale of gradients
    report_to="none",
    save_strategy="no",
    logging_strategy="no",
    disable_tqdm=True,
)
COLLATOR = dict(data_collator=DataCollatorWithFlattening())


def texts(count):
    """Return documents of 9 to 29 tokens."""
    draw = torch.Generator().manual_seed(count)
    lengths = torch.randint(9, 30, (count,), generator=draw).tolist()
    ids = [torch.randint(64, (n,), generator=draw).tolist() for n in lengths]
    return [{"input_ids": x, "labels": x} for x in ids]


def losses_and_weights(
    kind, arguments, train, evaluation, attention="canon", changes=(), **options
):
    """Return the losses of all microbatches, the loss of an evaluation, and the weights after
    training, as one vector.

    ``kind``, ``arguments``: classes of a trainer and its arguments. ``changes``: of the arguments.
    """
    found = []

    class Recorded(kind):
        def training_step(self, *args, **kwargs):
            found.append(super().training_step(*args, **kwargs).item())
            return torch.tensor(found[-1])  # the logs need not be exact

    name_ranks()
    model = tiny("Gemma3", attention).double()  # one layer has a window of 7 tokens
    with TemporaryDirectory() as folder:
        args = arguments(folder, **ARGUMENTS | dict(changes))
        trainer = Recorded(
            model=model, args=args, train_dataset=train, eval_dataset=evaluation, **options
        )
        trainer.train()
        found.append(trainer.evaluate()["eval_loss"])
    return torch.tensor(found, dtype=torch.float64), torch.cat(
        [x.detach().flatten() for x in model.parameters()]
    )


def name_ranks():
    """Set the variables of torchrun, from which accelerate reads the ranks."""
    if dist.is_initialized():
        for name in ("RANK", "LOCAL_RANK"):
            os.environ[name] = str(dist.get_rank())
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ[name] = str(dist.get_world_size())


def assert_same(found, expected, tolerance=1e-7):
    """Compare two runs. The model's norms round to float32 (6e-8); losses of transformers and TRL
    are float32: 1e-6.
    """
    for x, y in zip(found, expected, strict=True):
        assert x.shape == y.shape
        assert ((x - y).norm() / y.norm()).item() < tolerance, (x, y)
