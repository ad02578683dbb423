"""`GradientSync`: how a strategy averages gradients; checked when it is made, kept from job to job."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rankwise.errors import ConfigurationError, InvalidArgumentError, InvalidTypeError, UnknownNameError
from rankwise.gradient_sync.averaging import ModelAveraging, refuse_distributed_optimizer
from rankwise.gradient_sync.built_in_hooks import allreduce_hook
from rankwise.gradient_sync.comm_hook import CommHook
from rankwise.gradient_sync.comm_hooks import HookPlace, read_state, state_for_rank, write_state
from rankwise.gradient_sync.modes import GradientSyncMode, resolve_sync_mode
from rankwise.gradient_sync.parameters import ParametersOf, parameters_of, trained_parameters
from rankwise.gradient_sync.sync_context import Pause, synchronised
from rankwise.gradient_sync.unused import UnusedWatch
from rankwise.gradient_sync.weight_carrier import WeightCarrier
from rankwise.gradient_sync.weights import WeightAccumulator, WeightedReduction

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["WEIGHTINGS", "GradientSync"]

WEIGHTINGS = ("samples", "logged")
States = list[list[dict[str, Any]]]


@final
class GradientSync:
    """How gradients are averaged: when, through which hook, with which weights.

    Args:
        sync_mode: a `GradientSyncMode`, its name, or `"auto"`.
        comm_hook: a name with options, or a function; None for DDP's own average.
        comm_state: the hook's state.
        comm_wrapper: what is put around the hook.
        model_averaging_period: under post-local SGD, after how many steps models are averaged.
        gradient_weighting: `"samples"`, `"logged"` or None.
        ddp_kwargs: what DDP is told.

    Raises:
        UnknownNameError, UnknownArgumentError, InvalidArgumentError, InvalidTypeError, ConfigurationError:
        for what cannot work, or not together.
    """

    def __init__(
        self,
        *,
        sync_mode: Any = "auto",
        comm_hook: Any = None,
        comm_state: Any = None,
        comm_wrapper: Any = None,
        model_averaging_period: int | None = None,
        gradient_weighting: str | None = None,
        ddp_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        ddp_options = ddp_kwargs or {}
        self.mode = resolve_sync_mode(
            sync_mode, finds_unused_parameters=bool(ddp_options.get("find_unused_parameters"))
        )
        self.hook = CommHook.checked(comm_hook, comm_state, comm_wrapper)
        self.weighting = check_weighting(gradient_weighting)
        self.period = _check_period(model_averaging_period, self.hook)
        self._check_together(ddp_options)
        self._saved: States = []  # of a checkpoint or an earlier job: by rank, then by wrapped module
        self._own: list[dict[str, Any]] = []  # the same, of this very rank
        self._clear()

    def _clear(self) -> None:
        self._states: list[Any] = []
        self._group: dist.ProcessGroup | None = None
        self._averaging: ModelAveraging | None = None
        self._watches: dict[int, UnusedWatch] = {}
        self._carriers: dict[int, WeightCarrier] = {}
        self._carrier: WeightCarrier | None = None  # of the module whose block was begun last
        is_compressed = self.hook is not None and not self.hook.is_plain
        self.weights = WeightAccumulator(is_bounded=is_compressed) if self.weighting == "logged" else None

    def _check_together(self, ddp_options: Mapping[str, Any]) -> None:
        if self.mode is GradientSyncMode.FORCED_SYNC:
            if self.hook is not None:
                raise ConfigurationError(
                    message=f'comm_hook {self.hook.name!r} would never run with sync_mode="forced_sync".',
                    facts="a hook changes how DDP averages gradients, and forced_sync averages them itself.",
                    remedy='leave out one of them, or take sync_mode="single_auto_sync".',
                )
            if ddp_options.get("static_graph"):
                raise ConfigurationError(
                    message='static_graph=True cannot work with sync_mode="forced_sync".',
                    facts="DDP records a static graph in a backward pass that it reduces itself.",
                    remedy='leave out one of them, or take sync_mode="single_auto_sync".',
                )
        if self.period is not None and self.mode is GradientSyncMode.MULTI_AUTO_SYNC:
            raise ConfigurationError(
                message='Post-local SGD cannot work with sync_mode="multi_auto_sync".',
                facts="its hook counts how often gradients are averaged, which is then in each microbatch; "
                "models are averaged by optimizer steps, and the two would begin at different times. "
                '"auto" stands for this mode where find_unused_parameters=True.',
                remedy='DDPStrategy(sync_mode="single_auto_sync", ...).',
            )
        self._has_carrier = self._check_weighted_hook() and not ddp_options.get("mixed_precision")

    def _check_weighted_hook(self) -> bool:
        """Make sure that the hook can average logged weights with gradients; return whether it needs no help.

        Raises:
            ConfigurationError: when it cannot.
        """
        if self.weighting != "logged" or self.hook is None:
            return self.weighting == "logged" and self.mode is not GradientSyncMode.FORCED_SYNC
        if self.hook.is_linear:
            return self.hook.is_plain
        raise ConfigurationError(
            message=f'gradient_weighting="logged" cannot work with comm_hook {self.hook.name!r}'
            f"{'' if self.hook.wrapper is None else ' and this comm_wrapper'}.",
            facts="what ranks send is a sum of gradients times weights, divided by all weights afterwards. "
            "Only a plain average, compressed or not, is as good for that; PowerSGD, say, would remember "
            "errors in units of weights that the next step no longer has.",
            remedy='gradient_weighting="samples", which goes with every hook; or comm_hook="fp16_compress" '
            'or "bf16_compress".',
        )

    # ------------------------------------------------------------------ a job

    @property
    def ddp_defaults(self) -> dict[str, Any]:
        """What DDP is told unless the user says something else: weights are divided by bucket by bucket."""
        return {"gradient_as_bucket_view": True} if self._has_carrier else {}

    def prepare(self, module: nn.Module) -> None:
        """Adapt to a module: in float16 gradients times weights would overflow."""
        is_half = any(parameter.dtype is torch.float16 for parameter in trained_parameters(module))
        if self.weights is not None and is_half:
            self.weights.bound()

    def wrapped(self, module: nn.Module, wrap: Callable[[], Any]) -> Any:
        """Return what `wrap()` makes of a module, in which it finds what weights travel by."""
        carrier = WeightCarrier.of(module, self.weights) if self._has_carrier else None
        if carrier is None:
            return wrap()
        with carrier.attached_to(module):
            wrapped = wrap()
            if isinstance(wrapped, DistributedDataParallel) and carrier.is_in(wrapped):
                self._carriers[id(wrapped)] = carrier
        return wrapped

    def attach(self, wrapped: DistributedDataParallel, local_world_size: int) -> None:
        """Have a wrapped module reduce its gradients in this way."""
        group = self._group = wrapped.process_group
        world_size = dist.get_world_size(group)
        if wrapped.find_unused_parameters and self.mode is not GradientSyncMode.FORCED_SYNC:
            self._watches[id(wrapped)] = UnusedWatch(wrapped)
        if self.weights is not None:
            self.weights.group = group
        weighted_hook = self._weighted_hook(wrapped)
        if weighted_hook is not None:
            weighted_hook.attach(wrapped, HookPlace(group, local_world_size))
        elif self.hook is not None:
            state = self.hook.attach(wrapped, HookPlace(group, min(local_world_size, world_size)))
            self._restore(len(self._states), state)
            self._states.append(state)
        if self.period is not None and self.hook is not None and self._averaging is None:
            self._averaging = ModelAveraging(self.period, self.hook.first_local_step, group)
            self._averaging.steps = self._saved_here(0).get("averaging", [])

    def _weighted_hook(self, wrapped: DistributedDataParallel) -> CommHook | None:
        """Return the hook by which weights travel; None where there are none, or they do without."""
        if self.weights is None or self.mode is GradientSyncMode.FORCED_SYNC or id(wrapped) in self._carriers:
            return None
        others = allreduce_hook if self.hook is None else self.hook.function
        return CommHook.checked(WeightedReduction(self.weights, wrapped.process_group, others))

    def detach(self) -> None:
        """End a job; what the hooks remember is kept for the next one."""
        self._own = self.own_states()
        self._clear()

    def context(
        self,
        module: nn.Module,
        optimizers: Iterable[Optimizer],
        is_final_microbatch: bool,
        pause: Pause,
        parameters_of: ParametersOf = parameters_of,
    ) -> AbstractContextManager[None]:
        """Return the block for a microbatch's forward and backward pass; see `gradient_sync_context`.

        `pause(module, enabled)` is a block in which DDP reduces nothing if enabled.
        `parameters_of(optimizer)` are the parameters that it updates, be it through copies of them.
        """
        self._carrier = self._carriers.get(id(module))
        block = synchronised(
            module,
            optimizers,
            is_final_microbatch,
            self.mode,
            pause=pause,
            group=self._group,
            weights=self.weights,
            carrier=self._carrier,
            parameters_of=parameters_of,
        )
        watch = self._watches.get(id(module))
        return (
            block if watch is None or watch.is_done else watch.around(block, is_final_microbatch, self.mode)
        )

    def weighted(self, loss: Tensor, weight: float | Tensor) -> Tensor:
        """Return the loss times its weight, and note that.

        Raises:
            ConfigurationError: when weights were not asked for.
            InvalidArgumentError: for a weight that cannot be one.
        """
        if self.weights is None:
            raise ConfigurationError(
                message="A loss was given a weight, but nothing asks for weights.",
                facts=f"gradient_weighting={self.weighting!r}.",
                remedy='DDPStrategy(gradient_weighting="logged").',
            )
        is_first = not self.weights.is_used
        number = self.weights.add(weight)
        if self._carrier is None:
            return loss * number
        return self._carrier.weighted(loss, number, is_first=is_first)

    def with_weights_of(self, wrapped: nn.Module, loss: Tensor) -> Tensor:
        """Return a loss of zero that reaches what a wrapped module's weights travel by, as others do."""
        carrier = self._carriers.get(id(wrapped))
        return loss if carrier is None else carrier.weighted(loss, 0.0, is_first=True)

    def check_optimizers(self, optimizers: Iterable[Optimizer]) -> None:
        """Make sure that the optimizers can do with averaged models.

        Raises:
            ConfigurationError: when they cannot.
        """
        for optimizer in optimizers if self.period is not None else ():
            refuse_distributed_optimizer(optimizer)

    def after_step(self, optimizer: Optimizer) -> None:
        """Average the model where it is time."""
        if self._averaging is not None:
            self._averaging.after_step(optimizer)

    def finish(self) -> None:
        """End training: have one model on all ranks."""
        if self._averaging is not None:
            self._averaging.finish()

    # ------------------------------------------------------------------ what hooks remember

    def own_states(self) -> list[dict[str, Any]]:
        """Return what this rank's hooks remember, by wrapped module; [] where they remember nothing."""
        states = [read_state(state) for state in self._states]
        if self._averaging is not None and states:
            states[0]["averaging"] = self._averaging.steps
        return states if any(states) else []

    def gathered_states(self) -> States:
        """Return what all ranks' hooks remember, on rank 0 (elsewhere []).

        Collective: every rank must call this.
        """
        own = self.own_states()
        if not dist.is_initialized() or not self._states:
            return [own or self._own] if own or self._own else self._saved
        if all(isinstance(state, (dist.ProcessGroup, type(None))) for state in self._states):
            return []
        gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(own, gathered)
        return gathered if gathered is not None and any(gathered) else []

    def load_states(self, states: States) -> None:
        """Take back what `gathered_states` returned on rank 0, now or for the next job."""
        self._saved, self._own = states, []
        for number, state in enumerate(self._states):
            self._restore(number, state)
        if self._averaging is not None:
            self._averaging.steps = self._saved_here(0).get("averaging", [])

    def _restore(self, number: int, state: Any) -> None:
        write_state(state, self._saved_here(number))

    def _saved_here(self, number: int) -> dict[str, Any]:
        """Return what was saved for this rank and a wrapped module; {} for nothing."""
        if number < len(self._own):
            return self._own[number]
        by_rank = [states[number] for states in self._saved if number < len(states)]
        return state_for_rank(by_rank, dist.get_rank(), dist.get_world_size()) if by_rank else {}

    def __getstate__(self) -> dict[str, Any]:
        """Travel without what belongs to a process group."""
        bare: dict[str, Any] = {
            "_states": [],
            "_group": None,
            "_averaging": None,
            "_watches": {},
            "_carriers": {},
            "_carrier": None,
            "weights": None,
        }
        saved = [self._own] if self._own and not self._saved else self._saved
        return {**self.__dict__, **bare, "_saved": saved, "_own": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._clear()


def check_weighting(value: object) -> str | None:
    """Return the name of a weighting in lower case.

    Raises:
        InvalidTypeError: when it is no string.
        UnknownNameError: when there is none of that name.
    """
    if value is None:
        return None
    if not isinstance(value, str):
        raise InvalidTypeError(
            argument="gradient_weighting", value=value, expected="'samples', 'logged' or None"
        )
    if value.lower() not in WEIGHTINGS:
        raise UnknownNameError(kind="gradient_weighting", name=value, known=WEIGHTINGS)
    return value.lower()


def _check_period(period: Any, hook: CommHook | None) -> int | None:
    is_local = hook is not None and hook.is_local_sgd
    if period is None:
        if is_local:
            raise ConfigurationError(
                message="Post-local SGD needs a model_averaging_period: without it the models drift apart.",
                remedy='DDPStrategy(comm_hook="post_localsgd", model_averaging_period=4).',
            )
        return None
    if isinstance(period, bool) or not isinstance(period, int):
        raise InvalidTypeError(argument="model_averaging_period", value=period, expected="a number of steps")
    if period < 1:
        raise InvalidArgumentError(argument="model_averaging_period", value=period, expected="1 or more")
    if not is_local:
        raise ConfigurationError(
            message="model_averaging_period is for post-local SGD: the models of other hooks stay the same.",
            facts=f"comm_hook is {None if hook is None else hook.name!r}.",
            remedy='DDPStrategy(comm_hook="post_localsgd", model_averaging_period=4).',
        )
    return period
