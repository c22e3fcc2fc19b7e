"""Recover the kernel backend of a call when activation checkpointing recomputes it.

`torch.utils.checkpoint` runs a function twice: in the forward pass, and again inside the backward pass. The second run is in
another thread and after `with backend(...)` has ended. So each call's choice is stored with the surrounding checkpoint:

    mode                   the checkpoint is       a call in it is identified by
    use_reentrant=False    its frame object        the number of tensors saved in it before the call
    use_reentrant=True     its autograd node       the number of earlier calls in it

The frame is found in torch's hooks for saved tensors, the node on the call stack.
"""

import inspect
import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch

_choices: WeakKeyDictionary[Any, dict[int, str | None]] = WeakKeyDictionary()  # [checkpoint][place of the call]
_forced: WeakSet[Any] = WeakSet()  # checkpoints with a call whose backend was chosen explicitly


def choice_of_call(chosen: str | None) -> str | None:
    """Return the backend of a new call: ``chosen``, or in a recomputation that of the original call.

    Raises RuntimeError in nested checkpoints if a backend was chosen in one: the original call cannot be identified there.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)  # pyright: ignore[reportAttributeAccessIssue]
    found = _place(hooks)
    if found is None:
        if hooks is not None:
            _check_unambiguous(chosen)
        return chosen
    checkpoint, place, again = found
    choices = _choices.setdefault(checkpoint, {})
    if again:
        return choices.get(place, chosen)
    _check_unambiguous(chosen)
    choices[place] = chosen
    if chosen is not None:
        _forced.add(checkpoint)
    return chosen


def _check_unambiguous(chosen: str | None) -> None:
    """Raise RuntimeError if this may be a recomputation that looks like a first call, and a backend was chosen before."""
    if chosen is None and _forced and torch._C._current_graph_task_id() != -1:
        raise RuntimeError(
            "a checkpoint inside a checkpoint, or below other saved-tensor hooks, is recomputed after backend(...) was used: "
            "put `with backend(...)` inside the function that is checkpointed"
        )


def _place(hooks: tuple[Callable, Callable] | None) -> tuple[Any, int, bool] | None:
    """Return the checkpoint that surrounds this call, the call's place in it, and whether this is a recomputation."""
    if hooks is not None:
        pack = inspect.unwrap(hooks[0])
        names = pack.__code__.co_freevars if inspect.isfunction(pack) else ()
        held = {name: cell.cell_contents for name, cell in zip(names, pack.__closure__ or (), strict=True)}
        if hasattr(frame := held.get("frame"), "weak_holders"):
            return frame, len(frame.weak_holders), False
        if "target_frame_ref" in held and (frame := held["target_frame_ref"]()) is not None:
            return frame, frame.recomp_counter[held["gid"]], True
        return None
    again = torch._C._current_graph_task_id() != -1
    if (again or (_choices_made[0] and not torch.is_grad_enabled())) and (node := _reentrant_node(again)) is not None:
        counts = node.__dict__.setdefault("canon_calls", {False: 0, True: 0})
        counts[again] += 1
        return node, counts[again], again
    return None


def _reentrant_node(again: bool) -> Any:
    """Return the autograd node of the innermost checkpoint with use_reentrant=True on the call stack."""
    module = sys.modules.get("torch.utils.checkpoint")
    if module is None:
        return None
    function = module.CheckpointFunction.backward if again else module.CheckpointFunction.forward
    code, frame = inspect.unwrap(function).__code__, sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            return frame.f_locals.get("ctx")
        frame = frame.f_back
    return None


_choices_made = [False]  # whether `backend` was ever used; until then calls are not counted


def note_choice() -> None:
    """Record that `backend` was used."""
    _choices_made[0] = True
