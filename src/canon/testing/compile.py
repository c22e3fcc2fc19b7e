"""Compile every Triton and Gluon kernel without a GPU, and report registers, spills and shared
memory.

    python -m canon.testing.compile --arch 80 90 [--record PATH]

The launchers of `canon.fast` get CPU tensors and a driver with a target only.
"""

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.knobs import nvidia
from triton.runtime import driver

from canon.fast import local
from canon.fast.ahead import kernel_variants
from canon.fast.device import computing_with
from canon.fast.kernels import launcher
from canon.fast.kernels.gluon import config as hopper_config
from canon.fast.kernels.gluon import launch as hopper
from canon.fast.kernels.gluon import softmax_stats as hopper_stats
from canon.fast.kernels.triton import config, launch, parts, rows, sink, sum_ranks
from canon.fast.kernels.triton.config import Config
from canon.fast.tables.cells import Cells, in_place
from canon.masks.mask import Mask
from canon.testing import record
from canon.testing.sass import overwritten, skipped_waits, waits

# bytes of a CTA: CUDA Programming Guide, 16.2
SHARED_LIMIT = {80: 166912, 86: 101376, 89: 101376, 90: 232448}


@dataclass(frozen=True)
class Case:
    """A kernel for one dtype and width; "rows" are all kernels without MMAs."""

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
    cases.append(of("rows"))
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
    """Compile each kernel that the case launches."""
    tensors, found, hopper_constants = _tensors(case), {}, hopper.constants
    used, forced = launch.ROWS, {}
    if case.plain:
        forced["forward"] = hopper_config.PLAIN[case.d, case.dv]
    elif case.backend == "triton" and case.kernel in config.KERNELS:
        pads, itemsize = (launch.padded(case.d), launch.padded(case.dv)), tensors[0].itemsize
        limit, newer = SHARED_LIMIT[case.arch], case.arch >= 90
        used = config.fitting(case.kernel, *pads, itemsize, limit, case.describable, newer)
        forced[case.kernel] = used

    def note(kernel, chosen):
        nonlocal used
        used = chosen
        return hopper_constants(kernel, chosen)

    def keep(kernel, _ctas, _device, arguments, constants):
        boxes = [tuple(x.block_shape) for x in arguments if hasattr(x, "block_shape")]
        key = kernel.__name__, *constants.items(), *boxes
        if key not in found:
            binary = kernel.warmup(*arguments, **constants, grid=(1,))
            found[key] = _report(case, used, binary, _most_shared(case, used, constants, boxes))

    forcing = hopper_config.forced if case.backend == "gluon" else config.forced
    with (
        _target(case.arch),
        mock.patch.object(launcher, "_launch", keep),
        mock.patch.object(hopper, "constants", note),
        forcing(**forced),
    ):
        _launch(case, *tensors)
    return list(found.values())


def _most_shared(case: Case, used: Any, constants: dict, boxes: list[tuple[int, ...]]) -> int:
    if case.kernel == "few_queries":  # 128 rows of Q or P, and tiles of K or V
        visited = prod(boxes[1]) if boxes else 0
        if "STEP" in constants:
            return 1024 + 2 * (prod(boxes[0]) + constants["STAGES"] * visited)
        return 1024 + 2 * constants.get("STAGES", 0) * (128 * boxes[1][1] + visited if boxes else 0)
    if case.backend == "gluon":
        _, d, dv = hopper_config.choose(case.kernel, case.d, case.dv)
        return hopper_config.shared_bytes(case.kernel, used, d, dv)
    if "BN" not in constants:
        return 4096
    itemsize = getattr(torch, case.dtype).itemsize
    return config.shared_bytes(
        case.kernel, used, launch.padded(case.d), launch.padded(case.dv), itemsize
    )


def _tensors(case: Case) -> tuple[torch.Tensor, ...]:
    # under a causal mask a query sees half of the tokens on average
    tokens, h, g, dtype = 256 * case.seen or 128, 32, 8, getattr(torch, case.dtype)
    wide = torch.promote_types(dtype, torch.float32)
    q, k = (torch.empty(1, tokens, heads, case.d, dtype=dtype) for heads in (h, g))
    v, dout = (torch.empty(1, tokens, heads, case.dv, dtype=dtype) for heads in (g, h))
    return q, k, v, dout, torch.empty(1, h, tokens, dtype=wide), torch.empty(q.shape, dtype=wide)


def _launch(case: Case, q, k, v, dout, lse, wide) -> None:
    tokens, module = q.shape[1], hopper if case.backend == "gluon" else launch
    mask = Mask.documents(range(0, tokens + 1, 16)) if case.short else Mask.causal(tokens)
    cells = Cells(mask, in_place(mask) if case.key_order else None)
    if case.kernel == "rows":
        _launch_rows(q, k, v, dout, lse, wide)
    elif case.kernel == "few_queries":
        model = kernel_variants.Model(
            q.dtype, case.d, case.dv, (32, 8), (), "gluon", rank_invariant=True
        )
        inputs = kernel_variants.Inputs(model, "cpu")
        patched = mock.patch.object
        with computing_with("gluon"), patched(hopper, "run"), patched(local, "check_device"):
            kernel_variants.few_queries_in_order(inputs)
            kernel_variants.few_queries_on_ranks(inputs)
    elif case.kernel == "parts":
        parts.forward_in_parts(q, k, v, cells, 0.1, dout, lse)
    elif case.kernel == "forward":
        module.forward(q, k, v, cells, 0.1, dout, lse)
    else:
        statistics = (lse, lse) if module is launch else torch.empty(1, q.shape[2], 2, tokens)
        backward = q, k, v, dout, statistics, cells, 0.1
        if case.kernel == "dq":
            module.dq(*backward, q)
        else:
            fused = (wide, case.ordered) if case.kernel == "fused" else ()
            module.dkdv(*backward, k, v, *fused)


def _launch_rows(q, k, v, dout, lse, wide) -> None:
    indices = torch.arange(q.shape[1])
    launch.delta(dout, dout, lse, lse, lse)
    launch.sum_heads(wide, dout, k, v)
    launch.merge(wide, lse, wide, lse, wide, lse)
    launch.merge(wide, lse, wide, lse, wide, lse, indices)
    rows.copy_rows(q, q, indices)
    rows.copy_statistics(lse, lse, (lse, lse), indices)
    rows.add_to_rows(wide, indices, wide)
    rows.take_rows(k, v, indices, torch.cat([k, v], -1))
    rows.add_rows(k, k, indices, indices, k)
    rows.copy_tokens(k, k, indices.to(torch.int8))
    rows.zero_rows(k)
    rows.mask_statistic(lse)
    sum_ranks.sum_ranks(torch.stack([wide, wide], 1), wide)
    sink.apply_sink(dout, lse, lse[0, :, 0], dout)
    sink.differentiate_sink(dout, dout, lse, lse[0, :, 0], dout, lse)
    hopper_stats.row_statistics(lse, lse)
    hopper_stats.make_row_statistics(dout, dout, lse, lse)


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
