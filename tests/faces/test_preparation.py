"""Plans that are made ahead, perhaps in another process: a call that finds them plans nothing and
has the same bits.
"""

import pickle
import threading
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from hopper import plan_for_hopper
from meshes import mesh
from sharded import all_equal, on_this_rank, whole
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils.pin_memory import pin_memory

from canon import Layout, Mask, fast, reference
from canon.fast import device
from canon.fast.kernels import launcher
from canon.fast.kernels.launcher import Gpu
from canon.fast.tables import device_plans
from canon.masks.plan_cache import PLANS, PlanCache
from canon.testing import process_groups
from canon.testing.deterministic import deterministic

pytestmark = pytest.mark.usefixtures("empty_cache")

MASK = Mask.documents([0, 1, 9, 20, 33, 40], window=(20, 0))
UNEVEN = Layout([[range(0, 17)], [range(30, 40), range(17, 20)], [range(20, 30)]], 40)
SHAPES = {"heads": (4, 2), "widths": (8, 6), "dtype": torch.float32}
H200 = Gpu((9, 0), 132, 232448)
CASES = {
    "attention": ("attention", None, {}),
    "ring": ("ring_attention", UNEVEN, {"backward": "head_parallel"}),
    "zigzag": ("zigzag_attention", Layout.zigzag(40, 2), {}),
    "striped": ("striped_attention", Layout.striped(40, 3), {}),
    "latent": ("latent_attention", UNEVEN, {"backward": "split"}),
    "latent, one rank": ("latent_attention", Layout.contiguous(40, 1), {}),
    "strided": ("strided_attention", UNEVEN, {"head_stride": 2, "forward_first_stride": 1}),
    "strided, ring": ("strided_attention", UNEVEN, {"backward_schedule": "ring"}),
    "magi, one step": ("magi_attention", UNEVEN, {"own_keys_first": False}),
    "magi": ("magi_attention", UNEVEN, {"casts": 2, "keep_kv": True}),
    "one rank": ("magi_attention", Layout.contiguous(40, 1), {}),
    "ring, mesh": ("ring_attention", Layout.zigzag(40, 4), {"mesh_heads": 2}),
    "strided, mesh": ("strided_attention", Layout.contiguous(40, 4), {"mesh_heads": 2}),
}
UNPREPARED = {"row_indices", "_positions_on"}  # a range, or the layout itself


