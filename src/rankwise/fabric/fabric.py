"""`Fabric`: the imperative form: a loop that you write, on the strategies and precisions of the Trainer."""

from __future__ import annotations

import operator
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from rankwise.checks import check_choice, check_is_a, check_keywords, check_value, checked_list
from rankwise.compatibility.names import FABRIC_ATTRIBUTES, missing_attributes, refuse_variables
from rankwise.errors import ConfigurationError, LifecycleError
from rankwise.fabric.backward import BackwardChecks
from rankwise.fabric.checkpoint import check_filters, checkpoint_of, restore_object, restore_state
from rankwise.fabric.user_functions import call_callbacks, check_function, launching_itself, run_function
from rankwise.fabric.wrappers import (
    FabricDataLoader,
    FabricModule,
    FabricOptimizer,
    check_set_up,
    fabric_optimizer,
    plain_optimizer,
    split_loaders,
)
from rankwise.loggers import Logger
from rankwise.loggers.base import finalize_all
from rankwise.loggers.names import created_loggers
from rankwise.loggers.values import numbers
from rankwise.precision import configured_optimizers
from rankwise.process_group.collectives import Reduction
from rankwise.process_group.lone_calls import collectives_refused_after_failure
from rankwise.registry import bound_strategy
from rankwise.seed import given_seed, seed_everything
from rankwise.strategies import AutoStrategy, SingleDeviceStrategy, Strategy
from rankwise.strategies.agreement import check_ranks_agree, fingerprint_of, share_model, share_states
from rankwise.strategies.collectives import errors_shared
from rankwise.strategies.module_wrapping import uncompiled
from rankwise.strategies.open_job import begin_job

T = TypeVar("T")
_BACKWARD = ("gradient", "retain_graph", "create_graph", "inputs")  # of Tensor.backward, in order


def _of_strategy(path: str) -> Any:
    """Return a property that reads `path`, an attribute of the strategy."""
    return property(operator.attrgetter(f"strategy.{path}"))


