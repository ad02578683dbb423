"""State that is sent to a worker and back: here through a pickle."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.lr_scheduler import LambdaLR

from rankwise.callbacks import Callback, ModelCheckpoint
from rankwise.processes.returned_state import AttributesBefore, ObjectState
from tests.unit.trainer.helpers import Line, fit_elsewhere, loader, samples, sent_back, trainer


class Growing(Line):
    """Changes its own structure while it trains, as lazy modules do."""

    count: Tensor
    late: Tensor | None
    scale: nn.Parameter | None
    head: nn.Module

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("late", None)
        self.register_parameter("scale", None)

    def setup(self, stage: str) -> None:
        if self.scale is None:
            torch.manual_seed(1)
            self.scale = nn.Parameter(torch.ones(1))
            self.head = nn.Sequential(nn.Linear(1, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.count += 1
        self.late = self.count.clone()
        self.hparams["batches"] = int(self.count)
        loss = nn.functional.mse_loss(self.head(self.layer(batch[0])) * self.scale, batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        return [optimizer], [LambdaLR(optimizer, lambda epoch: 0.9**epoch)]


def send(value: Any) -> Any:
    """Return what a worker gets for a value."""
    return sent_back(lambda: value, nn.Module())


class Adapter(nn.Module):
    """Adds a trained layer to one that it keeps, as adapters for fine-tuning do."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.added = nn.Linear(2, 1)
        self.base = base
        self.also_base = [base]  # not registered

    def forward(self, x: Tensor) -> Any:
        return self.also_base[0](x) + self.added(x)


class TakesOver(nn.Module):
    """Uses another layer's weight as its own."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.first, self.weight = nn.Parameter(torch.ones(1, 2)), weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight + self.first).T


class Doubled(nn.Module):
    """Parametrizes a tensor by its half."""

    def forward(self, half: Tensor) -> Tensor:
        return 2 * half


class Scaled(nn.Linear):
    """Another class for a linear layer."""

    def forward(self, x: Tensor) -> Tensor:
        return 3 * super().forward(x)


class Changing(Line):
    """Changes its submodules in `setup`, in one of several ways."""

    layer: Any  # a linear layer at first

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        if way == "lazy":
            self.layer = nn.LazyLinear(1)
        self.extra = nn.Linear(2, 1)
        self.late: Any = None

    def setup(self, stage: str) -> None:
        torch.manual_seed(2)
        if self.way == "adapter":
            self.layer = Adapter(self.layer)
        elif self.way == "compiled":
            self.layer = torch.compile(self.layer, backend="eager")
        elif self.way == "removed":
            del self.extra
        elif self.way == "moved":
            layer = self.layer
            del self.layer
            self.layer = layer
        elif self.way == "tied":
            self.layer.weight = self.extra.weight
        elif self.way == "taken over":
            self.layer = TakesOver(self.layer.weight)
        elif self.way in ("was None", "shared"):
            self.late = nn.Linear(2, 1)
            if self.way == "shared":
                self.layer.also = self.late
                self.extra.weight = self.late.weight
        elif self.way == "frozen":
            self.extra.eval()
        else:
            self.reparametrize()

    def reparametrize(self) -> None:
        if self.way == "lazy":
            self.layer(torch.zeros(1, 2))
        elif self.way == "parametrized":
            parametrize.register_parametrization(self.layer, "weight", Doubled())
        elif self.way == "several":
            parametrizations.spectral_norm(self.layer)
            parametrize.register_parametrization(self.layer, "bias", Doubled())
        elif self.way == "parametrized adapter":
            self.layer = Adapter(self.layer)
            parametrizations.spectral_norm(self.layer.added)
        elif self.way == "another class":
            self.layer.__class__ = Scaled
        elif self.way == "weight norm":
            nn.utils.weight_norm(self.layer)
        elif self.way == "pruned":
            prune.l1_unstructured(self.layer, "weight", 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        late = 0 if self.late is None else self.late(batch[0])
        loss = nn.functional.mse_loss(self.layer(batch[0]) + late, batch[1])
        self.log("loss", loss)
        return loss

    def on_train_end(self) -> None:
        if self.way == "frozen":
            self.layer.bias.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


WAYS = [
    *("adapter", "lazy", "compiled", "removed", "moved", "tied", "taken over"),
    *("was None", "shared", "frozen"),
    *("parametrized", "several", "parametrized adapter", "another class", "weight norm", "pruned"),
]


@pytest.mark.filterwarnings("ignore:Training begins with modules in evaluation mode")
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("way", WAYS)
def test_changed_submodules_come_back(tmp_path: Path, way: str) -> None:
    """After a stage that changes the submodules the caller has what one process has; so goes a second fit."""
    torch.manual_seed(0)
    here = Changing(way)
    elsewhere = copy.deepcopy(here)
    layer, weight, extra = elsewhere.layer, elsewhere.layer.weight, elsewhere.extra
    trains = []
    for model in (here, elsewhere):
        train = trainer(tmp_path)
        train.fit(model, loader()) if model is here else fit_elsewhere(train, model)
        trains.append(train)

    assert list(elsewhere.state_dict()) == list(here.state_dict())
    for name, value in here.state_dict().items():
        assert torch.equal(elsewhere.state_dict()[name], value), name
    assert [part.training for part in elsewhere.modules()] == [part.training for part in here.modules()]
    for there, expected in zip(elsewhere.parameters(), here.parameters(), strict=True):
        assert there.requires_grad == expected.requires_grad
    states = [train.optimizers[0].state_dict()["state"] for train in trains]
    assert [list(map(float, map(torch.sum, state.values()))) for state in states[0].values()] == [
        list(map(float, map(torch.sum, state.values()))) for state in states[1].values()
    ]
    x = torch.ones(3, 2)
    assert torch.equal(elsewhere.layer(x), here.layer(x))
    kept = {id(part) for part in [*elsewhere.modules(), *elsewhere.parameters()]}
    assert id(layer) in kept or way == "taken over"
    assert id(weight) in kept or way in ("tied", "several", "weight norm", "pruned")
    assert id(extra) in kept or way == "removed"
    if way == "adapter":
        assert elsewhere.layer.also_base[0] is elsewhere.layer.base is layer
    if way == "shared":
        assert elsewhere.layer.also is elsewhere.late
        assert elsewhere.extra.weight is elsewhere.late.weight


class Removing(Line):
    """Removes a parametrization in `setup`."""

    def setup(self, stage: str) -> None:
        parametrize.remove_parametrizations(self.layer, "weight")


def test_removed_parametrizations_come_back(tmp_path: Path) -> None:
    """A layer whose parametrization a stage removes has its own class again, and its weight."""
    module = Removing()
    weight = module.layer.weight
    parametrize.register_parametrization(module.layer, "weight", Doubled())
    there = send(module)
    assert torch.equal(there.layer.weight, module.layer.weight)
    fit_elsewhere(trainer(tmp_path), module, there)
    assert type(module.layer) is nn.Linear
    assert module.layer.weight is weight
    assert torch.equal(module.layer.weight, there.layer.weight)


def test_facts_come_back(tmp_path: Path) -> None:
    """Counters, metrics, optimizer and scheduler state, callbacks and the logger's version are restored."""
    model = Growing()
    saving = ModelCheckpoint(monitor="loss")
    train = trainer(tmp_path, callbacks=saving, logger=True, max_epochs=2)
    fit_elsewhere(train, model)
    assert (train.current_epoch, train.global_step, train.num_training_batches) == (2, 8, 4)
    assert "loss" in train.callback_metrics
    assert Path(saving.best_model_path).exists()
    assert saving.best_model_score is not None
    assert train.optimizers[0].state[model.layer.weight]["step"] == 8
    assert train.lr_scheduler_configs[0].scheduler.last_epoch == 2


