"""Claims about compiled kernels, without a GPU: each compiles for sm_80 and sm_90, spills no
register and fits the SM.
"""

import json
from dataclasses import asdict

import pytest
from programs import printed
from sampling import covering

from canon.fast.kernels.gluon.config import LONG_TABLE
from canon.testing.compile import SHARED_LIMIT, main_cases
from canon.testing.sass import overwritten, skipped_waits, waits

ARCHITECTURES = 90, 80
ATTENTION = "forward", "dq", "dkdv", "fused", "parts"
# Triton assembles the PTX of a kernel, and so does the report, whose statistics are tested: the
# first time is left out.
PROGRAM = """
import json, os

from triton.backends.nvidia.compiler import CUDABackend

from canon.fast.kernels.gluon import few_queries_launch
from canon.testing import compile

CUDABackend.make_cubin = lambda *_: b""
if os.environ.get("CANON_CASES") != "all":
    few_queries_launch.P_ROWS = few_queries_launch.P_ROWS[-1:]  # has the most registers
every, numbers = compile.main_cases, json.loads(os.environ["NUMBERS"])
compile.main_cases = lambda arch: [every(arch)[number] for number in numbers]
compile.main()
"""


def values(case):
    """Return what a sample of all cases has at least once: of each backend each kernel, kind of
    call, dtype and width, and each attention kernel on each architecture.
    """
    kinds = "describable", "short", "seen", "ordered", "plain", "key_order"
    of_backend = {case.kernel, (case.d, case.dv), (case.dtype, case.arch)}
    of_backend |= {name for name in kinds if getattr(case, name)}
    of_arch = case.kernel, case.kernel in ATTENTION and case.arch
    return {of_arch, *((case.backend, value) for value in of_backend)}


def compiled(arch, cache):
    """Compile kernels in a process without the interpreter. Return their cases and reports."""
    every = main_cases(arch)
    both = covering([case for each in ARCHITECTURES for case in main_cases(each)], values)
    cases = [case for case in both if case.arch == arch]
    numbers = json.dumps([every.index(case) for case in cases])
    output = printed(PROGRAM, "--arch", arch, NUMBERS=numbers, TRITON_CACHE_DIR=str(cache))
    return cases, [json.loads(line) for line in output.splitlines()]


def allowed_spill(report):
    """Return the bytes that may spill.

    float32 and float64 use no tensor cores, so their speed matters less. For dq at D = 256, every
    Triton configuration without spills is slower. Triton kernels that visit keys in order have a
    second loop, for tiles with several bands. Triton 3.7, unlike 3.6, spills in dkdv on sm_90 if
    Q has no tensor descriptor."""
    case = report["case"]
    kernel = case["backend"], case["kernel"], case["describable"]
    if case["backend"] == "triton" and case["key_order"]:
        return 96
    if case["dtype"] in ("float32", "float64"):
        return 32
    if kernel == ("triton", "dq", True) and case["d"] == 256:
        return 28
    return 24 if kernel == ("triton", "dkdv", False) and case["arch"] == 90 else 0


