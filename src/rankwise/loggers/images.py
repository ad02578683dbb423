"""`image_array`: an image in the form that TensorBoard and MLflow take."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def image_array(image: Any) -> Any:
    """Return an image as a NumPy array, of shape (height, width) or (height, width, channels).

    Args:
        image: a tensor of shape (channels, height, width) or (height, width), a NumPy array with the channels
            last, or an image of Pillow. Floating-point values are from 0 to 1, integers from 0 to 255.
    """
    if isinstance(image, Tensor):
        image = image.detach().cpu()
        return (image.permute(1, 2, 0) if image.ndim == 3 else image).numpy()
    import numpy as np

    return np.asarray(image)