@pytest.mark.parametrize("are_used", [True, False])
def test_second_fit_elsewhere_goes_on(tmp_path: Path, are_used: bool) -> None:
    """Two fits elsewhere equal one of two epochs here, with what is new; a used optimizer stays the same."""
    here, elsewhere = Growing(), Growing()
    trainer(tmp_path, max_epochs=2).fit(here, loader())
    train = trainer(tmp_path)
    fit_elsewhere(train, elsewhere)
    assert isinstance(elsewhere.scale, nn.Parameter)
    assert elsewhere.late == 4
    assert elsewhere.hparams == {"batches": 4}
    used = train.optimizers[0] if are_used else None
    train.max_epochs = 2
    fit_elsewhere(train, elsewhere)
    assert list(elsewhere.state_dict()) == list(here.state_dict())
    for name, value in here.state_dict().items():
        assert torch.equal(elsewhere.state_dict()[name], value), name
    assert train.global_step == 8
    assert used is None or used.state[elsewhere.layer.weight]["step"] == 8
    assert used in (None, train.optimizers[0])


class Keeping(Line):
    """Changes plain attributes, its own and a submodule's, in several ways."""

    expanded: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.counts = {"steps": 0}
        self.mean, self.number, self.gone = torch.zeros(2), 1, "old"
        self.data, self.opened = samples(), open  # not changed
        self.references: Any = None
        self.optimizer: Any = None
        self.register_buffer("expanded", torch.zeros(1).expand(3))
        self.plain = torch.zeros(1).expand(3)
        with torch.inference_mode():
            self.inferred = torch.zeros(3)
        self.nested: list[Any] = []
        self.nested.append(self.nested)

    def setup(self, stage: str) -> None:
        del self.gone
        self.number, vars(self.layer)["note"] = 2, "new"
        self.references = [self.layer.weight, self.trainer, self, nn.ReLU()]
        self.data = samples(4)

    def configure_optimizers(self) -> Any:
        self.optimizer = super().configure_optimizers()
        return self.optimizer

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())
        self.counts["steps"] += 1
        self.mean += 1

    def on_train_end(self) -> None:
        self.expanded, self.plain, self.inferred = (torch.arange(3.0) for _ in range(3))
        self.nested.append("new")


