"""Fabric: a convolutional GAN with two modules and two optimizers."""

import torch
from lightning.fabric import Fabric, seed_everything
from shared import launch, loader, noise, processes, record
from torch import nn


def generator():
    return nn.Sequential(
        nn.ConvTranspose2d(8, 8, 4), nn.ReLU(), nn.ConvTranspose2d(8, 1, 2, stride=2), nn.Sigmoid()
    )


def discriminator():
    return nn.Sequential(nn.Conv2d(1, 8, 4), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(200, 1))


def train(fabric):
    seed_everything(16)
    net_g, net_d = generator(), discriminator()
    opt_g = torch.optim.Adam(net_g.parameters(), lr=2e-3, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(net_d.parameters(), lr=2e-3, betas=(0.5, 0.999))
    net_g, opt_g = fabric.setup(net_g, opt_g)
    net_d, opt_d = fabric.setup(net_d, opt_d)
    data = fabric.setup_dataloaders(loader(0, 256))
    criterion = nn.BCEWithLogitsLoss()
    losses = []
    for index, (real, _) in enumerate(data):
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        fake = net_g(noise(index, len(real), 8, 1, 1).to(fabric.device))
        opt_d.zero_grad()
        loss_real = criterion(net_d(real), ones)
        loss_fake = criterion(net_d(fake.detach()), zeros)
        fabric.backward(loss_real + loss_fake)
        opt_d.step()
        opt_g.zero_grad()
        loss_g = criterion(net_d(fake), ones)
        fabric.backward(loss_g)
        opt_g.step()
        losses.append(float(fabric.all_gather(loss_g.detach()).mean()))
    record(fabric, net_g, losses=losses)


if __name__ == "__main__":
    launch(Fabric(**processes()), train)
