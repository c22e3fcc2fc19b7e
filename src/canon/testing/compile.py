"""Compile every Triton and Gluon kernel without a GPU, and report registers, spills and shared
memory.

    python -m canon.testing.compile --arch 80 90 [--record PATH]

The launchers of `canon.fast` get CPU tensors and a driver that only returns a target.
"""

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.knobs import nvidia
from triton.runtime import driver

from canon.fast.kernels.gluon import config as hopper_config
from canon.fast.kernels.gluon import few_queries_launch
from canon.fast.kernels.gluon import launch as hopper
from canon.fast.kernels.gluon import softmax_stats as hopper_stats
from canon.fast.kernels.gluon.few_queries import FIRST_TILES, OF_A_RANK
from canon.fast.kernels.triton import config, launch, parts, rows, sink, sum_ranks
from canon.fast.kernels.triton.config import Config
from canon.fast.tables.cells import Cells, in_place
from canon.masks.mask import Mask
from canon.testing import record
from canon.testing.sass import overwritten, skipped_waits, waits

# These read a table of row indices.
ROWS = "merge_rows", "copy_rows", "copy_statistics", "add_to_rows", "take_rows", "add_rows"
ROWS += "copy_tokens", "zero_rows", "mask_statistic"
NO_MMA = (
    "delta",
    "sum_heads",
    "sum_ranks",
    "softmax_stats",
    "delta_stats",
    "merge",
    "sink",
    "sink_backward",
    *ROWS,
)
# bytes of a CTA: CUDA Programming Guide, 16.2
SHARED_LIMIT = {80: 166912, 86: 101376, 89: 101376, 90: 232448}


@dataclass(frozen=True)
class Case:
    """A kernel for one dtype and head width."""

    kernel: str
    arch: int
    dtype: str = "bfloat16"
    d: int = 128
    dv: int = 128
    describable: bool = False  # tensor descriptors may be used
    backend: str = "triton"
    short: bool = False  # documents, so query heads share a Hopper tile
    seen: int = 0  # tiles, a key of `hopper_config.LONG_TABLE`: queries see more
    ordered: bool = False  # dq is reduced in a fixed order
    plain: bool = False  # the forward of `forward_plain`
    key_order: bool = False  # with rank_invariant=True

    def cells(self, mask: Mask) -> Cells:
        return Cells(mask, in_place(mask) if self.key_order else None)


@dataclass(frozen=True)
class Compiled:
    """Statistics of a compiled kernel."""

    name: str
    case: Case
    config: Config | hopper_config.Config
    registers: int
    spilled: int  # bytes, stores and loads
    shared: int  # bytes
    expected_shared: int  # bytes, by config.shared_bytes
    warnings: tuple[str, ...]
    # a barrier lies between the last load from global memory and the last store
    updates_after_reading: bool
    overwritten: tuple[str, ...]  # instructions that write registers of an MMA in flight
    waits: int  # waits for MMAs in the machine code
    waits_added: int  # of these, by the assembler
    waits_skipped: int  # of these, in a branch without an MMA


def main_cases(arch: int) -> list[Case]:
    """Return the cases of one architecture."""
    widths, of = (64, 128, 256), partial(Case, arch=arch)
    descriptors = (False, True) if arch >= 90 else (False,)
    cases = [
        of(kernel, d=d, dv=d, describable=describable)
        for describable, kernel, d in product(descriptors, config.KERNELS, widths)
    ]
    for (d, dv), kernel in product(((96, 96), (192, 128), (40, 24)), ("forward", "dkdv")):
        cases.append(of(kernel, dtype="float16", d=d, dv=dv))
    cases += [of(kernel, dtype="float32") for kernel in config.KERNELS]
    cases += [of(kernel, dtype="float64", d=64, dv=64) for kernel in ("forward", "dkdv")]
    cases += [of(kernel, key_order=True) for kernel in ("forward", "dq", "dkdv")]
    cases += [of(kernel) for kernel in NO_MMA]
    return cases + _hopper_cases() if arch == 90 else cases