def test_attributes_come_back(tmp_path: Path) -> None:
    """Attributes are as after a fit in this process; lists, dictionaries and tensors are the same objects.

    Expanded tensors and those of inference mode are replaced; a list may contain itself.
    """
    here, elsewhere, train = Keeping(), Keeping(), trainer(tmp_path)
    trainer(tmp_path).fit(here, loader())
    losses, counts, mean, data = elsewhere.losses, elsewhere.counts, elsewhere.mean, elsewhere.data
    fit_elsewhere(train, elsewhere)
    assert (elsewhere.losses, elsewhere.counts) == (here.losses, {"steps": 4})
    assert len(losses) == 4
    assert elsewhere.losses is losses
    assert elsewhere.counts is counts
    assert elsewhere.mean is mean
    assert torch.equal(mean, here.mean)
    assert (elsewhere.number, vars(elsewhere.layer)["note"], elsewhere.seen) == (2, "new", here.seen)
    assert "gone" not in vars(elsewhere)
    weight, owner, module, new = elsewhere.references
    assert (weight is elsewhere.layer.weight, owner is train, module is elsewhere) == (True, True, True)
    assert type(new) is nn.ReLU
    assert elsewhere.data is data  # data sets are not sent
    assert train.optimizers[0] is elsewhere.optimizer  # created at its first use
    for tensor in (elsewhere.expanded, elsewhere.plain, elsewhere.inferred):
        assert tensor.tolist() == [0, 1, 2]
    assert elsewhere.nested[-1] == "new"


class KeepingCallback(Callback):
    """Has attributes that a stage changes."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.module: Any = None

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())
        self.module = module


class Adding(Callback):
    """Adds another callback of its kind when a fit starts."""

    count = 0

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        trainer.callbacks = [Adding(), *trainer.callbacks]

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict == {"count": 1}


def test_attributes_of_callbacks_come_back(tmp_path: Path) -> None:
    """They need no `state_dict` for it; references to the module are to the caller's.

    The state of a callback that the caller has comes back, though a stage has added one of its kind.
    """
    callback, adding, model = KeepingCallback(), Adding(), Line()
    losses = callback.losses
    train = trainer(tmp_path, callbacks=[callback, adding])
    fit_elsewhere(train, model)
    assert callback.losses is losses
    assert len(losses) == 4
    assert callback.module is model
    assert adding.count == 1
    assert train.callbacks == [callback, adding]


class FailsToLoad:
    """Can be pickled, but not read back."""

    def __reduce__(self) -> Any:
        return FailsToLoad, ("an argument too many",)


class OnlyThere:
    """Can be packed, and read by no other process."""

    def __reduce__(self) -> Any:
        return _read_elsewhere, ()


def _read_elsewhere() -> OnlyThere:
    raise ImportError("no module named 'there'")


class Partly(Line):
    """Has attributes of which only some can be sent, or that stay as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"lr": 0.1, "function": lambda: None, "data": samples()})
        self.functions = [lambda: None]
        self.table = torch.zeros(3)

    def setup(self, stage: str) -> None:
        self.hparams["lr"] = 0.2
        self.hparams["data"] = samples(4)
        self.read_back, self.note = OnlyThere(), "new"
        self.made = lambda: None
        vars(self.layer)["fails"] = [FailsToLoad()]


def test_attributes_that_cannot_come_back(tmp_path: Path) -> None:
    """They are named in a warning; what is beside them comes back, and so do items beside one.

    What has not changed is neither sent nor in a warning, and data sets stay where they are.
    """
    model = Partly()
    function, data, table = model.hparams["function"], model.hparams["data"], model.table
    named = r"cannot be returned.*read_back: ImportError: no module.*made: .*layer \(fails: TypeError: "
    with pytest.warns(UserWarning, match=named) as caught:
        fit_elsewhere(trainer(tmp_path), model, copy.deepcopy(model))  # as a fork
    assert "function" not in str(caught[0].message)
    assert not {"made", "fails", "read_back"} & {*vars(model), *vars(model.layer)}
    assert (model.hparams["lr"], model.note) == (0.2, "new")
    assert len(model.seen) == 4
    assert model.hparams["function"] is function
    assert model.hparams["data"] is data
    assert model.table is table


@pytest.mark.parametrize("value", [[1], {"a": torch.zeros(2)}, torch.zeros(2), {"f": [print, Line]}, [open]])
def test_unchanged_attributes(value: Any) -> None:
    """What has not changed is not sent; a change within it is found."""
    model = Line()
    vars(model)["value"] = value
    before = AttributesBefore(model, {})
    assert not ObjectState(model, before)._changed
    if isinstance(value, list):
        value.append(2)
    elif isinstance(value, dict):
        value["new"] = 2
    else:
        value += 1
    assert "value" in ObjectState(model, before)._changed
