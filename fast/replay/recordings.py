"""Prepared passes: the launches of a pass are recorded once, and then replayed by one call into C.

A pass is a function of tensors that only launches kernels, by the kinds of the tensors (shapes,
strides, dtypes, alignment, device) and the other arguments. A call of a kind runs as written while
a `Recorder` notes

    launches       the compiled kernel, its grid and its arguments, each address as (buffer, offset)
    temporaries    tensors that the pass allocates: a replay allocates one workspace for all of them
    zeros          memory that is cleared: by one memset for all temporaries
    plans          tensors of `device_plan`: the prepared pass keeps them alive

A pass that takes `Cells` is recorded in its first call, also for other masks (`sharing`); others,
such as the steps of a schedule, in their second one: a mask of one step costs no recording.

A replay works on any stream, inside a captured CUDA graph, and in several threads at a time. A pass
runs as written in each call (`PreparedPass.reason`) if it does anything else with tensors, uses one
of unknown origin, or launches no kernel.
"""

import copy
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import partial, reduce
from operator import or_

import torch
from torch import Tensor

from canon.fast.device import chosen_backend
from canon.fast.kernels import launcher
from canon.fast.kernels.backend import FORCED
from canon.fast.replay.native import native_module, packed
from canon.fast.replay.recorder import Launch, NotReplayable, Place, Recorder, Zero
from canon.fast.replay.sharing import LookUps, uploads_in
from canon.fast.tables.cells import Cells
from canon.fast.tables.device_plans import Upload, keep_for_stream, observed
from canon.masks import plan_cache
from canon.masks.mask import Mask

ALIGNMENT = 256  # bytes, of each temporary
MOST_RECORDINGS = 8  # of passes that differ only in their masks
UNSEEN = "the pass launches no kernel that was seen"
ONCE = "called once"


class PreparedPass:
    """The launches of one pass, for tensors of one kind, and the plans ``held``."""

    def __init__(self, recorder: Recorder, uploads: list[Upload], look_ups: LookUps | None = None):
        self.device, self.look_ups = recorder.tensors[0].device, look_ups
        self.reason, self.bytes = recorder.reason, 0
        if not any(isinstance(x, Launch) for x in recorder.operations):
            self.reason = self.reason or UNSEEN
        self._run: Callable[..., None] = lambda *_: None
        if not self.reason:
            try:
                self._pack(recorder)
            except NotReplayable as error:
                self.reason = str(error)
        self._hold([] if self.reason else recorder.plans, uploads)

    def _hold(self, plans: list[Tensor], uploads: list[Upload]) -> None:
        self.held, self._uploads = tuple(plans), uploads
        streams = {one.handle for one in uploads}  # memory is kept for the stream of its upload
        self._streams = streams if len(streams) == 1 else set()
        self._addresses = [x.data_ptr() for x in plans]

    def of(self, mask: Mask) -> "PreparedPass | None":
        """Return the launches for another mask, or None if its plans need others."""
        if self.look_ups is None or (found := self.look_ups.of(mask)) is None:
            return None
        return self.holding(*(([], []) if self.reason else found))

    @staticmethod
    def load() -> None:
        """Compile what a recording needs: only the first call waits for a compiler."""
        with suppress(NotReplayable):
            native_module()

    def holding(self, plans: list[Tensor], uploads: list[Upload]) -> "PreparedPass":
        made = copy.copy(self)
        made._hold(plans, uploads)
        return made

    @property
    def nbytes(self) -> int:
        return 2048 if self.reason else 8192

    def replay(self, tensors: tuple[Tensor, ...], addresses: list[int]) -> None:
        """Enqueue the launches on the current stream. ``addresses``: of the tensors."""
        room = (
            torch.empty(self.bytes, dtype=torch.uint8, device=self.device) if self.bytes else None
        )
        stream = torch._C._cuda_getCurrentRawStream(self.device.index)
        # Stream 0 is never captured.
        if stream not in self._streams or (stream and torch._C._cuda_isCurrentStreamCapturing()):
            keep_for_stream(*self.held)
            self._streams.add(stream)
        if self._uploads:
            self._uploads = [one for one in self._uploads if one.wait()]
        addresses += self._addresses
        addresses.append(0 if room is None else room.data_ptr())
        if torch._C._cuda_getDevice() == self.device.index:
            self._run(stream, *addresses)
        else:
            with torch.cuda.device(self.device):
                self._run(stream, *addresses)

    def _pack(self, recorder: Recorder) -> None:
        offsets, zeros, self.bytes = _laid_out(recorder)
        workspace = len(recorder.tensors) + len(recorder.plans)

        def place(p: Place) -> Place:
            return Place(workspace, offsets[-1 - p.slot] + p.offset) if p.slot < 0 else p

        operations = list(recorder.operations)
        if zeros:
            operations.insert(0, Zero(Place(workspace, 0), zeros))
        self._run = self._bound(operations, place)

    @staticmethod
    def _bound(
        operations: list[Launch | Zero], place: Callable[[Place], Place]
    ) -> Callable[..., None]:
        native = native_module()
        try:
            return partial(native.run, native.make(tuple(packed(x, place) for x in operations)))
        except ValueError as error:  # a limit of `replay.c`
            raise NotReplayable(str(error)) from error


