"""`record_calls` writes every pass of every call, and `canon diff` names the first call and tensor in which two runs part."""

import inspect
import json

import pytest
import torch
from sharded import DEVICE
from torch.utils.flop_counter import FlopCounterMode

from canon import Layout, Mask, fast, reference
from canon.__main__ import main
from canon.route.algorithm import ALGORITHMS
from canon.testing import call_records, process_groups, record_calls

N = 20
ALL = {
    "attention (forward)", "attention (backward)", "strided_attention (forward)", "strided_attention (backward)",
    "magi_attention (forward)", "magi_attention (backward)", "ring_attention (forward)", "ring_attention (backward)",
    "zigzag_attention (forward)", "zigzag_attention (backward)", "striped_attention (forward)", "striped_attention (backward)",
    "attention_forward", "attention_backward", "merge", "decode_attention", "group_cast", "group_reduce", "sink",
}  # fmt: skip


def inputs(tokens=N, rank=0):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(1, tokens, h, 16, generator=generator).to(DEVICE).requires_grad_() for h in (2, 1, 1)]


def local_steps(half, scales=(0.25, 0.25, 0.25)):
    """Call `attention` and its backward pass once for each scale; each call takes the output of the one before."""
    q, k, v = inputs()
    for scale in scales:
        out = half.attention(q, k, v, Mask.causal(N), scale=scale)
        out.square().sum().backward()
        q = out.detach().requires_grad_()


def diff(capsys, a, b):
    status = main(["diff", str(a), str(b)])
    printed = capsys.readouterr()
    return status, (printed.out + printed.err).strip().replace(f"{a}", "A").replace(f"{b}", "B")


def lines_of(folder, rank=0):
    return [json.loads(line) for line in (folder / f"rank{rank}.jsonl").read_text().splitlines()]


def recorded(path, program, *given):
    with record_calls(path):
        program(*given)


# --- recording


@pytest.mark.gpu
def test_every_function_is_recorded_in_both_passes_and_then_left_alone(half, tmp_path):
    mask, layout = Mask.causal(2 * N), Layout.contiguous(2 * N, 2)

    def program():
        q, k, v = inputs()
        half.attention(q, k, v, sink=torch.zeros(2, device=DEVICE)).sum().backward()
        for name in ("ring_attention", "strided_attention", "magi_attention"):
            getattr(half, name)(q, k, v, mask, layout).sum().backward()
        half.zigzag_attention(q, k, v, mask).sum().backward()
        half.striped_attention(q, k, v, mask).sum().backward()
        out, lse = half.attention_forward(q, k, v, Mask.causal(N))
        half.attention_backward(out, q, k, v, out, lse, Mask.causal(N))
        half.merge(out, lse, out, lse)
        half.decode_attention(q.detach(), k.detach(), v.detach())
        plan = half.cast_plan(mask, layout)
        received = half.group_cast(k.detach()[0], plan, 0)
        half.group_reduce(received, plan, 0, torch.zeros_like(k[0]))

    def bodies():
        algorithms = [(x.forward, x.backward, x.side.under_sink) for x in ALGORITHMS.values()]
        functions = [inspect.unwrap(getattr(half, name)) for name in call_records.PLAIN]
        return algorithms, [[cell.cell_contents for cell in function.__closure__] for function in functions]

    before = bodies()
    with record_calls(tmp_path / "a"):
        process_groups.threads(program, 2)
        assert not [x for x, y in zip(before[0], bodies()[0], strict=True) if x == y]
    assert bodies() == before
    lines = lines_of(tmp_path / "a")
    titles = [f"{x['function']} ({x['pass']})" if x["pass"] else x["function"] for x in lines]
    assert set(titles) == ALL
    assert len(titles) == len(ALL), "a call inside of a call has no line"
    assert [line["call"] for line in lines] == list(range(1, len(lines) + 1))
    forward, _, backward = lines[:3]  # the sink is between them
    assert set(forward["results"]) == {"out", "lse"}
    assert set(backward["results"]) == {"dq", "dk", "dv"}
    assert backward["of"] == forward["call"]
    assert {"dout", "q", "k", "v", "out", "lse"} <= set(backward["inputs"])


@pytest.mark.gpu
def test_a_weight_and_the_largest_scores_are_recorded(half, tmp_path):
    def program():
        q, latent, k_rope, weight = (
            torch.randn(shape, device=DEVICE).requires_grad_() for shape in ((N, 2, 24), (N, 16), (N, 8), (64, 16))
        )
        half.latent_attention(q, latent, k_rope, weight).sum().backward()
        half.attention(*inputs(), return_max_logits=True)

    recorded(tmp_path, program)
    forward, backward, local = lines_of(tmp_path)
    assert list(forward["inputs"]) == ["q", "latent", "k_rope", "up_weight"]
    assert backward["of"] == forward["call"]
    assert list(backward["results"]) == ["dq", "dlatent", "dk_rope", "dup_weight"]
    assert list(local["results"]) == ["out", "lse", "max_logits"]


