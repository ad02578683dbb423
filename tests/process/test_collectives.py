"""Distributed utilities on three processes: one test for each row of that section of the features."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from rankwise import TrainingModule
from rankwise.errors import ConfigurationError, WorkerRaisedError
from rankwise.ranks import RankInfo
from rankwise.strategies import DDPStrategy
from rankwise.testing import run_distributed
from tests.helpers.shared import computed_once
from tests.process.collective_tasks import (
    DTYPES,
    KINDS,
    ODD_DTYPES,
    WORLD,
    all_scenarios,
    loss_of,
    own_group,
    tensor_of,
    weights_and_inputs,
)
from tests.process.helpers import ddp
from tests.process.training_tasks import quiet_trainer


@pytest.fixture
@computed_once
def ranks() -> list[dict[str, Any]]:
    """Return what each rank found in every scenario, by one launch for all tests here."""
    return run_distributed(all_scenarios, world_size=WORLD)


def test_all_reduce(ranks: list[dict[str, Any]]) -> None:
    """Every operation works, in upper and lower case, and does not change its input."""
    for rank, found in enumerate(result["reduced"] for result in ranks):
        assert found["sum"].tolist() == [6.0, 6.0]
        assert found["Mean"].tolist() == found["AVG"].tolist() == [2.0, 2.0]
        assert found["min"].tolist() == [1.0, 2.0]
        assert found["MAX"].tolist() == [3.0, 2.0]
        assert found["product"].tolist() == [6.0, 8.0]
        assert found["input"].tolist() == [rank + 1.0, 2.0]
        assert found["strided"].tolist() == [[0.0, 9.0], [3.0, 12.0], [6.0, 15.0]]
        assert found["text"] == "text"


def test_all_reduce_of_integers(ranks: list[dict[str, Any]]) -> None:
    """The mean of integers is a float, of their exact sum; booleans are counted, or stay booleans."""
    found = ranks[0]["reduced"]
    assert found["whole"].dtype == torch.float32
    assert found["whole"].item() == pytest.approx(254 // WORLD + 1)
    total, mean, least, most = found["flags"]
    assert (total.item(), total.dtype) == (1, torch.int64)
    assert mean.item() == pytest.approx(1 / 3)
    assert (least.item(), most.item(), least.dtype) == (False, True, torch.bool)


def test_all_reduce_of_nested_containers(ranks: list[dict[str, Any]]) -> None:
    """Tensors in containers are reduced; other values stay."""
    nested = ranks[1]["reduced"]["nested"]
    assert nested["a"].tolist() == [6.0, 6.0]
    assert nested["b"][0].tolist() == [6, 6]
    assert nested["b"][1:] == ["text", None]


@pytest.mark.quick
def test_sync_ddp(ranks: list[dict[str, Any]]) -> None:
    """The default is the sum; a name or torch's operation selects another. There is no barrier before."""
    total, mean, most = ranks[0]["reduced"]["sync_ddp"]
    assert (total.tolist(), mean.tolist(), most.tolist()) == ([6.0, 6.0], [2.0, 2.0], [3.0, 2.0])
    assert ranks[0]["counts"]["sync_ddp"] == ["all_reduce"]


def test_sync_ddp_if_available(ranks: list[dict[str, Any]]) -> None:
    """With a process group it is sync_ddp."""
    assert ranks[2]["reduced"]["sync_ddp_if_available"].tolist() == [2.0, 2.0]


def test_all_gather(ranks: list[dict[str, Any]]) -> None:
    """The shape of the result is (world_size, *), in rank order; containers are traversed."""
    for rank, found in enumerate(result["gathered"] for result in ranks):
        assert found["plain"].tolist() == [[[0.0], [0.0]], [[1.0], [1.0]], [[2.0], [2.0]]]
        assert found["nested"]["a"][0].tolist() == [[0], [1], [2]]
        assert found["nested"]["a"][1] == "text"
        torch.testing.assert_close(found["strided"], torch.arange(6.0).reshape(2, 3).t() + rank)


def test_all_gather_ddp_if_available(ranks: list[dict[str, Any]]) -> None:
    """With a process group it is all_gather; a number becomes a vector."""
    assert ranks[1]["gathered"]["scalar"].tolist() == [0, 1, 2]


@pytest.mark.quick
def test_gathering_numbers_and_arrays(ranks: list[dict[str, Any]]) -> None:
    """Numbers and arrays become tensors of every rank's, on the strategy's device; other values stay."""
    for found in (result["strategy"]["mixed"] for result in ranks):
        assert found["a"].tolist() == [0, 1, 2]
        assert found["b"][0].tolist() == [0.1, 1.1, 2.1]  # as exact as Python's numbers
        assert found["b"][1] == "text"
        assert found["c"].tolist() == [True, False, False]
        assert found["d"].tolist() == [[[0], [0]], [[1], [1]], [[2], [2]]]


