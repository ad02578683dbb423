"""What the processes that another launcher has started run; the tests are in `test_external.py`."""

import sys
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

from rankwise.errors import RankwiseError
from rankwise.strategies import DDPStrategy, Strategy
from tests.process.exception_tasks import Fails
from tests.process.training_tasks import Regression, dataset, loader, quiet_trainer


def fit_once() -> tuple[int, int, int]:
    """Train on eight samples; return the rank, the number of ranks and the steps."""
    trainer = quiet_trainer("ddp", "auto", max_epochs=1)
    trainer.fit(Regression(), loader(8, 1))
    return trainer.global_rank, trainer.world_size, trainer.global_step


def fit() -> None:
    """Print the ranks of a fit and its steps, or the error."""
    try:
        print(*fit_once())
    except RankwiseError as error:
        print(f"{type(error).__name__}: {error}")


def fit_in_own_group() -> None:
    """Train in a process group of the user's, and without it."""
    torch.distributed.init_process_group("gloo")  # by env://, so rank 0 listens at MASTER_PORT
    fits = [fit_once(), fit_once()]
    assert torch.distributed.is_initialized()
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    torch.distributed.destroy_process_group()
    fits.append(fit_once())
    print([(steps, size) for _, size, steps in fits], total.item(), torch.distributed.is_initialized())


class Slow(TensorDataset):
    """Needs longer for a sample than the ranks wait for one another."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        if index == 9:  # on two ranks, rank 1's, in step 2
            time.sleep(9)
        return tuple(tensor[index] for tensor in self.tensors)


def late() -> None:
    """Let rank 1 be late for a step."""
    strategy = DDPStrategy(accelerator="cpu", timeout=4, stall_warning=0.6)
    slow = DataLoader(Slow(*dataset(64).tensors), batch_size=2)
    quiet_trainer(strategy, "auto", max_epochs=1).fit(Regression(), slow)


def fail_in_fit() -> None:
    """Let rank 1 fail in a step."""
    quiet_trainer("auto", "auto", max_epochs=1).fit(Fails(1), loader(32, 4))


def fail_in_launch() -> None:
    """Let rank 1 fail in a launched function."""
    DDPStrategy(accelerator="cpu").launch(_fail)


def _fail(strategy: Strategy) -> None:
    strategy.barrier()
    if strategy.global_rank == 1:
        raise ValueError("the first failure")
    time.sleep(60)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
