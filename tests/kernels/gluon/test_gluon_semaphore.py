"""The dq semaphore as compiled, in both adders: acquire, proxy fence, addition, wait for its
completion, release.

The simulator detects a missing wait, fence or release in the source (test_gluon_protocol.py). Only
the PTX shows the instructions. No GPU is needed.
"""

import re

from programs import printed

PROGRAM = """
from canon.testing import compile
ptx = []
compile._report = lambda case, used, binary, expected: ptx.append(binary.asm["ptx"])
case = next(case for case in compile.main_cases(90) if case.ordered and case.d == 128)
compile.compile_case(case)
print(ptx[0])
"""
INSTRUCTIONS = {
    r"ld\.acquire\.gpu\.global\.s32": "a",
    r"fence\.proxy\.async\.global": "f",
    r"cp\.reduce\.async\.bulk\.tensor": "+",
    r"cp\.async\.bulk\.wait_group 0": "w",
    r"st\.release\.gpu\.global\.s32": "r",
    r"ld\.volatile\.global": "v",
}


def test_dq_is_added_after_an_acquire_and_published_by_a_release():
    found = re.findall("|".join(INSTRUCTIONS), printed(PROGRAM))
    order = "".join(
        letter
        for text in found
        for name, letter in INSTRUCTIONS.items()
        if re.fullmatch(name, text)
    )
    # the compiler may place any block of a loop first
    rotations = [order[i:] + order[:i] for i in range(len(order))]
    assert any(re.fullmatch(r"(a+f\++wr){2}", x) for x in rotations), order
