"""The CUDA backend agrees with dense attention in every schedule, repeats its bits, and replays.

On a CPU, the source of the kernels runs in an emulation (`cuda_emulation`), on short
sequences."""

import pytest
import torch
from captured_passes import check_replay
from cuda_backend import cuda, inputs
from hopper import assert_exact, both_passes
from invariant_worlds import attended, different
from sharded import all_equal, attending, on_this_rank

from canon import Layout, Mask, fast
from canon.testing import process_groups

pytestmark = pytest.mark.gpu


def attend(*given, **options):
    """Return the results of both passes."""
    with cuda():
        return both_passes(*given, **options)


@pytest.mark.gpus(1)
def test_all_bits_repeat_over_8_runs_and_on_two_streams():
    mask = Mask.prefix(1200, 528)
    tensors = inputs(mask, h=4)
    run = lambda: attend(*tensors, mask, method="head_parallel")
    runs = [run() for _ in range(8)]
    for stream in (torch.cuda.Stream(), torch.cuda.Stream()):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            runs.append(run())
        torch.cuda.synchronize()
    assert all(all_equal(runs[0], other) for other in runs[1:])


def test_a_repeated_call_is_replayed(replays):
    mask = Mask.causal(33)
    for seed in range(3):
        tensors = inputs(mask, seed=seed)
        assert_exact(attend(*tensors, mask), *tensors, mask)
    assert replays() == ["", ""], "one pass forward and one backward"


def test_a_ring_agrees():
    mask, layout = Mask.documents([0, 100, 256]), Layout.contiguous(256, 2)
    tensors, ring = inputs(mask, h=2, g=2), attending(fast, "ring", mask, layout)
    with cuda(), torch.autograd.set_multithreading_enabled(False):
        got = process_groups.threads(lambda: on_this_rank(ring, layout, tensors), 2)[0]
    assert_exact(got, *tensors, mask)


@pytest.mark.parametrize("function", ["strided_attention", "magi_attention"])
def test_rank_invariant_calls_agree_and_repeat_the_bits_of_one_rank(function):
    mask, layout = Mask.documents([0, 100, 256]), Layout.contiguous(256, 2, 128)
    tensors = inputs(mask, h=2, g=2)
    with cuda(), torch.autograd.set_multithreading_enabled(False):
        alone = attended(fast, "attention", mask, Layout.contiguous(256, 1), tensors)
        together = attended(fast, function, mask, layout, tensors)
    assert_exact(together, *tensors, mask)
    assert not different(alone, together)


@pytest.mark.gpus(1)
def test_a_captured_graph_replays_both_passes():
    mask = Mask.prefix(700, 300)
    q, k, v, dout, _ = inputs(mask, h=8, d=64, dv=64)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with fast.backend("cuda"), torch.autograd.set_multithreading_enabled(False):
        check_replay(lambda *x: fast.attention(*x, mask), *leaves, dout)


@pytest.mark.gpus(1)
def test_threads_launch_at_the_same_time():
    mask = Mask.causal(512)
    tensors = [inputs(mask, h=4, d=64, dv=64, seed=seed) for seed in range(4)]

    def program():
        import torch.distributed as dist

        with torch.cuda.stream(torch.cuda.Stream()):
            mine = tensors[dist.get_rank()]
            for _ in range(5):
                assert_exact(attend(*mine, mask), *mine, mask)

    process_groups.threads(program, 4)