def _hopper_cases() -> list[Case]:
    def of(kernel: str, pads: tuple[int, int], dtype: str = "bfloat16", **flags: Any) -> Case:
        return Case(kernel, 90, dtype, *pads, True, "gluon", **flags)

    cases = [of(*key) for key in hopper_config.TABLE]
    cases += [of(name, (96, 80), "float16") for name in ("forward", "dkdv")]
    cases += [of(name, (192, 128)) for name in ("forward", "dq", "dkdv_hdim256")]
    packed = product(("forward", "dq"), (64, 128, 256))
    cases += [of(name, (d, d), short=True) for name, d in packed]
    for key, choices in hopper_config.LONG_TABLE.items():
        cases += [of(*key, seen=seen) for seen in choices]
    plain = product(hopper_config.PLAIN, ("bfloat16", "float16"))
    cases += [of("forward", pads, dtype, plain=True) for pads, dtype in plain]
    ordered = ("forward", 128), ("forward", 256), ("dq", 128), ("dkdv", 128), ("dkdv_hdim256", 256)
    cases += [of(name, (d, d), key_order=True) for name, d in ordered]
    pads_of = lambda kernel: [pads for name, pads in hopper_config.TABLE if name == kernel]
    cases += [of("few_queries", pads, key_order=True) for pads in pads_of("forward")]
    return cases + [of("fused", pads, ordered=True) for pads in pads_of("fused")]


def compile_case(case: Case) -> list[Compiled]:
    """Compile the kernels of a case. Two kernels may compute dk and dv."""
    if case.kernel == "few_queries":
        return _compile_few_queries(case)
    return (_compile_hopper if case.backend == "gluon" else _compile_portable)(case)


def _compile_hopper(case: Case) -> list[Compiled]:
    q, k, v, dout, lse, wide = _tensors(case, getattr(torch, case.dtype))
    softmax_stats, results = torch.empty(1, q.shape[2], 2, q.shape[1]), []
    cells = case.cells(
        Mask.documents(range(0, q.shape[1] + 1, 16)) if case.short else Mask.causal(q.shape[1])
    )

    def keep(kernel, _work_tiles, _q, used, arguments, **options):
        binary = kernel.warmup(*arguments, **hopper.constants(kernel, used), **options, grid=(1,))
        _, d, dv = hopper_config.choose(case.kernel, case.d, case.dv)
        results.append(
            _report(case, used, binary, hopper_config.shared_bytes(case.kernel, used, d, dv))
        )

    plain = {"forward": hopper_config.PLAIN[case.d, case.dv]} if case.plain else {}
    backward = q, k, v, dout, softmax_stats, cells, 0.1
    with _target(case.arch), mock.patch.object(hopper, "run", keep), hopper_config.forced(**plain):
        if case.kernel == "forward":
            hopper.forward(q, k, v, cells, 0.1, dout, lse)
        elif case.kernel == "dq":
            hopper.dq(*backward, q)
        else:
            hopper.dkdv(*backward, k, v, *((wide, case.ordered) if case.kernel == "fused" else ()))
    return results


