"""The plans and predicted times of recorded calls, with the layouts of their commits."""

import json
import re
from functools import cache

import numpy as np
from folders import DATA

from canon import Layout, fast
from canon.bench.measuring import Settings
from canon.bench.schedule_peers import schedules
from canon.bench.shapes import shape_of
from canon.costs.kernel_costs import MEMORY, RATES
from canon.costs.network import ASSUMED, seconds
from canon.costs.schedule_costs import plan_of

LAYOUTS = json.loads((DATA / "layouts_of_records.json").read_text())["results"]
# Of commit 3ce3ee2, and of a later one without its wait for the start of a cast: casts began after
# the kernel beside them. The records of two GPUs are as old in part, but fit better without this.
LATE = re.compile("eight|not_begun")


@cache
def layout_of(text, ranks):
    """Return the layout of magi attention in the records of a shape."""
    shape = shape_of(text)
    if held := LAYOUTS.get(f"{text} on {ranks}"):
        return Layout([[range(*tokens) for tokens in own] for own in held], shape.n)
    return fast.dispatch(shape.mask, ranks)


@cache
def planned(text, ranks, name):
    """Return the plan of a schedule of the records."""
    shape = shape_of(text)
    place = (shape.h, shape.g), shape.d, 1
    if name.startswith("mesh"):
        _, columns, function = re.findall(r"\d+|ring|strided", name)
        options = {"mask": shape.mask, "layout": Layout.zigzag(shape.n, ranks)}
        return plan_of(f"{function}_attention", *place, int(columns), **options)
    (attend,) = (x.attend for x in schedules(shape, ranks, Settings()) if x.name == name)
    layout = {"layout": layout_of(text, ranks)} if name.startswith("magi") else {}
    return plan_of(attend.func.__name__, *place, **(attend.keywords | layout))


def predicted(record, text, ranks, name, links=ASSUMED, rates=RATES):
    """Return the seconds of the forward pass and of both."""
    times = []
    for one, rate in zip(planned(text, ranks, name)[1:], rates, strict=True):
        rows, messages = one.rows, one.messages.copy()
        if LATE.search(record) and name.startswith("magi"):
            rows = rows + MEMORY * np.append(seconds(links, messages[0].max(-1))[1:], 0)
            messages[0, 1:] = 0
        times.append(one._replace(rates=rate, rows=rows, messages=messages).seconds(links)[0])
    return times[0], sum(times)
