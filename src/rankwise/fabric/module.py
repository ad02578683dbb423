"""`FabricModule`: the user's module, called through the strategy's wrapper and in its precision."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from types import MethodType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import Self

from rankwise.checks import check_is_a, check_value
from rankwise.errors import ConfigurationError
from rankwise.gradient_sync.parameters import share_buffers
from rankwise.nested import map_tensors
from rankwise.precision import Precision
from rankwise.strategies import Strategy

_FORWARD_METHODS = ("training_step", "validation_step", "test_step", "predict_step")


@final
class FabricModule(nn.Module):
    """A module that `Fabric.setup` has set up: calls go through the strategy's wrapper and the precision.

    Attributes, parameters, submodules and `state_dict` are the user's module's, without a prefix; what
    is assigned is assigned there. A copy, also by pickle, is a copy of the user's module.

    Without gradients (`torch.no_grad()`) a call runs the user's module itself, so that ranks may evaluate
    different numbers of batches. The first such call after a forward pass with gradients is Collective if
    the module has buffers: all ranks get rank 0's.
    """

    def __init__(self, wrapped: nn.Module, strategy: Strategy, on_output: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        original = strategy.unwrap_module(wrapped)
        own = self.__dict__
        own["_wrapped"], own["_original"], own["_strategy"] = wrapped, original, strategy
        own["_on_output"] = on_output
        own["_forward_methods"] = set(_FORWARD_METHODS)
        own["_must_share_buffers"] = False
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            own[name] = original.__dict__[name]  # the same objects, so that both modules have the same parts

    @property
    def module(self) -> nn.Module:
        """The user's module."""
        original: nn.Module = self.__dict__["_original"]
        return original

    @property
    def wrapped(self) -> nn.Module:
        """The result of the strategy's `setup_module`."""
        wrapped: nn.Module = self.__dict__["_wrapped"]
        return wrapped

    @property
    def _is_wrapped(self) -> bool:
        return isinstance(self.wrapped, DistributedDataParallel)

    @property
    def training(self) -> bool:
        """Whether the user's module is in training mode."""
        return self.module.training

    @training.setter
    def training(self, mode: bool) -> None:
        if "_original" in self.__dict__:
            self.module.training = mode

    def train(self, mode: bool = True) -> Self:
        """Set training or evaluation mode of the module and its wrapper."""
        self.wrapped.train(mode)
        self.module.train(mode)
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Apply a function to the user's module and its submodules."""
        self.module.apply(fn)
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward pass."""
        return self._run(None, args, kwargs)

    def mark_forward_method(self, method: MethodType | str) -> None:
        """Let a method of the module run through the wrapper and in the precision, as `forward` does.

        Raises:
            InvalidTypeError: for anything else than a method or its name.
            InvalidArgumentError: for `forward` itself, and for a name that is not a method of the module.
        """
        check_is_a("method", method, (MethodType, str), "a method or its name")
        name = method if isinstance(method, str) else method.__name__
        is_method = name != "forward" and inspect.ismethod(getattr(self.module, name, None))
        expected = f"the name of a method of {type(self.module).__name__}, other than forward"
        check_value("method", name, is_method, expected)
        self.__dict__["_forward_methods"].add(name)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of the user's module."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state into the user's module, in place.

        Raises:
            InvalidArgumentError: with `assign=True`, which would replace the parameters.
        """
        expected = "False: the wrapper and the optimizers have the parameters that exist"
        check_value("assign", assign, not assign, expected)
        result = self.module.load_state_dict(state_dict, strict=strict)
        self.__dict__["_strategy"].precision.reload_weights()
        return result

    def _run(self, method: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        precision: Precision = self.__dict__["_strategy"].precision
        args, kwargs = precision.convert_input((args, kwargs))
        with precision.forward_context():
            output = self._callee(method)(*args, **kwargs)
        output = precision.convert_output(output)
        map_tensors(output, self.__dict__["_on_output"])
        return output

    def _callee(self, method: str | None) -> Callable[..., Any]:
        """Return what runs a method of the module, or for None its forward pass."""
        strategy: Strategy = self.__dict__["_strategy"]
        if not self._is_wrapped or torch.is_grad_enabled():
            self.__dict__["_must_share_buffers"] = self._is_wrapped
            return self.wrapped if method is None else partial(strategy.call_method, self.wrapped, method)
        if self.__dict__["_must_share_buffers"]:
            share_buffers(self.wrapped)
            self.__dict__["_must_share_buffers"] = False
        return self.module if method is None else getattr(self.module, method)

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__
        if "_original" not in own:
            raise AttributeError(name)
        value = getattr(self.module, name)
        if not inspect.ismethod(value) or value.__self__ is not self.module:
            return value
        if name in own["_forward_methods"]:
            return lambda *args, **kwargs: self._run(name, args, kwargs)
        changes_numbers = type(own["_strategy"].precision) is not Precision
        return self._checked(value) if self._is_wrapped or changes_numbers else value

    def __setattr__(self, name: str, value: Any) -> None:
        if "_original" in self.__dict__:
            setattr(self.module, name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.module, name)

    def _checked(self, method: MethodType) -> Callable[..., Any]:
        """Return a method that raises when it computes with gradients, which would not be averaged."""
        name = f"{type(self.module).__name__}.{method.__name__}"

        def refuse(*_: object) -> None:
            if torch.is_grad_enabled():
                raise ConfigurationError(
                    message=f"{name}() computes with the module outside of its forward pass.",
                    facts="so its gradients would not be averaged over the ranks, and it would not run in "
                    "the precision that was asked for.",
                    remedy=f"module.mark_forward_method({method.__name__!r}) after fabric.setup().",
                )

        @functools.wraps(method)
        def checked(*args: Any, **kwargs: Any) -> Any:
            handles = [each.register_forward_pre_hook(refuse) for each in self.module.modules()]
            try:
                return method(*args, **kwargs)
            finally:
                for handle in handles:
                    handle.remove()

        return checked

    def __reduce__(self) -> tuple[Callable[[nn.Module], nn.Module], tuple[nn.Module]]:
        return _same, (self.module,)

    def __dir__(self) -> list[str]:
        return sorted({*dir(type(self)), *dir(self.module)})


def _same(module: nn.Module) -> nn.Module:
    return module


def check_set_up(module: Any) -> FabricModule:
    """Return a module that was set up; refuse any other."""
    remedy = "module = fabric.setup(module)"
    check_is_a("module", module, FabricModule, "what Fabric.setup() returned", remedy)
    checked: FabricModule = module
    return checked
