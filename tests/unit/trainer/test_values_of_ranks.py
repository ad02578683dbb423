"""Comparison of what the ranks hold by digests: in training, at its end, and before evaluation."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.utils.data import DataLoader, TensorDataset

from rankwise.callbacks import Callback, LambdaCallback, ModelCheckpoint
from rankwise.errors import ConfigurationError, InvalidArgumentError, RankMismatchError
from rankwise.process_group.rank_comparison import digest_of, has_values, joint_digest
from rankwise.trainer.checkpointing import save_stop_checkpoint
from tests.helpers.threaded import ThreadedStrategy, counted_reductions, run_ranks
from tests.process.training_tasks import quiet_trainer
from tests.unit.gradient_sync.helpers import FEATURES, Sums, fit_on_ranks, net

DATA = TensorDataset(torch.arange(24.0, dtype=torch.float64).reshape(8, FEATURES) / 24)


class Model(Sums):
    """Has parameters, a buffer, and an optimizer with a state."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.net = net(seed)
        self.register_buffer("mean", torch.zeros(3))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.1)


class Disturb(Callback):
    """Changes a value of rank 1 after the second step."""

    def __init__(self, what: str) -> None:
        self.what = what

    @torch.no_grad()
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.global_rank, batch_idx, trainer.current_epoch) != (1, 2, 0):
            return
        if self.what == "rate":
            trainer.optimizers[0].param_groups[0]["lr"] *= 2
        elif self.what == "parameter":
            module.net[0].bias[1] += 1e-15
        elif self.what == "state":
            trainer.optimizers[0].state[module.net[2].weight]["exp_avg"].mul_(2)


def fit(what: str, every: int | None, callbacks: Any = (), max_epochs: int = 1, **options: Any) -> list[int]:
    """Fit on two ranks; return after how many steps each has ended."""
    modules = [Model(), Model()]
    arguments: dict[str, Any] = {"max_epochs": max_epochs, "check_ranks_every_n_steps": every}
    has_checkpoints = any(isinstance(each, ModelCheckpoint) for each in callbacks)
    arguments |= {"callbacks": [Disturb(what), *callbacks], "enable_checkpointing": has_checkpoints}
    fit_on_ranks(modules, DataLoader(DATA, batch_size=1), options, **arguments)
    return [module.global_step for module in modules]


@pytest.mark.parametrize("every", [1, 2, 100])
@pytest.mark.parametrize(("what", "name"), [("parameter", "net.0.bias"), ("state", "net.2.weight")])
def test_a_difference_is_named(what: str, name: str, every: int) -> None:
    """The error names the first parameter that differs, at the next comparison or at the fit's end."""
    with pytest.raises(RankMismatchError) as caught:
        fit(what, every)
    assert next(iter(caught.value.differences)) == f"the values of parameter {name!r}"


@pytest.mark.parametrize("max_epochs", [1, 2])
@pytest.mark.parametrize(
    ("what", "names", "fix"),
    [
        ("parameter", ["the values of parameter 'net.0.bias'"], "change parameters and gradients alike"),
        ("rate", ["the values of parameter", "lr of parameter group 0 of optimizer 0"], "all_reduce(loss"),
    ],
)
def test_compared_by_default(what: str, names: list[str], fix: str, max_epochs: int) -> None:
    """Parameters and learning rates are compared before each epoch and at the end; the error has a cause."""
    with pytest.raises(RankMismatchError) as caught:
        fit(what, None, max_epochs=max_epochs)
    found = list(caught.value.differences)
    assert (found[0].startswith(names[0]), found[-1].startswith(names[-1])) == (True, True), found
    assert caught.value.when == ("at the end of fit" if max_epochs == 1 else "before epoch 1")
    assert fix in str(caught.value)


