"""Values through an anonymous file: what goes in comes out, tied as it was; damage is noticed."""

import errno
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rankwise.processes.memory_file import Parts, _shared_parts, create_memory_file, pack, unpack
from tests.helpers.own_process import few_files
from tests.helpers.raising import raises


@pytest.fixture
def file() -> Iterator[int]:
    descriptor = create_memory_file()
    yield descriptor
    os.close(descriptor)


def there_and_back(value: object, file: int, *, copy: bool = True) -> Any:
    pack(value, file)
    return unpack(file, copy=copy)


@pytest.mark.parametrize(
    "value", [None, 0, "text", b"\x00" * 10_000, {"a": [1, (2, 3)]}, [], float("inf")], ids=repr
)
def test_plain_values(value: object, file: int) -> None:
    """Anything picklable comes back."""
    assert there_and_back(value, file) == value


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int8,
        torch.int64,
        torch.bool,
        torch.complex64,
        torch.uint16,
        torch.float8_e5m2,
    ],
    ids=str,
)
def test_tensors_of_any_dtype(dtype: torch.dtype, copy: bool, file: int) -> None:
    """dtype, shape and contents are the same."""
    tensor = torch.arange(6).reshape(2, 3).to(dtype)
    back = there_and_back(tensor, file, copy=copy)
    assert back.dtype == dtype
    assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (2, 3, 4)], ids=str)
def test_tensors_of_any_shape(shape: tuple[int, ...], file: int) -> None:
    """0-dimensional and empty tensors as well."""
    assert there_and_back(torch.ones(shape), file).shape == shape


def test_views_share_one_storage(file: int) -> None:
    """Tensors on one storage are so again, at their offsets and strides, and with their dtypes."""
    base = torch.arange(12.0).reshape(3, 4)
    back_base, back_row, back_transposed = there_and_back([base, base[1], base.t()], file)
    back_base[1, 2] = 100.0
    assert back_row[2] == 100.0
    assert back_transposed[2, 1] == 100.0
    assert back_transposed.stride() == (1, 4)
    floats = torch.ones(4)
    back, as_integers = there_and_back([floats, floats.view(torch.int32)], file)
    back[0] = 0.0
    assert as_integers[0] == 0


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint16], ids=str)
def test_storages(dtype: torch.dtype, file: int) -> None:
    """A storage comes back too, as that of its tensors."""
    tensor = torch.ones(3).to(dtype)
    storage, back, tail = there_and_back([tensor.untyped_storage(), tensor, tensor[1:]], file)
    storage.fill_(0)
    assert (back.tolist(), tail.tolist()) == ([0, 0, 0], [0, 0])


def test_one_storage_takes_its_place_once(file: int) -> None:
    """A storage under many names is stored once."""
    tensor = torch.zeros(250_000)
    pack([tensor] * 50 + [tensor[10:], tensor.view(500, 500)], file)
    assert os.fstat(file).st_size < 2 * tensor.nbytes


def test_parameters_keep_their_kind(file: int) -> None:
    """Parameters are parameters, with or without gradients; tied ones stay tied."""
    layer = torch.nn.Linear(2, 2)
    twin = torch.nn.Linear(2, 2)
    twin.weight = layer.weight
    layer.bias.requires_grad_(False)
    one, two = there_and_back([layer, twin], file)
    assert isinstance(one.weight, torch.nn.Parameter)
    assert one.weight is two.weight
    assert (one.weight.requires_grad, one.bias.requires_grad) == (True, False)


def test_without_copy_nothing_reaches_the_file(file: int) -> None:
    """Tensors that lie in the file are mapped privately: writing to one changes no second reader's."""
    first = there_and_back(torch.zeros(100), file, copy=False)
    first += 1
    assert unpack(file, copy=False).sum() == 0


def test_a_copy_survives_the_next_value(file: int) -> None:
    """A copied value stays when the file is packed again, with something smaller or larger."""
    first = there_and_back(torch.full((100_000,), 3.0), file, copy=True)
    assert there_and_back(torch.ones(2), file, copy=True).tolist() == [1.0, 1.0]
    assert there_and_back(torch.ones(300_000), file).sum() == 300_000
    assert bool((first == 3.0).all())


def test_an_unfinished_value_is_an_end(file: int) -> None:
    """An empty file, and one whose length was not written yet, as after a kill, are an EOFError."""
    raises(EOFError, None, unpack, file, copy=True)
    pack([1, 2, 3], file)
    os.pwrite(file, bytes(8), 0)
    raises(EOFError, None, unpack, file, copy=True)


class Unpicklable:
    def __reduce__(self) -> Any:
        raise TypeError("not me")


def test_a_failed_pack_leaves_no_half_value(file: int) -> None:
    """What cannot be pickled raises pickle's own error; an older value does not pass for it."""
    raises(TypeError, "not me", pack, [torch.ones(3), Unpicklable()], file)
    raises(EOFError, None, unpack, file, copy=True)


def test_the_file_has_no_name_and_is_not_inherited(file: int) -> None:
    """No path leads to it, and a program that is started does not get it."""
    assert not os.get_inheritable(file)
    assert "(deleted)" in os.readlink(f"/proc/self/fd/{file}")  # noqa: PTH115 -- no path


def test_a_process_with_too_many_open_files() -> None:
    """The error is that of the limit; another kind of file would need a descriptor, too."""
    with few_files(0), pytest.raises(OSError, match="open files") as caught:
        create_memory_file()
    assert (caught.value.errno, caught.value.filename) == (errno.EMFILE, None)


def test_several_tensors_in_one_value(file: int) -> None:
    """A sparse tensor, which is made of others, and a state like Adam's, with its counters, come back."""
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(there_and_back(sparse, file).to_dense(), torch.eye(3))
    entry = {"step": torch.tensor(3.0), "exp_avg": torch.ones(2, 2), "exp_avg_sq": torch.zeros(2, 2)}
    back = there_and_back({"state": {0: entry}, "param_groups": [{"lr": 0.1, "params": [0]}]}, file)
    assert back["param_groups"] == [{"lr": 0.1, "params": [0]}]
    assert all(torch.equal(back["state"][0][name], value) for name, value in entry.items())


class NotReadable:
    """Can be packed, but not read."""

    def __reduce__(self) -> Any:
        return _raise, ()


def _raise() -> None:
    raise ImportError("not here")


def test_parts_fail_alone(file: int) -> None:
    """One that cannot be packed or read is missing alone, as is what refers to it."""
    layer, other = torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)
    layer.attribute = NotReadable()  # type: ignore[assignment]  # no module
    values = {
        "raises": Unpicklable(),
        "layer": layer,
        "other": other,
        "both": [layer.weight, other],
        "none": None,
    }
    found = there_and_back(Parts(values), file)
    assert found["raises"].reason == "TypeError: not me"
    assert found["layer"].reason == found["both"].reason == "ImportError: not here"
    assert isinstance(found["other"], torch.nn.Linear)
    assert found["none"] is None


def test_plain_values_are_not_shared() -> None:
    """A number or a text costs no name; it is equal in every part."""
    assert not [*_shared_parts(3), *_shared_parts("text")]


def test_parts_share_modules_and_parameters(file: int) -> None:
    """Later parts have the same objects as earlier ones."""
    layer = torch.nn.Linear(2, 2, bias=False)
    values = {"module": torch.nn.Sequential(layer), "layer": [layer, None], "weight": layer.weight}
    found = there_and_back(Parts(values), file)
    assert found["layer"][0] is found["module"][0]
    assert found["weight"] is found["module"][0].weight