def expected_waits(report):
    """Return the waits for MMAs of all warpgroups: in the machine code, added by the assembler, and
    in a branch without MMA.

    The forward kernel rescales O after it issues S. In the first step of a work tile, one warpgroup
    waits for S there."""
    case, config = report["case"], report["config"]
    if case["backend"] != "gluon":  # Triton places them
        return report["waits"], 0, 0
    if case["kernel"] == "few_queries":
        return {"weights_kernel": 1, "sums_kernel": 2}.get(report["name"], 0), 0, 0
    if case["kernel"] != "forward":
        each = {"dq": 3, "dkdv": 4, "dkdv_hdim256": 2, "fused": 4 if case["d"] > 64 else 5}
        return 2 * each[case["kernel"]], 0, 0
    if config["plain"] or config["stale_maximum"]:
        return (3 if config["plain"] else 8) * config["rows"] // 64, 0, 0
    rescales_early = case["dv"] <= 128
    return 14 + rescales_early, int(rescales_early), int(rescales_early)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_kernels_compile_without_spills_and_fit_the_device(arch, tmp_path):
    cases, reports = compiled(arch, tmp_path)
    assert len(reports) >= len(cases)
    waits_of = lambda r: (r["waits"], r["waits_added"], r["waits_skipped"])
    for fault, found in (
        ("registers are spilled", lambda r: r["spilled"] > allowed_spill(r)),
        ("shared_bytes returns less memory", lambda r: r["shared"] > r["expected_shared"]),
        ("more memory than a CTA may have", lambda r: r["shared"] > SHARED_LIMIT[arch]),
        (
            "an SM cannot hold two CTAs of this kernel",
            lambda r: r["name"] == "weights_kernel" and 2 * (r["shared"] + 1024) > 228 * 1024,
        ),
        ("the assembler warns", lambda r: r["warnings"]),
        ("registers of MMAs in flight are written", lambda r: r["overwritten"]),
        ("the assembler moves waits for MMAs", lambda r: waits_of(r) != expected_waits(r)),
    ):
        wrong = [r for r in reports if found(r)]
        assert not wrong, f"{fault}: {wrong}"
    long = [r["config"] for r in reports if r["case"]["seen"]]
    assert long == [
        asdict(LONG_TABLE[case.kernel, (case.d, case.dv)][case.seen]) for case in cases if case.seen
    ]
    merges = [r["updates_after_reading"] for r in reports if r["name"] == "merge_kernel"]
    expected = [True, True] * sum(case.kernel == "rows" for case in cases)
    assert merges == expected, "a warp writes lse in place before other warps have read it"


MMAS = """
        /*0010*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR32], RZ, !UPT, gsb0 ;
        /*0020*/                   HGMMA.64x32x16.F32 R88, R152, gdesc[UR16].tnspB, R88 ;
        /*0030*/                   HGMMA.64x32x16.F32 R88, R156, gdesc[UR16].tnspB, R88, gsb0 ;
        /*0040*/                   {first} ;
        /*0050*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0060*/                   {second} ;
        /*0070*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0080*/              @!P3 {third} ;
"""
UNTOUCHED = {
    "first": "FADD R0, R24, R152",
    "second": "FMUL R24, R24, R55",
    "third": "MUFU.EX2 R152, R88",
}


BRANCH = """
        /*0010*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR32], RZ, !UPT, gsb0 ;
        /*0020*/              @!P0 BRA `(.L_x_6) ;
        /*0030*/                   FMUL R88, R88, R1 ;
        /*0040*/                   {last} ;
.L_x_6:
        /*0050*/                   HGMMA.64x64x16.F32.BF16 R88, R152, gdesc[UR12].tnspB, R88, gsb0 ;
"""


def test_a_wait_at_the_end_of_a_branch_is_found():
    wait = BRANCH.format(last="WARPGROUP.DEPBAR.LE gsb0, 0x0")
    assert skipped_waits(wait) == 1
    mma = (
        "        /*0028*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR36], R24, gsb0 ;\n"
    )
    for other in (
        BRANCH,
        wait.replace("BRA `(.L_x_6)", "NOP"),
        wait.replace("        /*0030*/", mma + "        /*0030*/"),
    ):
        assert skipped_waits(other) == 0


def test_waits_and_registers_of_mmas_in_flight_are_found():
    assert waits(MMAS) == 2
    assert not overwritten(MMAS.format_map(UNTOUCHED))
    for number, instruction in (
        ("first", "FADD R55, R0, R1"),  # the last of S
        ("first", "F2FP.BF16.F32.PACK_AB R159, R0, R1"),  # the last of P
        ("first", "LDG.E.64 R151, desc[UR4][R2.64]"),  # reaches into P
        ("first", "LDSM.16.M88.4 R149, [R2]"),
        ("first", "CS2R R23, SRZ"),
        ("second", "FADD R152, R0, R1"),
        ("second", "@P0 FADD.FTZ R103, R0, R1"),  # the last of O
    ):
        assert overwritten(MMAS.format_map(UNTOUCHED | {number: instruction})), instruction
    for number, instruction in (
        ("first", "STG.E desc[UR4][R2.64], R88"),
        ("first", "FSETP.GT.AND P0, PT, R88, R24, PT"),
        ("first", "CS2R.32 R23, SR_CLOCKLO"),
        ("second", "FADD R160, R88, R152"),
        ("second", "FADD R104, R88, R152"),
    ):
        assert not overwritten(MMAS.format_map(UNTOUCHED | {number: instruction})), instruction
