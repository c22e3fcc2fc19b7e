"""A recorded pass serves other masks exactly where its launches would be the same."""

import random
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from hopper import inputs
from interpreted_replay import recorded
from sharded import DEVICE

from canon import Band, Mask
from canon.bench.shapes import documents
from canon.fast import backward, local
from canon.fast.kernels import launcher
from canon.fast.kernels.launcher import Gpu
from canon.fast.replay import recordings, sharing
from canon.fast.tables import device_plans, key_parts
from canon.fast.tables.cells import Cells
from canon.masks.plan_cache import noted_plans

H200 = Gpu((9, 0), 132, 232448)
META = torch.device("meta")


# ------------------------------------------------------------------ replays
def tensors_of(seed):
    """Return q, k, v, out and lse: 96 tokens, 4 heads that share 2 of keys."""
    dtype = torch.float32 if DEVICE == "cpu" else torch.bfloat16
    q, k, v, *_ = inputs(Mask.full(96), 2, 4, 2, 16, 16, dtype, seed)
    out, lse = local.empty_result(q, v, dtype)
    return q, k, v, out.fill_(torch.nan), lse, None


MASKS = {
    "alike": Mask([Band(0, 96, 0, 96, None, 0)], 96, 96),
    "a window": Mask([Band(0, 96, 0, 96, -90, 0)], 96, 96),
    "more tiles": Mask.documents([0, 7, 40, 96]),
    "queries without keys": Mask([Band(0, 50, 0, 96)], 96, 96),
}


@pytest.fixture
def made(monkeypatch):
    """The recorders that are made."""
    found, right = [], recordings.Recorder
    monkeypatch.setattr(
        recordings, "Recorder", lambda given: found.append(right(given)) or found[-1]
    )
    return found


@pytest.mark.gpu
@pytest.mark.interpreted
@pytest.mark.usefixtures("replays")
def test_a_recording_serves_masks_of_one_structure_with_their_own_plans(made, monkeypatch):
    """Calls with other scales, or in parts of the keys, share none."""
    monkeypatch.setattr(key_parts, "FEWEST_KEYS", 1)
    options = (0.25, False), (0.5, False), (0.25, True)  # scale, whole
    for name, each in product(MASKS, options):
        for seed in range(2):
            replayed, expected = (tensors_of(seed) for _ in range(2))
            given = Cells(MASKS[name]), *each
            recordings.replayed(local.launch_forward, replayed, *given)
            local.launch_forward(*expected, *given)
            assert all(map(torch.equal, replayed[:5], expected[:5])), (name, each)
    assert [x.reason for x in recorded()] == [""] * len(MASKS) * len(options)
    assert len(made) < len(recorded()), "some are shared"
    tables = {id(x.held[0]) for x in recorded()}
    assert len(tables) == 2 * len(MASKS), "each mask has its own, and one of parts"


@pytest.mark.gpu
@pytest.mark.interpreted
@pytest.mark.usefixtures("replays")
def test_a_pass_of_one_mask_is_recorded_in_its_second_call(made):
    """A step of a schedule whose mask is new in every call costs no recording."""
    cells = Cells(MASKS["alike"])
    step = lambda *tensors: local.launch_forward(*tensors, cells, 0.25)
    for call, number in enumerate([0, 1, 1, 1]):
        replayed, expected = (tensors_of(call) for _ in range(2))
        recordings.replayed(step, replayed, kind="a step")
        step(*expected)
        assert all(map(torch.equal, replayed[:5], expected[:5]))
        assert len(made) == number


@pytest.mark.parametrize(
    ("handles", "known"), [([7], {7}), ([7, 7], {7}), ([7, 8], set()), ([], set())]
)
def test_tables_are_kept_for_all_streams_but_that_of_their_uploads(handles, known):
    """Tables of several streams are kept for each stream that replays."""
    made = object.__new__(recordings.PreparedPass)
    made._hold([], [SimpleNamespace(handle=x) for x in handles])
    assert made._streams == known


# ------------------------------------------------------------------ launches
def launches_of(monkeypatch, body, tensors, options):
    """Return what a pass launches on an H200 besides addresses, and the structures of its plans."""
    found = []

    def described(x):
        if isinstance(x, torch.Tensor):
            return "a plan" if id(x) in plans else (x.shape, x.stride(), x.dtype)
        base = getattr(x, "base", None)
        return x if base is None else (described(base), *x.block_shape)

    def launched(kernel, ctas, device, arguments, constants):
        found.append((kernel, ctas, *map(described, arguments), constants))

    plans, upload = {}, device_plans.uploaded
    monkeypatch.setattr(launcher, "_launch", launched)

    def uploaded(plan, device):
        made = upload(plan, device)
        plans.update({id(x): x for x in device_plans.tensors_in(made)})
        return made

    monkeypatch.setattr(device_plans, "uploaded", uploaded)
    with launcher.meta_stands_for(H200), noted_plans() as seen:
        body(*tensors, *options)
    structures = [sharing.structure(upload(plan, META)) for plan in seen.values()]
    return found, structures, [key[0].__name__ for key in seen]


def kinds_of_masks():
    draw, n = random.Random(0), 8192
    for seed in range(40):
        ends = documents(n, draw.choice([100, 300, 1000, 4000]), seed)
        yield Mask.documents(ends)
        left = draw.randint(1, n)
        yield Mask.window(n, left, 0)
        without_queries = [x for x in Mask.documents(ends).bands if x.q_start > left // 8]
        yield Mask(without_queries, n, n)


@pytest.mark.parametrize("heads", [(64, 8), (4, 4), (6, 1)], ids=str)
def test_plans_of_one_structure_mean_the_same_launches(heads, monkeypatch, empty_cache):
    n, (h, g) = 8192, heads
    q, k, v = (torch.empty(1, n, x, 128, dtype=torch.bfloat16, device=META) for x in (h, g, g))
    out, lse = local.empty_result(q, v, q.dtype)
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    passes = {
        local.launch_forward: ((q, k, v, out, lse, None), (1.0, True)),
        backward._gradients: (
            (out, q, k, v, out, lse, None, *grads),
            (1.0, backward.method_now("auto")),
        ),
    }
    for body, (tensors, options) in passes.items():
        known, masks = [], list(kinds_of_masks())
        for mask in masks:
            with monkeypatch.context() as patch:
                made, *looked_up = launches_of(patch, body, tensors, (Cells(mask), *options))
            same = [launches for launches, *before in known if before == looked_up]
            assert made, "something is launched"
            assert all(launches == made for launches in same)
            if not same:
                known.append((made, *looked_up))
        assert len(known) < len(masks) / 2, "recordings are shared"
