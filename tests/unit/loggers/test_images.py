"""Images of several types."""

import numpy as np
import torch

from rankwise.loggers.values import image_array


def test_types() -> None:
    """A tensor's channels come first and are moved to the end; arrays stay as they are."""
    image = torch.arange(6.0).reshape(1, 2, 3)
    assert image_array(image.requires_grad_()).shape == (2, 3, 1)
    assert image_array(image[0]).shape == (2, 3)
    array = np.zeros((2, 3, 4))
    assert image_array(array) is array
