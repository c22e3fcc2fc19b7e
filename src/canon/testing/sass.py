"""What the assembler made of products that run by themselves: nothing may write a register of one that is under way.

A warpgroup starts products (HGMMA in SASS), goes on, and waits for them later. Meanwhile their accumulators are being
written, and the left factor, where registers hold it, is being read. Which registers these are is the assembler's choice, so
no test of a kernel's source can see a mistake, and a run shows it now and then.

    HGMMA.64x128x16.F32 R88, R152, gdesc[UR16].tnspB, R88      R88 to R151, from R152 to R155 and shared memory
    HGMMA.64x128x16.F32 R88, R156, gdesc[UR16].tnspB, R88, gsb0    the last product of a group
    WARPGROUP.DEPBAR.LE gsb0, 0x1                              at most the newest group is under way

The listing is read from top to bottom: what follows a jump is taken for what comes next, and no loop is gone round.
"""

import re

_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(.*?)\s*;")
_PRODUCT = re.compile(r"HGMMA\.64x(\d+)x\S*F32\S* R(\d+)(?:, R(\d+))?")
_WRITES = re.compile(r"(\S+)\s+(?:P\w,\s*)?R(\d+)\b")  # its first operand, behind one predicate at most
_FOUR, _TWO = re.compile(r"\.128|88\.4"), re.compile(r"\.64|\.WIDE|88\.2|^CS2R(?!\.32)")  # how many it writes
_READS = ("BAR", "BRX", "CALL", "JMX", "NANOSLEEP", "RED", "RET", "ST", "WARPSYNC")  # that operand, too


def waits(listing: str) -> int:
    """How often a disassembled kernel waits for products."""
    return listing.count("WARPGROUP.DEPBAR")


def overwritten(listing: str) -> list[str]:
    """The instructions of a disassembled kernel that write registers of a product under way, each with its address."""
    groups: list[set[int]] = []  # registers of those under way, oldest first
    started: set[int] = set()  # and of the one whose products are still being started
    found = []
    for address, instruction in _INSTRUCTION.findall(listing):
        if product := _PRODUCT.match(instruction):
            columns, result = int(product[1]), int(product[2])
            started |= set(range(result, result + columns // 2))
            started |= set(range(int(product[3]), int(product[3]) + 4)) if product[3] else set()
            if "gsb0" in instruction:
                groups, started = [*groups, started], set()
        elif wait := re.match(r"WARPGROUP\.DEPBAR\.LE gsb0, (\w+)", instruction):
            groups = groups[max(0, len(groups) - int(wait[1], 16)) :]
        elif (written := _WRITES.match(instruction)) and not instruction.startswith(_READS):
            first = int(written[2])
            number = 4 if _FOUR.search(written[1]) else 2 if _TWO.search(written[1]) else 1
            if set(range(first, first + number)) & started.union(*groups):
                found.append(f"{address}: {instruction}")
    return found
