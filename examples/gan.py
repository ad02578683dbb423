"""Train a generator and a discriminator of handwritten digits: two optimizers, stepped by hand.

Two processes, whose gradients are averaged after each backward pass.

python examples/gan.py
"""

from __future__ import annotations

from itertools import pairwise

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from rankwise import Trainer, TrainingModule, rank_zero_only, seed_everything

NOISE = 16
print_once = rank_zero_only(print)


def layers(*sizes: int) -> nn.Sequential:
    """Return linear layers of these sizes, with activations between them."""
    parts = [part for pair in pairwise(sizes) for part in (nn.Linear(*pair), nn.LeakyReLU(0.2))]
    return nn.Sequential(*parts[:-1])


class DigitGan(TrainingModule):
    """The generator makes 8 x 8 pixels from noise; the discriminator tells them from real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(layers(NOISE, 64, 64), nn.Sigmoid())
        self.discriminator = layers(64, 64, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        real = batch[0]
        generator, discriminator = self.optimizers()
        noise = torch.randn(len(real), NOISE, device=real.device)

        with discriminator.toggled():  # only its own parameters have gradients, and are averaged
            fake = self.generator(noise)
            loss = (self.judge(real, is_real=True) + self.judge(fake, is_real=False)) / 2
            discriminator.zero_grad()
            self.manual_backward(loss)
            discriminator.step()
        with generator.toggled():
            generator.zero_grad()
            fooled = self.judge(self.generator(noise), is_real=True)
            self.manual_backward(fooled)
            generator.step()
        self.log_dict({"discriminator_loss": loss, "generator_loss": fooled})

    def judge(self, images: Tensor, *, is_real: bool) -> Tensor:
        verdict = self.discriminator(images)
        return nn.functional.binary_cross_entropy_with_logits(verdict, torch.full_like(verdict, is_real))

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        parts = (self.generator, self.discriminator)
        return [torch.optim.Adam(part.parameters(), lr=1e-3, betas=(0.5, 0.999)) for part in parts]


def main() -> None:
    """Train, compare the mean image of both sides, draw a digit."""
    seed_everything(1)
    images = torch.tensor(load_digits().data / 16, dtype=torch.float32)
    model = DigitGan()
    trainer = Trainer(strategy="ddp", devices=2, max_epochs=12, logger=False, enable_checkpointing=False)
    trainer.fit(model, DataLoader(TensorDataset(images), batch_size=32, shuffle=True))
    with torch.no_grad():
        made = model.generator(torch.randn(1000, NOISE))
    distance = (made.mean(dim=0) - images.mean(dim=0)).abs().mean().item()
    print_once("\n".join("".join(" .:*#"[int(4 * value)] for value in row) for row in made[0].reshape(8, 8)))
    print_once(f"steps {trainer.global_step}, mean images differ by {distance:.3f}")


if __name__ == "__main__":
    main()