def _compile_few_queries(case: Case) -> list[Compiled]:
    few, (q, k, v, dout, lse, wide) = few_queries_launch, _tensors(case, getattr(torch, case.dtype))
    config, d, dv = hopper_config.choose(
        "forward", case.d, case.dv, seen=float("inf"), most_rows=128
    )
    results, columns, shared = {}, config.columns, few_queries_launch.ROWS

    def keep(kernel, _ctas, _device, arguments, **options):
        boxes = [tuple(x.block_shape) for x in arguments[:2] if hasattr(x, "block_shape")]
        # of "weights_kernel" Q, and K at each stage; of "sums_kernel" P and V at each stage
        owned, at_stage = (shared * d, 0) if "STEP" in options else (0, shared)
        visited = columns * (at_stage + sum(box[3] for box in boxes[1:]))
        stages = options.get("STAGES", 0)
        bytes_ = 1024 + 2 * (owned + stages * visited)
        key = kernel.__name__, *options.items(), *boxes
        if key not in results:
            used = hopper_config.Config(shared, columns, stages)
            results[key] = _report(
                case, used, kernel.warmup(*arguments, **options, grid=(1,)), bytes_
            )

    tokens = q.shape[1]
    counter = torch.zeros(2, dtype=torch.int32)
    sums = torch.empty(2, *lse.shape, 4)
    with _target(case.arch), mock.patch.object(few, "launch", keep):
        for width, queries in product(few.SLICES, (1, tokens)):
            mask = Mask.causal(queries, tokens)
            plan = few.few_queries_plan(Cells(mask, in_place(mask)), 4, columns, 1, q.device)
            with mock.patch.object(few, "slice_width", lambda *_, width=width: width):
                few.forward_of_few(q, k, v, (d, dv), plan, 0.1, None, 1, dout, lse)
                weights = few.empty_weights(q, plan)
                for step in (FIRST_TILES, OF_A_RANK):
                    few.launch_weights(
                        q, k, (d, dv), plan, 0.1, None, (*weights, counter), lse, step, 2, 64
                    )
                few.launch_sums(q, v, (d, dv), plan, 1, weights, sums, wide, sums, sums.stride(0))
                few.write_results(wide, sums, lse, dout, lse, counter, 2, 64)
    return list(results.values())


def _compile_portable(case: Case) -> list[Compiled]:
    dtype = getattr(torch, case.dtype)
    tensors = _tensors(case, dtype)
    pads = launch.padded(case.d), launch.padded(case.dv)
    limit, hopper = SHARED_LIMIT[case.arch], case.arch >= 90
    forced = {}
    if case.kernel in config.KERNELS:
        forced[case.kernel] = config.fitting(
            case.kernel, *pads, dtype.itemsize, limit, case.describable, hopper
        )
    results = []

    def keep(kernel, programs, used, arguments, width, strided, options):
        strides = launch.stride_arguments(strided)
        stages = {"num_warps": used.warps, "num_stages": used.stages}
        binary = kernel.warmup(*arguments, width, *strides, **options, **stages, grid=(1,))
        has_mma = any(used in (each, replace(each, partial_columns=0)) for each in forced.values())
        expected = (
            config.shared_bytes(case.kernel, used, *pads, dtype.itemsize) if has_mma else 4096
        )
        results.append(_report(case, used, binary, expected))

    def keep_stats(kernel, _, device, arguments, **options):
        results.append(
            _report(case, launch.ROWS, kernel.warmup(*arguments, **options, grid=(1,)), 4096)
        )

    with (
        _target(case.arch),
        mock.patch.object(launch, "run", keep),
        mock.patch.object(hopper_stats, "launch", keep_stats),
        config.forced(**forced),
    ):
        _launch(case, *tensors)
    return results