def test_gathering_any_dtype(ranks: list[dict[str, Any]]) -> None:
    """Dtypes that gloo does not send arrive too."""
    for found in (result["strategy"] for result in ranks):
        assert [each.dtype for each in found["odd"]] == list(ODD_DTYPES)
        assert [each.double().tolist() for each in found["odd"]] == [[[[1, 0]], [[1, 1]], [[1, 2]]]] * 5
        assert found["scalar"].tolist() == [0, 1, 2]


def test_reductions_are_exact(ranks: list[dict[str, Any]]) -> None:
    """16-bit floats are reduced in 32 bits and integers in 64: no part of a sum overflows."""
    for found in (result["exact"] for result in ranks):
        assert (found["mean"].item(), found["mean"].dtype) == (40000.0, torch.half)
        assert (found["sum"].item(), found["sum"].dtype) == (40000.0, torch.half)
        assert (found["bfloat16"].item(), found["bfloat16"].dtype) == (258.0, torch.bfloat16)
        assert (found["bytes"].item(), found["bytes"].dtype) == (600, torch.int64)
        assert (found["int16"].tolist(), found["int16"].dtype) == ([3, 3], torch.int64)
        assert [(each.double().item(), each.dtype) for each in found["odd"]] == [
            (2.0, dtype) for dtype in ODD_DTYPES
        ]
        assert (found["uint64"].item(), found["uint64"].dtype) == (2**63 + 5, torch.uint64)


@pytest.mark.quick
def test_dataclasses(ranks: list[dict[str, Any]]) -> None:
    """Frozen dataclasses are reduced and gathered like other containers."""
    for found in (result["dataclasses"] for result in ranks):
        reduced, gathered = found["reduced"], found["gathered"]
        assert (reduced.loss.item(), reduced.counts, reduced.inner[0].loss.item()) == (6.0, (3,), 3)
        assert (reduced.total, reduced.name) == (3.0, "train")
        assert gathered.loss.tolist() == [[1.0], [2.0], [3.0]]
        assert gathered.counts[0].tolist() == gathered.inner[0].loss.tolist() == [0, 1, 2]


def test_what_cannot_be_reduced(ranks: list[dict[str, Any]]) -> None:
    """Values that may hold numbers, but are not numeric, are errors that say what they are."""
    for texts in (result["refused"] for result in ranks):
        assert len(texts) == 28
        for text in texts:
            assert text.startswith("InvalidTypeError: value=")
            assert "expected a dense tensor" in text


def test_reducing_numbers(ranks: list[dict[str, Any]]) -> None:
    """Numbers stay numbers and arrays stay arrays; the result is that of all ranks."""
    for found in (result["numbers"] for result in ranks):
        total = found["sum"]
        assert (total["a"], total["b"][0], total["c"], total["d"]) == (3, 4.5, 3.0, None)
        assert isinstance(total["a"], int)
        assert isinstance(total["b"][1], np.ndarray)
        assert total["b"][1].tolist() == [3.0, 3.0]
        assert (found["float"], found["mean"], found["least"]) == (9.0, 3.0, False)


def test_torchs_operations(ranks: list[dict[str, Any]]) -> None:
    """Torch's operations are names too, and None is the sum; one without a name is refused."""
    for found in (result["numbers"] for result in ranks):
        assert [each.item() for each in found["operations"]] == [6.0, 2.0, 2.0, 3.0, 6.0]
        assert "Unknown reduce_op" in found["refused"]
        assert "BAND" in found["refused"]


def test_higher_derivatives_of_gathered_values(ranks: list[dict[str, Any]]) -> None:
    """Gathered values have all derivatives, as in one process."""
    for rank, result in enumerate(ranks):
        x = rank + 1.0
        assert result["derivatives"] == pytest.approx([4 * x**3, 12 * x**2, 24 * x], rel=1e-12)