def computed(half, function, layout, options, mask=MASK, dtype=torch.float32):
    """Return the results of both passes on all ranks."""
    given = (
        {}
        if function in ("attention", "zigzag_attention", "striped_attention")
        else {"layout": layout}
    )
    attend, options = getattr(half, function), dict(options)
    heads = options.pop("mesh_heads", 1)
    if function == "latent_attention":  # a head of k is the latent, a head of v is k_rope
        weight = torch.linspace(-1, 1, 4 * (8 - 6 + 6) * 8).view(-1, 8).to(dtype)
        attend = lambda q, k, v, **given: half.latent_attention(
            q, k[:, :, 0], v[:, :, 0], weight, **given
        )
    attend = partial(attend, mask=mask, return_lse=True, **given, **options)
    layout, tensors = layout or Layout.contiguous(40, 1), whole(MASK, dtype=dtype)

    def program():
        group = {} if heads == 1 else {"group": mesh(layout.ranks // heads, heads)}
        return on_this_rank(partial(attend, **group), layout, tensors)

    return process_groups.threads(program, layout.ranks)


def prepared(half, function, layout, options, **more):
    """Return the plans of all ranks, as another process would send them."""
    heads = {"heads": (4, 4)} if function == "latent_attention" else {}
    given = {"device": "cpu", **SHAPES, **heads, **options, **more}
    ranks = [None] if layout is None else range(layout.ranks)
    plans = [half.prepare(function, MASK, layout, rank=rank, **given) for rank in ranks]
    PLANS.clear()
    return pickle.loads(pickle.dumps(plans))


@pytest.fixture
def planned(monkeypatch):
    """Return a set that collects the names of the plans that a lookup does not find.

    A plan on a device may be made after `load`, from the plan on the host.
    """
    names, get = set(), PlanCache.get

    def noting(cache, key):
        if (found := get(cache, key)) is None and hasattr(key[0], "__wrapped__"):
            names.update(
                () if isinstance(key[1][-1], torch.device) else {key[0].__name__} - UNPREPARED
            )
        return found

    monkeypatch.setattr(PlanCache, "get", noting)
    return names


def same_bits(got, expected):
    return all(map(all_equal, got, expected))


@pytest.mark.parametrize("case", CASES)
def test_a_first_call_after_load_plans_nothing_and_has_the_same_bits(half, case, planned):
    expected = computed(half, *CASES[case])
    assert planned or (half is reference and case == "attention")
    for plans in prepared(half, *CASES[case]):
        plans.load()
    planned.clear()
    assert same_bits(computed(half, *CASES[case]), expected)
    assert not planned


@pytest.mark.interpreted
@pytest.mark.parametrize("sms", [2, 132])  # few SMs do not need an owner for each query head
@pytest.mark.parametrize("case", CASES)
def test_plans_for_a_hopper_gpu_are_those_of_its_launches(case, sms, monkeypatch, planned):
    """Launches are dropped here. The CPU stands for the GPU in the call, and the meta device in
    `prepare`. The worker's `torch.use_deterministic_algorithms` may differ from that of the call.
    """
    plan_for_hopper(monkeypatch, sms)
    gpu = H200._replace(multiprocessors=sms)
    found = prepared(fast, *CASES[case], device=gpu, dtype=torch.bfloat16)
    assert planned >= {"tile_schedule", "packing"}
    for repeats in (False, True):
        PLANS.clear()
        for plans in found:
            plans.load()
        planned.clear()
        with device.backend("gluon"), deterministic() if repeats else nullcontext():
            computed(fast, *CASES[case], dtype=torch.bfloat16)
        assert not planned


class Packs(Dataset):
    """Masks of packed documents with their plans."""

    def __len__(self):
        return 2

    def __getitem__(self, number):
        return fast.prepare(
            "attention", Mask.documents([0, 5 + number, 40]), device="cpu", **SHAPES
        )


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_data_loader_worker_prepares(context, planned):
    for plans in DataLoader(
        Packs(), batch_size=None, num_workers=1, multiprocessing_context=context
    ):
        expected = computed(fast, "attention", None, {}, plans.mask)
        PLANS.clear()
        plans.load()
        planned.clear()
        assert same_bits(computed(fast, "attention", None, {}, plans.mask), expected)
        assert not planned


def test_a_data_loader_pins_plans_and_the_call_copies_no_table(monkeypatch):
    """Clones stand for pinned tensors."""
    found, pinned = fast.prepare("attention", MASK, device=H200, **SHAPES), {}

    def pin(x):
        made = x.clone()
        return pinned.setdefault(made.data_ptr(), made)

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda x: x.data_ptr() in pinned)
    copy = pin_memory(found)
    assert copy.mask is found.mask
    assert [key for key, _ in copy.plans] == [key for key, _ in found.plans]
    tables = [plan for _, plan in copy.plans if arrays_in(plan)]
    assert tables
    for x, y in zip(*(arrays_in([x.plans]) for x in (copy, found)), strict=True):
        assert x.dtype == y.dtype
        assert np.array_equal(x, y)
        assert x.ctypes.data in pinned
    uploads, number = [], len(pinned)
    monkeypatch.setattr(torch.Tensor, "to", lambda x, *_, **how: uploads.append((x, how)) or x)
    for plan in tables:
        device_plans.uploaded(plan, "cuda")
    assert len(pinned) == number
    assert all(x.is_pinned() and how == {"non_blocking": True} for x, how in uploads)


def arrays_in(plan):
    """Return the arrays of a plan, in order."""
    if isinstance(plan, np.ndarray):
        return [plan]
    return [x for part in plan for x in arrays_in(part)] if isinstance(plan, (tuple, list)) else []


def test_a_worker_does_not_start_cuda(monkeypatch):
    monkeypatch.setattr(torch.utils.data, "get_worker_info", object)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: pytest.fail("CUDA starts"))
    monkeypatch.setattr(launcher, "_gpus", {})
    with pytest.raises(RuntimeError, match=f"{launcher.__name__}.gpu_of in the training process"):
        fast.prepare("attention", MASK, **SHAPES)
    launcher._gpus[torch.device("cuda", 3)] = H200  # found by the training process before it forked
    expected = fast.prepare("attention", MASK, device=H200, **SHAPES)
    assert [key for key, _ in fast.prepare("attention", MASK, **SHAPES).plans] == [
        key for key, _ in expected.plans
    ]


def test_threads_prepare_at_the_same_time():
    """Each thread notes its own plans alone."""
    expected = {}

    def make(number):
        plans = fast.prepare("attention", Mask.documents([0, number, 40]), device="cpu", **SHAPES)
        planned = (getattr(x, "mask", x) for key, _ in plans.plans for x in key[1])  # of Cells
        expected[number] = {x for x in planned if isinstance(x, Mask)}

    threads = [threading.Thread(target=make, args=[number]) for number in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert expected == {number: {Mask.documents([0, number, 40])} for number in range(1, 9)}