def _laid_out(recorder: Recorder) -> tuple[dict[int, int], int, int]:
    offsets, zeros, end = {}, 0, 0
    for number in sorted(
        range(len(recorder.temporaries)), key=lambda number: number not in recorder.zeroed
    ):
        offsets[number] = end
        end += -(-recorder.temporaries[number].untyped_storage().nbytes() // ALIGNMENT) * ALIGNMENT
        if number in recorder.zeroed:
            zeros = end
    return offsets, zeros, end


# by device type; tests change it
REPLAYED: dict[str, type[PreparedPass]] = {"cuda": PreparedPass}


def replayed(
    body: Callable[..., None],
    tensors: tuple[Tensor | None, ...],
    *options: Hashable,
    kind: Hashable = None,
) -> None:
    """Do what ``body(*tensors, *options)`` does, from its recording if there is one.

    ``body`` writes into given tensors on the device of the first one. All else that the launches
    depend on is in ``options`` or `_settings`. ``kind``: the caller's key for it, or None.
    """
    first = tensors[0]
    prepared = REPLAYED.get(first.device.type)
    # launches are a part of the pass being recorded
    if prepared is None or any(FORCED) or launcher.is_recording():
        body(*tensors, *options)
        return
    given = tuple([x for x in tensors if x is not None])
    addresses = [x.data_ptr() for x in given]
    if kind is None:
        kinds = [None if x is None else (x.shape, x.stride(), x.dtype) for x in tensors]
        kind = (options, *kinds, first.device)
    places = tuple([x & 15 for x in addresses]) if reduce(or_, addresses) & 15 else None
    key = (body, kind, places, _aliases(addresses), _settings(first))
    found = known = plan_cache.PLANS.get(key)
    if found is None:
        cells = next((x for x in options if isinstance(x, Cells)), None)
        if cells is None and _is_first_call(key):
            prepared.load()
            body(*tensors, *options)
            return
        recordings = None if cells is None else _recordings(body, tensors, options, addresses)
        alike = (x.of(cells.mask) for x in recordings or ())
        found = next((x for x in alike if x is not None), None)
    if found is None:
        recorder = Recorder(given)
        watched = launcher.recording(recorder), observed(recorder.planned), recorder
        with plan_cache.seen_plans() as seen, watched[0], watched[1], watched[2]:
            body(*tensors, *options)
        look_ups = None if cells is None else LookUps(cells.mask, seen, len(recorder.plans))
        plan_cache.PLANS.put(key, made := prepared(recorder, uploads_in(seen), look_ups))
        if look_ups is not None and look_ups.serves_others:
            recordings.insert(0, made.holding([], []))
            del recordings[MOST_RECORDINGS:]
    elif found.reason:
        body(*tensors, *options)
    else:
        found.replay(given, addresses)
    if found is not known:  # another mask's: the GPU computes by now
        plan_cache.PLANS.put(key, found)


def _is_first_call(key: Hashable) -> bool:
    mark = object()
    return plan_cache.PLANS.put((key, ONCE), mark) is mark


def _recordings(
    body: Callable[..., None],
    tensors: tuple[Tensor | None, ...],
    options: tuple[Hashable, ...],
    addresses: list[int],
) -> list[PreparedPass]:
    kinds = [None if x is None else (x.shape, x.stride(), x.dtype) for x in tensors]
    others = [(x.sizes, x.places) if isinstance(x, Cells) else x for x in options]
    aligned, first = [address & 15 for address in addresses], tensors[0]
    key = ("recordings", body, *others, *kinds, *aligned, first.device, _aliases(addresses))
    return plan_cache.PLANS.find((*key, _settings(first)), list)


def _settings(x: Tensor) -> tuple[Hashable, ...]:
    precision = torch.backends.cuda.matmul.fp32_precision if x.dtype is torch.float32 else None
    deterministic = torch._C._get_deterministic_algorithms()
    warns = deterministic and torch.is_deterministic_algorithms_warn_only_enabled()
    return chosen_backend(), deterministic, warns, precision


def _aliases(addresses: list[int]) -> tuple[int, ...] | None:
    """Return the index of the first equal address for each; None if all differ."""
    return None if len(set(addresses)) == len(addresses) else tuple(map(addresses.index, addresses))