def _tensors(case: Case, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    # under a causal mask a query sees half of the tokens on average
    tokens, h, g = 256 * case.seen or 128, 32, 8
    wide = torch.promote_types(dtype, torch.float32)
    q, k = (torch.empty(1, tokens, heads, case.d, dtype=dtype) for heads in (h, g))
    v, dout = (torch.empty(1, tokens, heads, case.dv, dtype=dtype) for heads in (g, h))
    return q, k, v, dout, torch.empty(1, h, tokens, dtype=wide), torch.empty(q.shape, dtype=wide)


def _launch(case: Case, q, k, v, dout, lse, wide) -> None:
    cells, indices = case.cells(Mask.causal(q.shape[1])), torch.arange(q.shape[1])
    calls = {
        "forward": lambda: launch.forward(q, k, v, cells, 0.1, dout, lse),
        "dq": lambda: launch.dq(q, k, v, dout, (lse, lse), cells, 0.1, q),
        "dkdv": lambda: launch.dkdv(q, k, v, dout, (lse, lse), cells, 0.1, k, v),
        "fused": lambda: launch.dkdv(q, k, v, dout, (lse, lse), cells, 0.1, k, v, wide),
        "parts": lambda: parts.forward_in_parts(q, k, v, cells, 0.1, dout, lse),
        "delta": lambda: launch.delta(dout, dout, lse, lse, lse),
        "sum_heads": lambda: launch.sum_heads(wide, dout, k, v),
        "merge": lambda: launch.merge(wide, lse, wide, lse, wide, lse),
        "merge_rows": lambda: launch.merge(wide, lse, wide, lse, wide, lse, indices),
        "copy_rows": lambda: rows.copy_rows(q, q, indices),
        "copy_statistics": lambda: rows.copy_statistics(lse, lse, (lse, lse), indices),
        "add_to_rows": lambda: rows.add_to_rows(wide, indices, wide),
        "take_rows": lambda: rows.take_rows(k, v, indices, torch.cat([k, v], -1)),
        "add_rows": lambda: rows.add_rows(k, k, indices, indices, k),
        "copy_tokens": lambda: rows.copy_tokens(k, k, indices.to(torch.int8)),
        "zero_rows": lambda: rows.zero_rows(k),
        "mask_statistic": lambda: rows.mask_statistic(lse),
        "sum_ranks": lambda: sum_ranks.sum_ranks(torch.stack([wide, wide], 1), wide),
        "sink": lambda: sink.apply_sink(dout, lse, lse[0, :, 0], dout),
        "sink_backward": lambda: sink.differentiate_sink(dout, dout, lse, lse[0, :, 0], dout, lse),
        "softmax_stats": lambda: hopper_stats.row_statistics(lse, lse),
        "delta_stats": lambda: hopper_stats.make_row_statistics(dout, dout, lse, lse),
    }
    calls[case.kernel]()


@contextmanager
def _target(arch: int) -> Iterator[None]:
    if launch.INTERPRETED:
        raise RuntimeError(
            "kernels are interpreted, not compiled; unset TRITON_INTERPRET and "
            "start the program again"
        )
    before = driver._active  # reset_active would look for a GPU
    answers = {
        "current_target": GPUTarget("cuda", arch, 32),
        "active_torch_device": torch.device("cpu"),
    }
    answers |= {"current_device": arch, "current_stream": 0}  # Triton caches kernels by device
    driver.set_active(
        SimpleNamespace(**{f"get_{name}": lambda *_, x=x: x for name, x in answers.items()})
    )
    try:
        yield
    finally:
        driver._active = before


def _report(case: Case, used: Config, binary, expected: int) -> Compiled:
    target, ptx = f"sm_{case.arch}" + ("a" if case.arch >= 90 else ""), binary.asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        binary_file, tool = source.with_suffix(".cubin"), get_ptxas(case.arch).path
        log = _printed(tool, "-v", f"--gpu-name={target}", source, "-o", binary_file)
        disassemble = nvidia.nvdisasm.path, "--print-code", binary_file
        listing = _printed(*disassemble) if "wgmma" in ptx else ""
    numbers = lambda pattern: [int(number) for number in re.findall(pattern, log)]
    return Compiled(
        binary.metadata.name,
        case,
        used,
        max(numbers(r"Used (\d+) registers")),
        sum(numbers(r"(\d+) bytes spill (?:stores|loads)")),
        binary.metadata.shared,
        expected,
        tuple(sorted(set(re.findall(r"Potential Performance Loss[^\n]*", log)))),
        ptx.rfind("ld.global") < ptx.rfind("bar.sync") < ptx.rfind("st.global"),
        tuple(overwritten(listing)),
        waits(listing),
        waits(listing) - ptx.count("wgmma.wait_group"),
        skipped_waits(listing),
    )


def _printed(*command: Any) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stderr + done.stdout


def main() -> None:
    """Compile the main cases, and print JSON for each kernel."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90], choices=SHARED_LIMIT)
    parser.add_argument("--record", type=Path, help="write the results to this JSON file")
    arguments = parser.parse_args()
    rows = []
    for case in [case for arch in arguments.arch for case in main_cases(arch)]:
        for compiled in compile_case(case):
            rows.append(asdict(compiled))
            print(json.dumps(rows[-1]), flush=True)
    if arguments.record:
        targets = " ".join(map(str, arguments.arch))
        record.write(arguments.record, f"python -m canon.testing.compile --arch {targets}", rows)


if __name__ == "__main__":
    main()