def test_compared_before_a_checkpoint(tmp_path: Path) -> None:
    """A model that the ranks do not have in common is not saved."""
    with pytest.raises(RankMismatchError, match="before a checkpoint"):
        fit("parameter", None, [ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=1)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step=1.ckpt", "step=2.ckpt"]


@torch.no_grad()
def save_at_stop(trainer: Any, module: Any, *_: Any) -> None:
    """Write the checkpoint of a stop while a parameter of rank 1 is another."""
    kept = module.net[0].bias.clone()
    module.net[0].bias += trainer.global_rank
    save_stop_checkpoint(trainer.context(module))
    module.net[0].bias.copy_(kept)


@pytest.mark.full
@pytest.mark.parametrize("has_checkpoints", [False, True])
def test_one_small_collective(has_checkpoints: bool, tmp_path: Path) -> None:
    """A comparison is one all-reduce of 32 bytes: before each epoch or a checkpoint, and at the fit's end."""
    sizes = []
    callbacks = [ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)] if has_checkpoints else []
    for every in (0, None):
        with counted_reductions() as counted:
            fit("nothing", every, callbacks, max_epochs=3)
        sizes.append(Counter(counted[0]))
    assert sizes[1] - sizes[0] == Counter({4: 3 + 1 + has_checkpoints})  # none twice between two batches


@pytest.mark.ranks_may_differ("rank 1 changes a parameter; the hook averages nothing, or models only")
@pytest.mark.parametrize(
    ("what", "every", "arguments"),
    [
        ("parameter", 0, {}),
        ("nothing", None, {"comm_hook": "noop"}),
        ("nothing", None, {"comm_hook": noop_hook}),
        ("nothing", None, {"comm_hook": "post_localsgd:start_localSGD_iter=1", "model_averaging_period": 3}),
    ],
    ids=["switched off", "noop", "torch's noop", "post_localsgd"],
)
def test_ranks_that_may_differ(what: str, every: int | None, arguments: dict[str, Any]) -> None:
    """Where the strategy lets models differ, or with 0, nothing is compared."""
    assert fit(what, every, max_epochs=2, **arguments) == [8, 8]


def grow(trainer: Any, module: Any) -> None:
    """Add a layer with values of the rank's own, which rank 0 shares before the next step."""
    module.added = net(trainer.global_rank)
    trainer.optimizers[0].add_param_group({"params": module.added.parameters()})


def test_without_a_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal ranks go on. New parameters are compared when all ranks have one value of them.

    The checkpoint of a stop is written, whatever the ranks hold: nothing else would be left of the run.
    """
    assert fit("nothing", 2) == fit("nothing", None, [LambdaCallback(on_train_epoch_end=grow)]) == [4, 4]
    monkeypatch.chdir(tmp_path)
    assert fit("nothing", None, [LambdaCallback(on_train_batch_end=save_at_stop)]) == [4, 4]
    assert list(tmp_path.rglob("last*.ckpt"))


def test_impossible_intervals() -> None:
    """An interval is a number of steps; post-local SGD lets models differ between averages."""
    with pytest.raises(InvalidArgumentError, match="check_ranks_every_n_steps"):
        quiet_trainer("ddp_fork", 2, check_ranks_every_n_steps=-1)
    with pytest.raises(ConfigurationError, match="averages models"):
        fit("nothing", 2, comm_hook="post_localsgd", model_averaging_period=4)


@pytest.mark.parametrize("seeds", [(0, 0), (0, 1)])
def test_evaluation_begins_with_one_model(seeds: tuple[int, int]) -> None:
    """Every rank evaluates rank 0's model."""
    modules = [Model(seed) for seed in seeds]

    def run(rank: int) -> Any:
        trainer = quiet_trainer(ThreadedStrategy(rank, 2), 2)
        trainer.test(modules[rank], DataLoader(DATA, batch_size=1))
        return [each.detach().clone() for each in modules[rank].parameters()]

    for values in run_ranks(2, run):
        torch.testing.assert_close(values, list(net(0).parameters()), rtol=0, atol=0)


