"""What a checkpoint holds of each rank: its random state, its part of the metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from typing_extensions import final

from rankwise.data.random_state import get_random_state, mixed_seed, seed_process, set_random_state
from rankwise.trainer.results import Results

if TYPE_CHECKING:
    from rankwise.trainer.trainer import Trainer

__all__ = ["RankState", "gather_rank_states", "seed_rank"]

_METRICS = ("callback_metrics", "logged_metrics", "_progress_bar_metrics")


def gather_rank_states(trainer: Trainer) -> list[dict[str, Any]]:
    """Return what every rank needs to go on from here, in the order of the ranks.

    Collective: every rank must call this.
    """
    results = trainer.epoch_results
    own = {
        "random": get_random_state(trainer.strategy.root_device),
        "results": None if results is None else results.state_dict(),
        "metrics": {name: dict(getattr(trainer, name)) for name in _METRICS},
    }
    return trainer.strategy.all_gather_object(own, dist.group.WORLD)


def seed_rank(trainer: Trainer) -> None:
    """Give this rank a stream of random numbers of its own, which the run's seed decides."""
    seed_process(mixed_seed(trainer.seed, trainer.global_step, trainer.global_rank))


@final
class RankState:
    """This rank's part of a checkpoint.

    With another number of ranks than the checkpoint's, the parts are dealt out: metrics are put together, and
    each rank draws from a new stream of random numbers.

    Args:
        trainer: this rank's.
        states: what `gather_rank_states` returned when the checkpoint was written.
    """

    def __init__(self, trainer: Trainer, states: list[dict[str, Any]]) -> None:
        self._trainer = trainer
        self._is_same_world = len(states) == trainer.world_size
        self._states = states[trainer.global_rank :: trainer.world_size]
        self._any_state = states[0]

    def restore_metrics(self) -> None:
        """Take over the last values of everything logged."""
        own = self._states[0] if self._states else self._any_state
        for name in _METRICS:
            setattr(self._trainer, name, dict(own["metrics"][name]))

    def results(self) -> Results:
        """Return what was logged in the epoch so far."""
        results = Results(is_evaluation=False)
        for state in self._states:
            if state["results"] is not None:
                results.add_state_dict(state["results"])
        return results

    def restore_random(self) -> None:
        """Draw the numbers that the run of the checkpoint would have drawn."""
        trainer = self._trainer
        if self._is_same_world:
            set_random_state(self._states[0]["random"], trainer.strategy.root_device)
        else:
            seed_rank(trainer)
