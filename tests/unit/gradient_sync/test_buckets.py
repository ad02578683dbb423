"""`FlatGradients`: gradients that fill one storage are one tensor."""

import weakref
from typing import cast

import torch
from torch import Tensor, nn

from rankwise.gradient_sync.buckets import FlatGradients, concatenated_gradients, write_means
from rankwise.gradient_sync.weights import divide


def parameters_with(*gradients: Tensor | None) -> list[Tensor]:
    """Return parameters that have these gradients."""
    parameters: list[Tensor] = []
    for gradient in gradients:
        parameter = nn.Parameter(torch.zeros_like(torch.zeros(1) if gradient is None else gradient))
        parameter.grad = gradient
        parameters.append(parameter)
    return parameters


def test_one_bucket_is_one_tensor() -> None:
    """An operation on the piece changes each gradient once."""
    bucket = torch.arange(6.0)
    gradients = FlatGradients(parameters_with(bucket[4:], None, bucket[:4].view(2, 2)))
    [piece] = gradients.pieces()
    piece.mul_(2)
    assert bucket.tolist() == [0, 2, 4, 6, 8, 10]
    assert gradients.pieces()[0] is piece


def test_two_buckets_are_two_tensors() -> None:
    """Each bucket has its own storage, and may have its own dtype."""
    buckets = torch.ones(4), torch.ones(4, dtype=torch.float64)
    pieces = FlatGradients(parameters_with(*buckets[0].split(2), *buckets[1].split(2))).pieces()
    assert [(piece.dtype, piece.numel()) for piece in pieces] == [(torch.float32, 4), (torch.float64, 4)]
    pieces = FlatGradients(parameters_with(*buckets[0].split(2), torch.ones(3))).pieces()
    assert [piece.numel() for piece in pieces] == [4, 3]  # one bucket holds a single gradient


def test_gradients_with_own_storages_are_freed() -> None:
    """Gradients with storages of their own are the pieces; they are freed with the parameters' gradients."""
    parameters = parameters_with(torch.ones(2), torch.ones(3))
    gradients = FlatGradients(parameters)
    assert [piece.numel() for piece in gradients.pieces()] == [2, 3]
    gone = weakref.ref(cast(Tensor, parameters[0].grad))
    parameters[0].grad = None
    assert gone() is None


def test_storage_with_other_elements() -> None:
    """Elements that are not gradients do not change, and no gradient changes twice."""
    memory = torch.ones(6)
    for some in ((memory[:2], memory[2:5]), (memory[:2], memory[3:]), (memory[:4], memory[2:])):
        pieces = FlatGradients(parameters_with(*some)).pieces()
        assert [piece.data_ptr() for piece in pieces] == [each.data_ptr() for each in some]
    turned = memory.view(2, 3).t()
    assert FlatGradients(parameters_with(turned)).pieces()[0].shape == turned.shape


def test_sparse_gradients() -> None:
    """They have no storage, so all gradients stay single; a weighted window divides them too."""
    embedding, linear = nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1, bias=False)
    linear(embedding(torch.tensor([1, 1, 3]))).sum().backward()
    pieces = FlatGradients([embedding.weight, linear.weight]).pieces()
    assert all(piece is owner.weight.grad for piece, owner in zip(pieces, (embedding, linear), strict=True))
    before = [piece.to_dense().clone() for piece in pieces]
    divide([embedding.weight, linear.weight], 3.0)
    for piece, expected in zip(pieces, before, strict=True):
        torch.testing.assert_close(piece.to_dense(), expected / 3)


def test_gradients_in_new_buckets() -> None:
    """The buckets are found again when parameters have other gradients than before."""
    first, second = torch.ones(4), torch.ones(4)
    parameters = parameters_with(*first.split(2))
    gradients = FlatGradients(parameters)
    gradients.pieces()[0].zero_()
    for parameter, gradient in zip(parameters, second.split(2), strict=True):
        parameter.grad = gradient
    gradients.pieces()[0].add_(1)
    assert (float(first.sum()), float(second.sum())) == (0, 8)
    parameters[1].grad = other = torch.ones(2)  # of one of them alone
    assert [piece.data_ptr() for piece in gradients.pieces()] == [second.data_ptr(), other.data_ptr()]


def test_packing_and_unpacking() -> None:
    """Missing and empty gradients have their place, and the means of gradients keep their shapes."""
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((2, 2), (0, 3), (2,), ())]
    parameters[0].grad, parameters[1].grad = torch.ones(2, 2).t(), torch.zeros(0, 3)
    flat = concatenated_gradients(parameters, torch.tensor([5.0]))
    assert flat.tolist() == [1, 1, 1, 1, 0, 0, 0, 5]
    write_means(parameters, flat + 1, [1, 1, 1, 0])
    assert [None if each.grad is None else each.grad.tolist() for each in parameters] == [
        [[2, 2], [2, 2]],
        [],
        [1, 1],
        None,
    ]


def test_packing_copies() -> None:
    """A change of the flat tensor does not change a gradient, not even the only one."""
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    concatenated_gradients([parameter]).zero_()
    assert parameter.grad.tolist() == [1, 1]