class Fabric:
    """Run a training loop of your own on the processes of a strategy; the names are Lightning's.

    Wrap what the loop uses: `setup` modules and optimizers, `setup_dataloaders` loaders; call `backward`
    instead of `loss.backward()`. With several processes, `launch` the function with the loop first.

    A subclass may define `run(self, ...)`: calling it launches it.

    Args:
        accelerator: `"auto"`, `"cpu"`, `"cuda"` or `"gpu"`.
        strategy: a registered name, or an instance, whose own arguments must not contradict the others.
        devices: processes on this node: a number, `"auto"` or device indices.
        num_nodes: nodes; `"auto"` for as many as were started.
        precision: as for the Trainer; None uses the strategy's.
        plugins: a cluster environment (or its name), a precision, a checkpoint IO, a strategy; one of each.
        callbacks: one object or a list, with any methods, which `call` calls.
        loggers: one, its name, or a list of them.

    Attributes:
        strategy: the strategy, bound: the given one, or a copy of it, as the Trainer's.
        device: this process's device.
        accelerator: its kind: `"cpu"` or `"cuda"`.
        global_rank, local_rank: the number of this process in the job, and on its node.
        node_rank: the number of this node.
        world_size: the number of processes in the job.
        is_global_zero: whether this is the first process of the job.
        loggers: all loggers.
        callbacks: all callbacks.

    Raises:
        InvalidArgumentError, InvalidTypeError, UnknownNameError, ConfigurationError: for wrong arguments.
        WorldSizeMismatchError: when other processes exist than were asked for.
    """

    device: torch.device = _of_strategy("root_device")
    accelerator: str = _of_strategy("root_device.type")
    global_rank: int = _of_strategy("global_rank")
    local_rank: int = _of_strategy("local_rank")
    node_rank: int = _of_strategy("node_rank")
    world_size: int = _of_strategy("world_size")
    is_global_zero: bool = _of_strategy("is_global_zero")

    def __init__(
        self,
        *,
        accelerator: str = "auto",
        strategy: str | Strategy = "auto",
        devices: Any = "auto",
        num_nodes: Any = "auto",
        precision: str | int | None = None,
        plugins: Any = None,
        callbacks: Any = None,
        loggers: Logger | str | list[Logger | str] | None = None,
    ) -> None:
        refuse_variables("Fabric", "LT_", ("LT_ACCELERATOR", "LT_PRECISION", "LT_STRATEGY"))
        self.callbacks: list[Any] = checked_list("callbacks", callbacks, object)
        self.loggers: list[Logger] = created_loggers("loggers", loggers, ".")
        given = {"accelerator": accelerator, "devices": devices, "num_nodes": num_nodes}
        self.strategy: Strategy = bound_strategy(strategy, precision, plugins, **given)
        if self.strategy.gradient_weighting == "samples":
            raise ConfigurationError(
                message='gradient_weighting="samples" cannot be used with Fabric: it does not see which '
                "batch a loss belongs to.",
                remedy='gradient_weighting="logged", and fabric.backward(loss, weight=n).',
            )
        self.strategy.precision.device_type = self.strategy.root_device.type
        self._modules: list[nn.Module] = []
        self._optimizers: list[Optimizer] = []
        self._checks = BackwardChecks(self.strategy)
        self._is_open = False  # whether a job without a function runs
        self._finalizer: weakref.finalize[Any, Any] | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if (run := vars(cls).get("run")) is not None:
            cls.run = launching_itself(run)  # type: ignore[method-assign]  # calling it launches it

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run in every process of the strategy; a subclass defines it."""
        raise ConfigurationError(
            message=f"{type(self).__name__} does not define run().",
            remedy="define run(self, ...) in a subclass of Fabric, or call fabric.launch(function).",
        )

    @property
    def logger(self) -> Logger:
        """The first logger."""
        if not self.loggers:
            raise ConfigurationError(
                message="This Fabric has no logger.", remedy="Fabric(loggers=CSVLogger(...))."
            )
        return self.loggers[0]

    @overload
    def launch(self, function: None = None) -> None: ...

    @overload
    def launch(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T: ...

    def launch(self, function: Callable[..., T] | None = None, *args: Any, **kwargs: Any) -> T | None:
        """Run `function(fabric, *args, **kwargs)` on every rank.

        Without a function every rank runs the rest of the script, with strategy `"ddp"` and where an outer
        launcher (torchrun) has started the processes; a second such call does nothing.

        Args:
            function: the function to run; it takes the Fabric first.
            args: its further arguments.
            kwargs: its keyword arguments.

        Returns:
            Global rank 0's value, as `Strategy.launch`.

        Raises:
            InvalidTypeError: for a function that cannot be called with the Fabric.
            WorkerError: when a rank failed; all other ranks have ended by then.
            LifecycleError: in a launched function.
            LaunchRefusedError, NotPicklableError: when nothing could be started.
        """
        if function is None:
            if self._must_be_launched():
                begin_job(self.strategy)
                share_states(self.strategy, self.loggers)
                self._is_open = True
            return None
        check_function(function)
        if self._is_open:
            return function(self, *args, **kwargs)
        value: T = self.strategy.launch(run_function, self, function, args, kwargs)
        return value

    def _must_be_launched(self) -> bool:
        strategy = self.strategy
        is_alone = isinstance(strategy, (AutoStrategy, SingleDeviceStrategy))
        needs_others = strategy.world_size > 1 or not is_alone
        return needs_others and not strategy.is_in_job and not dist.is_initialized()

    def _check_launched(self, call: str) -> None:
        if self._must_be_launched():
            raise LifecycleError(
                call=f"Fabric.{call}",
                state="not launched",
                needed="the processes of the strategy",
                remedy="fabric.launch() before it, or fabric.launch(main) with the loop in main(fabric).",
            )

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the first process of each node only."""
        if self.local_rank == 0:
            print(*args, **kwargs)  # noqa: T201  what the user asks for

    # Every rank must call each collective, in the same order. A group of None is `data_parallel_group`.

    def barrier(self, name: str | None = None) -> None:
        """Wait until every rank has called this."""
        self._check_launched("barrier()")
        self.strategy.barrier(name)

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Return rank `src`'s value on every rank."""
        self._check_launched("broadcast()")
        return self.strategy.broadcast(obj, src)

    def all_gather(self, data: Any, group: dist.ProcessGroup | None = None, sync_grads: bool = False) -> Any:
        """Gather tensors from every rank, as `(world_size, *)`; unchanged without a process group."""
        self._check_launched("all_gather()")
        return self.strategy.all_gather(data, group, sync_grads)

    def all_reduce(self, data: T, group: dist.ProcessGroup | None = None, reduce_op: Reduction = "mean") -> T:
        """Return tensors or numbers reduced over the ranks; the input does not change."""
        self._check_launched("all_reduce()")
        return self.strategy.all_reduce(data, group, reduce_op)

    def rank_zero_first(self, local: bool = False) -> AbstractContextManager[None]:
        """Return a block that rank zero (with `local`, that of each node) runs before the others."""
        self._check_launched("rank_zero_first()")
        return self.strategy.rank_zero_first(local)

    def setup(
        self,
        module: nn.Module,
        *optimizers: Optimizer,
        scheduler: Any = None,
        move_to_device: bool = True,
        _reapply_compile: bool = True,
    ) -> Any:
        """Prepare a module and its optimizers for training. Collective: every rank must call this.

        Args:
            module: moved to this rank's device, converted to the precision, and wrapped if there are several
                ranks. A compiled module is compiled within its wrapper.
            optimizers: of the module's parameters, which stay the same objects.
            scheduler: a learning rate scheduler of one of the optimizers, returned as it is.
            move_to_device: with False the module must be on the device already.
            _reapply_compile: only True is accepted.

        Returns:
            The `FabricModule`; with optimizers a tuple: it, the `FabricOptimizer`s, and the scheduler if
            there is one.

        Raises:
            InvalidTypeError, InvalidArgumentError, ConfigurationError: for objects that cannot be prepared,
                or were already.
            LifecycleError: before the launch.
            RankMismatchError: when the ranks have different modules or versions.
        """
        if scheduler is not None and not optimizers:
            raise ConfigurationError(
                message="setup() got a scheduler without an optimizer.",
                remedy="module, optimizer, scheduler = fabric.setup(module, optimizer, scheduler=scheduler).",
            )
        _check_not_set_up("optimizer", optimizers, Optimizer, FabricOptimizer)
        wrapped = self.setup_module(module, move_to_device, _reapply_compile)
        prepared = self._setup_optimizers(optimizers, scheduler)
        self.call("on_after_setup", fabric=self, module=wrapped)
        if not optimizers:
            return wrapped
        return (wrapped, *prepared, *([] if scheduler is None else [scheduler]))

    def setup_module(
        self, module: nn.Module, move_to_device: bool = True, _reapply_compile: bool = True
    ) -> FabricModule:
        """Prepare a module alone, as `setup` does."""
        self._check_launched("setup()")
        _check_not_set_up("module", [module], nn.Module, FabricModule)
        original = uncompiled(module)
        expected = "True: a compiled module is compiled within its wrapper"
        check_value("_reapply_compile", False, _reapply_compile or original is module, expected)
        elsewhere = [name for name, each in original.named_parameters() if each.device != self.device]
        if elsewhere and not move_to_device:
            raise ConfigurationError(
                message=f"move_to_device=False, but {elsewhere[0]!r} is not on this rank's device.",
                facts=f"{len(elsewhere)} parameters are not on {self.device}, where the wrapper needs them.",
                remedy="leave it out, or call fabric.to_device(module) first.",
            )
        check_ranks_agree(self.strategy, fingerprint_of(original, given_seed()))
        wrapped = self.strategy.setup_module(module)
        if wrapped is module:
            share_model(self.strategy, original)  # a wrapper does that itself
        self._checks.add_module(wrapped)
        self._modules.append(original)
        return FabricModule(wrapped, self.strategy, self._checks.guarded)

    def setup_optimizers(self, *optimizers: Optimizer) -> Any:
        """Prepare optimizers alone, after their modules; return the one, or a tuple of them."""
        self._check_launched("setup_optimizers()")
        if not optimizers:
            raise ConfigurationError(message="setup_optimizers() got none.", remedy="pass the optimizers.")
        _check_not_set_up("optimizer", optimizers, Optimizer, FabricOptimizer)
        prepared = self._setup_optimizers(optimizers, None)
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def _setup_optimizers(self, optimizers: Iterable[Optimizer], scheduler: Any) -> list[Any]:
        """Return the wrapped optimizers; the precision configures them with all earlier ones."""
        new, precision = list(optimizers), self.strategy.precision
        if not new:
            return []
        self.strategy.on_after_setup_optimizers(new)
        module = self._modules[0] if len(self._modules) == 1 else nn.ModuleList(self._modules)
        used = configured_optimizers(precision, module, [*self._optimizers, *new])
        if scheduler is not None and getattr(scheduler, "optimizer", None) not in (*used, None):
            raise ConfigurationError(
                message="The scheduler changes another optimizer than those that were given.",
                facts=f"its optimizer is a {type(scheduler.optimizer).__name__}.",
                remedy="pass the optimizer with which the scheduler was created.",
            )
        self._optimizers = used
        for optimizer in used[-len(new) :]:
            if optimizer.state:  # of an earlier training, where the parameters were before
                optimizer.load_state_dict(optimizer.state_dict())
        return [fabric_optimizer(each, self.strategy, self.callbacks) for each in used[-len(new) :]]

    def setup_dataloaders(
        self,
        *dataloaders: DataLoader[Any],
        use_distributed_sampler: bool = True,
        move_to_device: bool = True,
        each_sample_once: bool = False,
    ) -> Any:
        """Split loaders over the ranks. Collective: every rank must call this.

        The n-th batches of all ranks together are the n-th batch of one process whose batch size is the sum
        of the ranks' batch sizes. A shuffled order changes with each iteration over the loader.

        Args:
            dataloaders: torch's loaders.
            use_distributed_sampler: with False loaders are used as they are, on every rank.
            move_to_device: whether batches are moved to this rank's device.
            each_sample_once: for evaluation: each sample is on exactly one rank, and ranks may have one
                batch less than others. Otherwise, for training, every rank has the same number of samples:
                the first are repeated, or the last left out if the loader drops its last batch.

        Returns:
            The `FabricDataLoader`, or a list of them.

        Raises:
            InvalidTypeError: for a loader that is not a `DataLoader`.
            UnshardableLoaderError: when a loader cannot be split.
            RankMismatchError: when the ranks have different data.
        """
        self._check_launched("setup_dataloaders()")
        if not dataloaders:
            raise ConfigurationError(message="setup_dataloaders() got none.", remedy="pass the loaders.")
        for loader in dataloaders:
            check_is_a("dataloaders", loader, DataLoader, "a torch DataLoader that was not set up before")
        if each_sample_once and not use_distributed_sampler:
            raise ConfigurationError(
                message="each_sample_once=True has no effect with use_distributed_sampler=False.",
                remedy="leave out one of the two.",
            )
        parts: list[tuple[Any, int | None]] = [(loader, None) for loader in dataloaders]
        if use_distributed_sampler:
            parts = split_loaders(dataloaders, self.strategy, each_sample_once=each_sample_once)
        prepared = [
            FabricDataLoader(loader, self.strategy, seed=seed, move_to_device=move_to_device)
            for loader, seed in parts
        ]
        return prepared[0] if len(prepared) == 1 else prepared

    def backward(
        self, tensor: Tensor, *args: Any, weight: float | Tensor | None = None, **kwargs: Any
    ) -> None:
        """Compute gradients of a loss, scaled as the precision says; the ranks' gradients are averaged.

        Args:
            tensor: the loss.
            args: for `Tensor.backward`, by position.
            weight: with `gradient_weighting="logged"`, the number of items that the loss is the mean of;
                within `gradient_sync_context`.
            kwargs: for `Tensor.backward`.

        Raises:
            ConfigurationError: with a weight that nothing asks for, or without one that is asked for.
        """
        self._check_launched("backward()")
        options = {**dict(zip(_BACKWARD, args, strict=False)), **kwargs}
        check_keywords("Fabric.backward()", options, (*_BACKWARD, "weight"))
        with self._checks.running(weight):
            loss = tensor if weight is None else self.strategy.weighted_loss(tensor, weight)
            self.strategy.backward(loss, **options)

    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> AbstractContextManager[Any]:
        """Return a context in which backward passes average nothing, for accumulating gradients.

        Forward and backward pass of a microbatch belong in it; the last microbatch's do not.

        Raises:
            InvalidTypeError: when the module was not set up.
        """
        return self.strategy.no_backward_sync(check_set_up(module).wrapped, enabled)

    @contextmanager
    def gradient_sync_context(
        self, module: nn.Module, *optimizers: Any, is_final_microbatch: bool = True
    ) -> Iterator[None]:
        """Average gradients as the strategy's `sync_mode` and `gradient_weighting` say.

        The block is for a microbatch's forward and backward pass; see `Strategy.gradient_sync_context`.

        Args:
            module: the result of `setup`.
            optimizers: the ones that step after the window.
            is_final_microbatch: whether they step next.
        """
        own = [plain_optimizer(each) for each in optimizers]
        wrapped = check_set_up(module).wrapped
        sync = self.strategy.gradient_sync_context(wrapped, own, is_final_microbatch)
        with self._checks.in_sync_context(), sync:
            yield

    def clip_gradients(
        self,
        module: nn.Module,
        optimizer: Any,
        clip_val: float | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor | None:
        """Limit the gradients of the optimizer's parameters: each element, or their norm.

        Args:
            module: the module that has the parameters.
            optimizer: its gradients are unscaled first.
            clip_val: the limit of each element.
            max_norm: the limit of the norm.
            norm_type: the p of the norm, `inf` for the largest value.
            error_if_nonfinite: whether a norm that is infinite or NaN is an error.

        Returns:
            With `max_norm`, the norm before clipping.

        Raises:
            ConfigurationError: with both limits, and with none.
            FloatingPointError: see `error_if_nonfinite`.
        """
        check_is_a("module", module, nn.Module)
        if (clip_val is None) == (max_norm is None):
            raise ConfigurationError(
                message=f"clip_gradients() got clip_val={clip_val!r} and max_norm={max_norm!r}.",
                remedy="give one of the two.",
            )
        inner, precision = plain_optimizer(optimizer), self.strategy.precision
        if max_norm is None:
            precision.clip_gradients_value(inner, clip_val or 0.0)
            return None
        norm = precision.clip_gradients_norm(inner, max_norm, float(norm_type))
        if error_if_nonfinite and not norm.isfinite():
            raise FloatingPointError(f"The norm of the gradients is {norm.item()}.")
        return norm

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the precision's context, for computations outside of a module that was set up."""
        return self.strategy.precision.forward_context()

    def to_device(self, obj: T) -> T:
        """Move a module, in place, or every tensor of a nested container, to this rank's device."""
        if isinstance(obj, nn.Module):
            return self.strategy.module_to_device(obj)  # type: ignore[return-value]  # the same object
        return self.strategy.batch_to_device(obj)

    def save(
        self,
        path: str | os.PathLike[str],
        state: Mapping[str, Any],
        filter: Mapping[str, Callable[[str, Any], bool]] | None = None,  # noqa: A002  Lightning's name
    ) -> None:
        """Write a checkpoint on global rank 0. Collective: every rank must call this.

        Args:
            path: the file; it is replaced only when the new one is complete.
            state: modules, optimizers and other objects with a `state_dict`, and values.
            filter: by key of `state`, a function of name and value that says whether a value is saved.

        Raises:
            CheckpointError: on every rank, when it could not be written.
        """
        self._check_launched("save()")
        check_is_a("state", state, dict)
        if filter is not None:
            check_filters(filter, state)
        self.strategy.sync_models()  # where the ranks' models differ, between averages
        checkpoint = checkpoint_of(self.strategy, state, filter or {})
        self.strategy.save_checkpoint(checkpoint, path)

    def load(
        self,
        path: str | os.PathLike[str],
        state: dict[str, Any] | None = None,
        strict: bool = True,
        *,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read a checkpoint; restore objects in place. Every rank must call this.

        Args:
            path: the file.
            state: as for `save`; values in it are replaced.
            strict: whether it is an error if the file lacks a key of `state`, or of a module's state.
            weights_only: None or True; files are always loaded without running code.

        Returns:
            The part of the checkpoint that was not restored; all of it without a state.

        Raises:
            CheckpointError: on every rank, when the file cannot be used.
        """
        if not state:
            return self._read(path, weights_only)
        check_is_a("state", state, dict, 'a dictionary of objects; for one object alone, "load_raw"')
        checkpoint = self._read(path, weights_only)
        with errors_shared(self.strategy):
            return restore_state(self.strategy, os.fspath(path), checkpoint, state, strict=strict)

    def load_raw(
        self, path: str | os.PathLike[str], obj: Any, strict: bool = True, *, weights_only: bool | None = None
    ) -> None:
        """Load a file that holds the state of one module or optimizer. Every rank must call this."""
        check_is_a("obj", obj, (nn.Module, Optimizer), "a module or an optimizer")
        checkpoint = self._read(path, weights_only)
        with errors_shared(self.strategy):
            restore_object(self.strategy, os.fspath(path), "content", obj, checkpoint, strict=strict)

    def _read(self, path: str | os.PathLike[str], weights_only: bool | None) -> dict[str, Any]:
        self._check_launched("load()")
        expected = "True or None: a file that runs code when it is read is refused"
        check_choice("weights_only", weights_only, (None, True), expected)
        with errors_shared(self.strategy):
            checkpoint = self.strategy.load_checkpoint(path)
        return checkpoint  # noqa: RET504  type checkers do not know that the block raises

    def call(self, hook_name: str, *args: Any, **kwargs: Any) -> None:
        """Call a method of each callback that has it.

        Keyword arguments that the method does not take are left out. In `on_exception` a save writes this
        rank's own state, and other collectives are refused, as in the Trainer.

        Raises:
            InvalidTypeError: for an attribute of this name that cannot be called.
        """
        is_after_failure = hook_name == "on_exception" and self.world_size > 1
        with collectives_refused_after_failure() if is_after_failure else nullcontext():
            call_callbacks(self.callbacks, hook_name, *args, **kwargs)

    def log(self, name: str, value: Any, step: int | None = None) -> None:
        """Record a number in all loggers, on global rank 0."""
        self.log_dict({name: value}, step)

    def log_dict(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Record numbers in all loggers, on global rank 0."""
        if not self.is_global_zero or not self.loggers:
            return
        if self._finalizer is None:
            self._finalizer = weakref.finalize(self, finalize_all, list(self.loggers), "success")
        for logger in self.loggers:
            logger.log_metrics(numbers(metrics, ""), step)

    @staticmethod
    def seed_everything(seed: Any = None, workers: bool | None = None, **options: Any) -> int:
        """Seed all generators of random numbers; see `rankwise.seed_everything`."""
        return seed_everything(seed, workers=True if workers is None else workers, **options)

    vars().update(missing_attributes("Fabric", FABRIC_ATTRIBUTES))

    def end(self, status: str) -> None:
        """End the loggers, and forget the modules and optimizers of a launch; `launch` does that."""
        self._optimizers, self._modules = [], []
        if self._finalizer is not None and self._finalizer.detach():
            self._finalizer = None
            finalize_all(self.loggers, status)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the objects that belong to this process."""
        return {**self.__dict__, "_finalizer": None, "_is_open": False, "_modules": [], "_optimizers": []}


def _check_not_set_up(name: str, values: Iterable[object], kind: type, wrapper: type) -> None:
    """Raise unless the user's own objects are given; an object that was set up before is refused."""
    for value in values:
        check_is_a(name, value, kind)
        expected = f"one that was not set up before: {name}s are set up once"
        check_value(name, type(value).__name__, not isinstance(value, wrapper), expected)
