"""Find instructions in SASS that write a register of an asynchronous MMA in flight: the assembler
chooses registers, and a run shows a mistake only sometimes.

    HGMMA.64x128x16.F32 R88, R152, gdesc[UR16].tnspB, R88         writes R88 to R151, reads R152 on
    HGMMA.64x128x16.F32 R88, R156, gdesc[UR16].tnspB, R88, gsb0   the last MMA of a group
    WARPGROUP.DEPBAR.LE gsb0, 0x1                                 all but the newest group are over

Jumps are not followed, and loops are not repeated.
"""

import re

_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(.*?)\s*;")
_MMA = re.compile(r"HGMMA\.64x(\d+)x\S*F32\S* R(\d+)(?:, R(\d+))?")
# the first operand, after at most one predicate
_WRITES = re.compile(r"(\S+)\s+(?:P\w,\s*)?R(\d+)\b")
# number of registers
_FOUR, _TWO = re.compile(r"\.128|88\.4"), re.compile(r"\.64|\.WIDE|88\.2|^CS2R(?!\.32)")
_SKIPPED_WAIT = re.compile(
    r"BRA "
    r"`\((\.L\w+)\)(?:(?!HGMMA).)*?WARPGROUP\.DEPBAR[^\n]*\n\s*\1:",
    re.DOTALL,
)
# these read the first operand
_READS = ("BAR", "BRX", "CALL", "JMX", "NANOSLEEP", "RED", "RET", "ST", "WARPSYNC")


def waits(listing: str) -> int:
    """Return the number of waits for MMAs."""
    return listing.count("WARPGROUP.DEPBAR")


def skipped_waits(listing: str) -> int:
    """Return the number in branches without MMA."""
    return len(_SKIPPED_WAIT.findall(listing))


def overwritten(listing: str) -> list[str]:
    """Return such instructions, with addresses."""
    groups: list[set[int]] = []  # registers of the groups in flight, oldest first
    started: set[int] = set()  # registers of the incomplete group
    found = []
    for address, instruction in _INSTRUCTION.findall(listing):
        if mma := _MMA.match(instruction):
            columns, result = int(mma[1]), int(mma[2])
            started |= set(range(result, result + columns // 2))
            started |= set(range(int(mma[3]), int(mma[3]) + 4)) if mma[3] else set()
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
