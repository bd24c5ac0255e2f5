"""`with checked(mesh):` the block in which tensors are checked, and the step of an optimizer in it.

Modes of torch hold per thread, so the backward pass is checked on CPUs alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import _get_current_function_mode_stack

from common.comm import hooks
from common.comm.checked.meeting import Meeting
from common.comm.checked.operations import Operations
from common.comm.checked.report import RULES, Report
from common.comm.checked.table import Table
from common.comm.checked.traffic import Places, Traffic
from common.comm.checked.types import I, Kind, P, V
from common.comm.group import Group
from common.comm.mesh import Mesh


class Checker:
    """Parts of the checker of one block."""

    def __init__(self, over: Mesh | Group, timeout: float, rules: Sequence[str]) -> None:
        places, world = places_of(over), over.world if isinstance(over, Mesh) else over
        axes = {axis: 1 + max(place[axis] for place in places.values()) for axis in places[world.ranks[0]]}
        self.table, self.report = Table(axes), Report(world.rank, rules)
        self.meeting = Meeting(self.table, self.report, timeout)
        self.operations = Operations(self.table, self.report, self.meeting.use)
        self.traffic = Traffic(self.table, self.report, self.meeting, places)
        self.call, self.collective = self.traffic.call, self.traffic.collective  # for hooks.py

    def entered(self, module: nn.Module, _: Any) -> None:
        """Learn the names of the parameters of a module that is called from outside."""
        for name, p in module.named_parameters():
            if p not in self.table.names:
                self.table.names[p] = name

    def before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Check that the gradient of a parameter is complete along every axis that replicates the parameter."""
        if hooks.active is not self:
            return
        for p in (p for given in optimizer.param_groups for p in given["params"] if p.grad is not None):
            lies = self.table.kinds(p)
            for axis, kind in self.table.kinds(p.grad).items():
                if kind == P or (kind != I and lies[axis].letter in "IR"):
                    gradient = f"the gradient of {self.table.describe(p)}"
                    self.report.wrong("step", gradient, axis, f"is {kind} when the optimizer steps")
        self.operations.paused = True  # the optimizer treats all gradients alike

    def after_step(self, *_: Any) -> None:
        """Begin a new step."""
        self.operations.paused = False
        self.meeting.used.clear()
        self.table.forget()


def places_of(over: Mesh | Group) -> Places:
    """Return the place of each rank along the axes that have more than one."""
    if isinstance(over, Group):
        return {rank: {over.axis: i} for i, rank in enumerate(over.ranks)}
    axes = [axis for axis, n in over.shape.items() if n > 1]
    return {
        rank: {axis: over.coordinates(i)[axis] for axis in axes} for i, rank in enumerate(over.world.ranks)
    }


def replace(until: ExitStack, owner: Any, name: str, value: object) -> None:
    """Set an attribute of a module or class; reset it when `until` ends."""
    until.callback(setattr, owner, name, vars(owner)[name])
    setattr(owner, name, value)


@contextmanager
def checked(over: Mesh | Group, timeout: float = 30.0, rules: Sequence[str] = RULES) -> Iterator[Checker]:
    """Check all tensors and collectives inside the block. Raises Misplaced at the first violation.

    over: the mesh, or the group of its only axis. timeout: seconds that a rank waits for the others before a
    collective. rules: those to check. All ranks enter the block.
    """
    checker, engine = Checker(over, timeout, rules), torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    apply = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]

    def applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
        out = apply(cls, *args, **kwargs)
        checker.traffic.applied(out)
        return out

    def backward(*args: Any, **kwargs: Any) -> Any:  # torch switches modes off inside of y.backward()
        on = checker.operations in _get_current_function_mode_stack()
        with nullcontext() if on else checker.operations:
            return engine(*args, **kwargs)

    with ExitStack() as stack:
        replace(stack, hooks, "active", checker)
        replace(stack, torch.autograd, "_engine_run_backward", backward)
        replace(stack, torch.autograd.Function, "apply", classmethod(applied))
        stack.callback(lambda: [hook.remove() for hook in checker.table.hooks])
        for hook in (
            register_module_forward_pre_hook(checker.entered),
            register_optimizer_step_pre_hook(checker.before_step),
            register_optimizer_step_post_hook(checker.after_step),
        ):
            stack.callback(hook.remove)
        stack.enter_context(checker.operations)
        yield checker


def declare(x: Tensor, **kinds: str) -> Tensor:
    """Say how a tensor that nothing computed lies: declare(a_rD, dp="S"). Returns x; does nothing when not checking.

    A parameter lies as its placement says; declare what that cannot: declare(p, dp="V"), of replicas that differ.
    """
    if hooks.active is not None:
        table, said = hooks.active.table, {axis: Kind(kind) for axis, kind in kinds.items()}
        if isinstance(x, nn.Parameter):
            table.declared[x] = said
        table.note(x, {**table.kinds(x), **said})
    return x


def own(x: Tensor) -> Tensor:
    """Say that a partial sum is used as this rank's own numbers from here on: P to V. Returns x."""
    if hooks.active is not None:
        table: Table = hooks.active.table
        table.note(x, {axis: V if kind == P else kind for axis, kind in table.kinds(x).items()})
    return x
