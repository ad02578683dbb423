"""Deep Q-learning: the data are the agent's own experience, from an iterable data set."""

import random
from collections import deque

import lightning as L
import torch
from shared import record, settings
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Walk:
    """Walk from the middle of a line to its right end."""

    def reset(self):
        self.place, self.time = 3, 0
        return self.observe()

    def observe(self):
        return torch.tensor([self.place / 6, self.time / 20])

    def step(self, action):
        self.place += 1 if action else -1
        self.time += 1
        done = self.place in (0, 6) or self.time == 20
        return self.observe(), float(self.place == 6), done


class ReplayData(IterableDataset):
    def __init__(self, buffer, samples, rng):
        self.buffer, self.samples, self.rng = buffer, samples, rng

    def __iter__(self):
        yield from self.rng.sample(list(self.buffer), self.samples)


class DQN(L.LightningModule):
    def __init__(self, gamma: float = 0.9, sync_rate: int = 4, batch_size: int = 8):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
        self.target_net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
        self.target_net.requires_grad_(False)
        self.buffer = deque(maxlen=200)
        self.rng = random.Random(0)
        self.env = Walk()
        self.state = self.env.reset()
        self.total_reward = 0.0
        for _ in range(64):
            self.play(epsilon=1.0)

    @torch.no_grad()
    def play(self, epsilon):
        explore = self.rng.random() < epsilon
        action = self.rng.randrange(2) if explore else int(self.net(self.state.to(self.device)).argmax())
        following, reward, done = self.env.step(action)
        self.buffer.append((self.state, action, reward, done, following))
        self.state = self.env.reset() if done else following
        return reward

    def training_step(self, batch, batch_idx):
        self.total_reward += self.play(epsilon=max(0.1, 1 - self.global_step / 40))
        states, actions, rewards, dones, following = batch
        values = self.net(states).gather(1, actions[:, None]).squeeze(1)
        with torch.no_grad():
            best = self.target_net(following).max(1)[0] * ~dones
        loss = nn.functional.mse_loss(values, (best * self.hparams.gamma + rewards).float())
        if self.global_step % self.hparams.sync_rate == 0:
            self.target_net.load_state_dict(self.net.state_dict())
        self.log_dict({"loss": loss, "total_reward": self.total_reward}, batch_size=len(states))
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.net.parameters(), lr=1e-2)

    def train_dataloader(self):
        return DataLoader(ReplayData(self.buffer, 40, self.rng), batch_size=self.hparams.batch_size)


if __name__ == "__main__":
    L.seed_everything(6)
    model = DQN()
    trainer = L.Trainer(**settings(max_epochs=8, use_distributed_sampler=False, log_every_n_steps=5))
    trainer.fit(model)
    record(trainer, model, reward=model.total_reward)