@pytest.mark.parametrize("stage", ["fit", "test"])
def test_what_ddp_ignores_stays_each_ranks_own(stage: str) -> None:
    """Parameters and buffers that DDP is configured to ignore are neither compared nor shared."""
    modules: list[Any] = [Model(), Model()]

    def run(rank: int) -> Any:
        module = modules[rank]
        module._ddp_params_and_buffers_to_ignore = ["net.0.bias", "mean"]  # torch's way
        own = module.net[0].bias.requires_grad_(False), module.mean
        for value in own:
            value.fill_(rank)
        trainer = quiet_trainer(ThreadedStrategy(rank, 2), 2, max_epochs=1, check_ranks_every_n_steps=1)
        getattr(trainer, stage)(module, DataLoader(DATA, batch_size=1))
        return own

    for rank, own in enumerate(run_ranks(2, run)):
        for value in own:
            torch.testing.assert_close(value, torch.full_like(value, rank), rtol=0, atol=0)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(10),
        torch.arange(10**4).float(),
        torch.tensor(True),
        torch.randn(7, dtype=torch.float64)[1:],
        torch.randn(5, dtype=torch.complex64),
        torch.randn(9).bfloat16()[3:],
        torch.randn(4, 6).t(),
        torch.tensor([[1, 2], [3, 4]], dtype=torch.int8),
    ],
    ids=lambda tensor: f"{tensor.dtype}-{tuple(tensor.shape)}",
)
def test_digests(tensor: Tensor) -> None:
    """A digest depends on the values, their order, dtype and shape, and on nothing else."""
    digest = digest_of(tensor)
    assert digest_of(tensor.clone(memory_format=torch.contiguous_format)) == digest
    for place in (0, -1):
        other = tensor.clone().flatten()
        other[place] = ~other[place] if tensor.dtype is torch.bool else other[place] + 1
        assert digest_of(other.view(tensor.shape)) != digest
    assert digest_of(tensor.reshape(1, *tensor.shape)) != digest
    if tensor.numel() > 1:
        assert digest_of(tensor.flatten().flip(0).view(tensor.shape)) != digest


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_digests_of_many_changes(dtype: torch.dtype) -> None:
    """Changes of the highest bits alone do not cancel out: signs, and powers of two."""
    values = torch.randn(10**4).to(dtype)
    changed = [values, -values, values * 2, values.abs(), torch.cat([-values[:2], values[2:]])]
    assert len(set(map(digest_of, changed))) == len(changed)


class Quantized(Tensor):
    """Dispatches operations itself, and supports none."""

    @classmethod
    def __torch_dispatch__(cls, *arguments: Any) -> Any:
        raise NotImplementedError


def test_tensors_without_digests() -> None:
    """Classes that dispatch operations themselves are left out; other subclasses are not."""
    assert not has_values(torch.ones(2).as_subclass(Quantized))
    assert has_values(nn.Buffer(torch.ones(2)))


def test_a_joint_digest() -> None:
    """It depends on the bits of each of many tensors, and on their order."""
    tensors = [torch.randn(size).to(dtype) for size in (1, 70_000, 5) for dtype in (torch.float, torch.half)]
    digests = {joint_digest(tensors), joint_digest(tensors[::-1])}
    for tensor in tensors:
        tensor[-1] += 1
        digests.add(joint_digest(tensors))
    assert len(digests) == 2 + len(tensors)


def test_digests_of_few_bits() -> None:
    """Zeros have digests that tell number and dtype; NaNs are equal; a change of order shows across rows."""
    assert digest_of(torch.zeros(0)) != digest_of(torch.zeros(1)) != digest_of(torch.zeros(1).double())
    assert digest_of(torch.tensor([1.0, torch.nan])) == digest_of(torch.tensor([1.0, torch.nan]))
    values = torch.randn(10**4)
    swapped = values.clone()
    swapped[[17, 9000]] = swapped[[9000, 17]]
    assert digest_of(swapped) != digest_of(values)
    assert digest_of(nn.Parameter(values)) == digest_of(values)