def test_each_rank_may_open_the_recording_itself(tmp_path, capsys):
    def program():
        with record_calls(tmp_path / "a"):
            reference.zigzag_attention(*inputs(N // 2))

    process_groups.threads(program, 2)
    assert [len(lines_of(tmp_path / "a", rank)) for rank in (0, 1)] == [1, 1]
    assert diff(capsys, tmp_path / "a", tmp_path / "a") == (0, "2 calls on 2 ranks have equal bits.")


@pytest.mark.gpu
def test_replayed_calls_are_recorded(tmp_path):
    local_steps(fast)  # the launches of a kind of call are recorded once and replayed afterwards
    recorded(tmp_path / "a", local_steps, fast)
    assert len(lines_of(tmp_path / "a")) == 6


def test_operators_are_recorded(tmp_path):
    with record_calls(tmp_path / "a"), FlopCounterMode(display=False):  # a dispatch mode: calls become operators
        reference.attention(*inputs()).sum().backward()
    assert [x["pass"] for x in lines_of(tmp_path / "a")] == ["forward", "backward"]


def test_a_recording_keeps_the_results_and_the_errors(tmp_path):
    before = reference.attention(*inputs())
    with record_calls(tmp_path / "a"):
        assert torch.equal(reference.attention(*inputs()), before)
        with pytest.raises(ValueError, match="mask is 7"):
            reference.attention(*inputs(), Mask.causal(7))
        with pytest.raises(RuntimeError, match="a recording into .*a is active"), record_calls(tmp_path / "b"):
            pass
    with pytest.raises(FileExistsError, match="rank0.jsonl exists: choose another folder"):
        recorded(tmp_path / "a", local_steps, reference)


def test_a_captured_call_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="a captured CUDA graph has no results to record"):
        recorded(tmp_path / "a", local_steps, reference)


# --- comparison


def test_another_scale_is_named(tmp_path, capsys):
    recorded(tmp_path / "a", local_steps, reference)
    recorded(tmp_path / "b", local_steps, reference, (0.25, 0.5, 0.25))
    sentence = "Call 3, attention (forward): scale is 0.25 in A and 0.5 in B."
    assert diff(capsys, tmp_path / "a", tmp_path / "b") == (1, sentence)


@pytest.mark.parametrize(("function", "place", "sentence"), [
    ("forward", 0, "Call 3, attention (forward): out differs; its inputs are equal."),
    ("forward", 1, "Call 3, attention (forward): lse differs; its inputs are equal."),
    ("backward", 1, "Call 4, attention (backward), the backward pass of call 3: dk differs; its inputs are equal."),
])  # fmt: skip
def test_a_kernel_with_other_bits_in_one_call_is_named(tmp_path, capsys, monkeypatch, function, place, sentence):
    from canon.reference.local import LOCAL

    recorded(tmp_path / "a", local_steps, reference)
    compute, calls = getattr(LOCAL, function), []

    def faulty(*given):
        results = list(compute(*given))
        calls.append(given)
        if len(calls) == 2:
            results[place] = results[place].clone()
            results[place][0, 1, 0] = torch.nextafter(results[place][0, 1, 0], torch.tensor(9.0))
        return tuple(results)

    object.__setattr__(LOCAL, function, faulty)
    try:
        recorded(tmp_path / "b", local_steps, reference)
    finally:
        object.__setattr__(LOCAL, function, compute)
    assert diff(capsys, tmp_path / "a", tmp_path / "b") == (1, sentence)


def test_a_difference_outside_of_canon_and_its_rank_are_named(tmp_path, capsys):
    def program(off):
        q, k, v = inputs(N // 2, torch.distributed.get_rank())
        reference.zigzag_attention(q, k, v)
        with torch.no_grad():
            k += off * torch.distributed.get_rank()
        reference.zigzag_attention(q, k, v)

    for name, off in (("a", 0), ("b", 1)):
        with record_calls(tmp_path / name):
            process_groups.threads(lambda off=off: program(off), 2)
    sentence = "Call 2 on rank 1, zigzag_attention (forward): k differs; the runs part before this call."
    assert diff(capsys, tmp_path / "a", tmp_path / "b") == (1, sentence)


def test_runs_that_cannot_be_matched_are_refused_in_one_sentence(tmp_path, capsys):
    def other(function, mask):
        half = reference
        function(half)(*inputs(), mask)

    recorded(tmp_path / "a", other, lambda half: half.attention, Mask.causal(N))
    recorded(tmp_path / "mask", other, lambda half: half.attention, Mask.window(N, 3, 0))
    recorded(tmp_path / "function", other, lambda half: half.ring_attention, Mask.causal(N))
    recorded(tmp_path / "more", local_steps, reference, ())
    with record_calls(tmp_path / "twice"):
        for _ in range(2):
            other(lambda half: half.attention, Mask.causal(N))
    status, text = diff(capsys, tmp_path / "a", tmp_path / "mask")
    assert status == 1
    assert text.startswith("Call 1, attention (forward): mask is Mask ")
    sentence = "Call 1 is attention (forward) in A and ring_attention (forward) in B."
    assert diff(capsys, tmp_path / "a", tmp_path / "function") == (1, sentence)
    sentence = "All 1 common calls are equal, but A has 1 calls and B has 2."
    assert diff(capsys, tmp_path / "a", tmp_path / "twice") == (1, sentence)
    status, text = diff(capsys, tmp_path / "a", tmp_path / "more")
    assert (status, "B holds no record of calls" in text) == (2, True)
    (tmp_path / "a" / "rank1.jsonl").write_text("[]\n")
    status, text = diff(capsys, tmp_path / "a", tmp_path / "twice")
    assert (status, "cannot read A as a record of calls" in text) == (2, True)
    (tmp_path / "a" / "rank1.jsonl").write_text("")
    assert diff(capsys, tmp_path / "a", tmp_path / "twice") == (
        2, "canon diff: A has 2 ranks and B has 1: record both on equally many ranks",
    )  # fmt: skip
