"""Proximal policy optimisation: an actor and a critic, trained on trajectories that the module generates."""

import lightning.pytorch as pl
import torch
from shared import processes, record, settings
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Experience(IterableDataset):
    def __init__(self, generate):
        self.generate = generate

    def __iter__(self):
        return iter(self.generate())


class PPO(pl.LightningModule):
    def __init__(self, clip_ratio: float = 0.2, samples: int = 64, batch_size: int = 16, rounds: int = 2):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.critic = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
        self.actor = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2))
        self.generator = torch.Generator().manual_seed(8)

    def forward(self, state):
        return torch.distributions.Categorical(logits=self.actor(state)), self.critic(state)

    def trajectories(self):
        states = torch.randn(self.hparams.samples, 3, generator=self.generator)
        with torch.no_grad():
            policy, value = self(states)
            draws = torch.rand(len(states), generator=self.generator)
            actions = (draws < policy.probs[:, 1]).long()
            rewards = torch.where((states[:, 0] > 0) == actions.bool(), 1.0, -1.0)
            advantages = rewards - value.squeeze(1)
            log_probs = policy.log_prob(actions)
        for _ in range(self.hparams.rounds):
            yield from zip(states, actions, log_probs, rewards, advantages, strict=True)

    def actor_loss(self, state, action, old, advantage):
        policy, _ = self(state)
        ratio = torch.exp(policy.log_prob(action) - old)
        clipped = torch.clamp(ratio, 1 - self.hparams.clip_ratio, 1 + self.hparams.clip_ratio)
        return -torch.min(ratio * advantage, clipped * advantage).mean()

    def training_step(self, batch, batch_idx):
        state, action, old, reward, advantage = batch
        first, second = self.optimizers()
        actor_loss = self.actor_loss(state, action, old, advantage)
        critic_loss = (reward - self(state)[1].squeeze(1)).pow(2).mean()
        for optimizer, loss in ((first, actor_loss), (second, critic_loss)):
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
            optimizer.step()
        self.log("loss_actor", actor_loss, batch_size=len(state))
        self.log("reward", reward.mean(), on_step=False, on_epoch=True, batch_size=len(state))

    def configure_optimizers(self):
        actor = torch.optim.Adam(self.actor.parameters(), lr=1e-2)
        critic = torch.optim.Adam(self.critic.parameters(), lr=1e-2)
        return actor, critic

    def train_dataloader(self):
        return DataLoader(Experience(self.trajectories), batch_size=self.hparams.batch_size)


if __name__ == "__main__":
    pl.seed_everything(7)
    model = PPO()
    where = {"use_distributed_sampler": False, **processes("_find_unused_parameters_true")}
    trainer = pl.Trainer(**settings(max_epochs=4, log_every_n_steps=4, **where))
    trainer.fit(model)
    record(trainer, model)