def test_all_gather_with_gradients(ranks: list[dict[str, Any]]) -> None:
    """Gradients through a gather, summed over the ranks, are those of one process that has all the data."""
    weights = weights_and_inputs(0)[0].requires_grad_()
    outputs = torch.stack([weights_and_inputs(rank)[1] @ weights for rank in range(WORLD)])
    losses: list[Tensor] = [loss_of(outputs, rank) for rank in range(WORLD)]
    torch.stack(losses).sum().backward()
    for result in ranks:
        torch.testing.assert_close(result["gradient"], weights.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_gather_all_tensors(kind: str, ranks: list[dict[str, Any]]) -> None:
    """Each rank's tensor arrives unchanged, whatever its size, dtype and strides."""
    for result in ranks:
        for dtype in DTYPES:
            gathered = result["shapes"][f"{kind} {dtype}"]
            assert len(gathered) == WORLD
            for rank, found in enumerate(gathered):
                expected = tensor_of(rank, kind, dtype)
                torch.testing.assert_close(
                    found, expected.t() if expected.ndim == 2 else expected, rtol=0, atol=0
                )


@pytest.mark.quick
def test_gather_all_tensors_refuses_mismatches(ranks: list[dict[str, Any]]) -> None:
    """Tensors that do not match are the same error on every rank, with each rank's input."""
    for result in ranks:
        assert all(text.startswith("TensorMismatchError: ") for text in result["mismatches"])
        dims, dtypes, no_tensor, sparse = result["mismatches"]
        assert (
            "rank 0 of the group: torch.float32, shape (4,); rank 1 of the group: torch.float32, shape (2, 2)"
            in dims
        )
        assert "rank 1 of the group: torch.float64" in dtypes
        assert "rank 1 of the group: no tensor but list" in no_tensor
        assert "rank 2 of the group: a tensor that is not dense (layout torch.sparse_coo" in sparse


@pytest.mark.quick
def test_gather_object(ranks: list[dict[str, Any]]) -> None:
    """One rank gets all values, the others nothing."""
    assert [result["objects"]["one"] for result in ranks] == [None, [("", 0), ("x", 1), ("xx", 2)], None]


def test_all_gather_object(ranks: list[dict[str, Any]]) -> None:
    """Every rank gets all values."""
    assert all(result["objects"]["all"] == [{"rank": 0}, {"rank": 1}, {"rank": 2}] for result in ranks)


def test_collectives_in_a_subgroup(ranks: list[dict[str, Any]]) -> None:
    """Every collective works among the ranks of a subgroup; on another rank it is an error."""
    assert ranks[1]["subgroup"] == {"refused": [True] * 4}
    for rank in (0, 2):
        found = ranks[rank]["subgroup"]
        assert found["reduced"].item() == 4.0
        assert found["gathered"].tolist() == [0, 2]
        assert [len(tensor) for tensor in found["tensors"]] == [0, 2]
        assert found["objects"] == [0, 2]
        assert found["object"] == (None if rank == 0 else [0, 2])
        assert found["gradient"].tolist() == [2.0 * rank]


def test_init_process_group_with_a_group(ranks: list[dict[str, Any]]) -> None:
    """A matching group is used, another one is refused."""
    for rank, found in enumerate(result["existing"] for result in ranks):
        assert found["used"] == rank
        assert f"rank {rank} of {WORLD}" in found["refused"] or rank == 0
        assert "global_rank 0 of 1" in found["refused"]


@pytest.mark.quick
def test_init_process_group_by_rank_and_size() -> None:
    """It takes a rank, a size, and torch's arguments; what would be ignored is refused."""
    strategy = ddp("fork", "tcp")
    strategy.launch(own_group, init_process_group=False)
    for rank, found in strategy.results.items():
        assert found[:2] == [RankInfo(rank, rank, 0, 2, 2, 1), 2.0]
        store, typo, group_name, size = found[2:]
        assert "takes no argument 'store'" in store
        assert "Did you mean 'pg_options'" in typo
        assert "A process group exists, which cannot take group_name" in group_name
        assert "in the job it is global_rank" in size


@pytest.mark.parametrize("scenario", ["first", "per_node"])
def test_rank_zero_first(scenario: str, ranks: list[dict[str, Any]]) -> None:
    """The other ranks run the block after rank zero."""
    ended = ranks[0][scenario][1]
    assert all(result[scenario][0] >= ended for result in ranks[1:])


def test_rank_zero_first_tells_failures(ranks: list[dict[str, Any]]) -> None:
    """The waiting ranks get rank zero's failure, and the next block works."""
    assert ranks[0]["first_failed"] == "OSError: disk full"
    for result in ranks[1:]:
        assert result["first_failed"].startswith(
            "RankZeroFailedError: The block of rank_zero_first() failed on global_rank 0: OSError: disk full."
        )


def test_rank_zero_first_keeps_what_is_no_utf8(ranks: list[dict[str, Any]]) -> None:
    """A file name that is not UTF-8 is sent escaped; rank zero's own exception is unchanged."""
    assert ranks[0]["first_failed_oddly"] == "OSError: no data-\udcff.bin"
    for result in ranks[1:]:
        assert r"failed on global_rank 0: OSError: no data-\udcff.bin." in result["first_failed_oddly"]


def fail_first(strategy: DDPStrategy) -> None:
    """Fail on rank zero, in its block."""
    with strategy.rank_zero_first():
        if strategy.is_global_zero:
            raise OSError("disk full")


def test_rank_zero_first_names_the_culprit() -> None:
    """The job's error is rank zero's exception; the other ranks' are consequences."""
    with pytest.raises(WorkerRaisedError, match=r"global_rank=0 .* raised OSError: disk full"):
        ddp("fork").launch(fail_first)


# ------------------------------------------------------------------------------------- a subgroup's data


class Pairs(DDPStrategy):
    """Shares data among the even ranks, and among the odd ones."""

    def setup_environment(self) -> None:
        super().setup_environment()
        groups = [torch.distributed.new_group([0, 2]), torch.distributed.new_group([1, 3])]
        self._pair: torch.distributed.ProcessGroup = groups[self.global_rank % 2]

    @property
    def data_parallel_group(self) -> torch.distributed.ProcessGroup | None:
        return self._pair


def train_in_pairs(strategy: DDPStrategy) -> dict[str, Any]:
    """Return where this rank samples, what it reduces, and the gradient of a wrapped module."""
    module = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(module.weight)
    wrapped = strategy.setup_module(module)
    strategy.backward(wrapped(torch.tensor([[float(strategy.global_rank)]])).sum())
    assert module.weight.grad is not None
    return {
        "sampler": strategy.distributed_sampler_kwargs,
        "reduced": strategy.all_reduce(torch.tensor(float(strategy.global_rank)), reduce_op="sum").item(),
        "gradient": module.weight.grad.item(),
        "everybody": strategy.all_gather_object(strategy.global_rank, torch.distributed.group.WORLD),
    }


class InPairs(TrainingModule):
    """Trains each pair on numbers of its own, and records each rank's data and weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(self.layer.weight)
        self.read: list[float] = []

    def train_dataloader(self) -> DataLoader[Any]:
        first = 10.0 * (self.global_rank % 2)
        return DataLoader(TensorDataset(torch.arange(first, first + 4)[:, None]), batch_size=1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.read.append(batch[0].item())
        return self.layer(batch[0]).sum()  # type: ignore[no-any-return]  # modules are untyped

    def on_train_end(self) -> None:
        mine = (self.read, self.layer.weight.item())
        everybody = self.trainer.strategy.all_gather_object(mine, torch.distributed.group.WORLD)
        self.hparams = {"by_rank": everybody}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def test_a_trainer_follows_the_data_parallel_group() -> None:
    """It distributes samples and averages gradients within the subgroup."""
    module = InPairs()
    quiet_trainer(Pairs(start_method="fork", accelerator="cpu", devices=4), 4, max_epochs=1).fit(module)
    even, odd = -(0.5 + 2.5), -(10.5 + 12.5)
    assert module.hparams["by_rank"] == [
        ([0.0, 2.0], even),
        ([10.0, 12.0], odd),
        ([1.0, 3.0], even),
        ([11.0, 13.0], odd),
    ]


@pytest.mark.quick
def test_data_parallel_group() -> None:
    """Sampling, reducing and wrapping follow a subgroup; the whole world can still be asked for."""
    strategy = Pairs(start_method="fork", accelerator="cpu", devices=4)
    strategy.launch(train_in_pairs)
    for rank, found in strategy.results.items():
        assert found["sampler"] == {"num_replicas": 2, "rank": rank // 2}
        assert found["reduced"] == (2.0 if rank % 2 == 0 else 4.0)
        assert found["gradient"] == (1.0 if rank % 2 == 0 else 2.0)
        assert found["everybody"] == [0, 1, 2, 3]


class Astray(Pairs):
    """Wraps a module without the subgroup."""

    def configure_ddp(self, module: torch.nn.Module, device_ids: list[int] | None) -> Any:
        return torch.nn.parallel.DistributedDataParallel(module)


def refusal_of(strategy: DDPStrategy) -> str:
    """Return why a module is not set up."""
    with pytest.raises(ConfigurationError) as caught:
        strategy.setup_module(torch.nn.Linear(1, 1))
    return str(caught.value)


def test_a_wrapper_without_the_group_is_refused() -> None:
    """Gradients would be averaged over other ranks than those that share the data."""
    strategy = Astray(start_method="fork", accelerator="cpu", devices=4)
    strategy.launch(refusal_of)
    for rank, refusal in strategy.results.items():
        assert f"has the ranks [0, 1, 2, 3], data_parallel_group [{rank % 2}, {rank % 2 + 2}]" in refusal
        assert "process_group=self.data_parallel_group" in refusal
