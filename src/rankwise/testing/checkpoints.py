"""`check_checkpoint_io`: the contract of a plug-in that reads and writes checkpoints."""

from __future__ import annotations

import os
from typing import Any, NoReturn

import torch

from rankwise.checkpoint import CheckpointIO
from rankwise.checks import check_is_a
from rankwise.errors import CheckpointError
from rankwise.testing.contract import Contract, expect_equal, expect_error


class _NotStored:
    """Cannot be pickled, nor stored in any other way."""

    def __reduce__(self) -> NoReturn:
        raise TypeError("this object cannot be stored")


def _checkpoint(step: int) -> dict[str, Any]:
    layers = [{"weight": torch.arange(6.0).reshape(2, 3) + step, "kind": "linear", "on": True, "none": None}]
    return {"global_step": step, "layers": layers, "half": torch.ones(2, dtype=torch.bfloat16)}


def check_checkpoint_io(checkpoint_io: CheckpointIO, folder: str | os.PathLike[str]) -> None:
    """Check that a plug-in keeps what was written, replaces it whole, and reports what is missing or fails.

    Mutates: the folder, where it writes and removes three checkpoints.

    Args:
        checkpoint_io: the plug-in.
        folder: where to write: a folder without checkpoints, or an address such as `"memory://tests"`.

    Raises:
        ContractError: with a line for each rule that the plug-in breaks.
        InvalidTypeError: for an object that is no `CheckpointIO`.
    """
    check_is_a("checkpoint_io", checkpoint_io, CheckpointIO)
    contract = Contract()
    first, second, link = (f"{os.fspath(folder)}/{name}.ckpt" for name in ("first", "second", "link"))
    _check_reading(contract, checkpoint_io, first, second)
    _check_failures(contract, checkpoint_io, first)
    _check_finding(contract, checkpoint_io, folder, (first, second))
    _check_links(contract, checkpoint_io, first, link)
    _check_removal(contract, checkpoint_io, (first, second, link))
    contract.check(checkpoint_io)


def _save(checkpoint_io: CheckpointIO, checkpoint: dict[str, Any], path: str) -> None:
    checkpoint_io.save_checkpoint(checkpoint, path)
    checkpoint_io.teardown()  # as at the end of a job: it waits for what is written in the background


def _expect_step(checkpoint_io: CheckpointIO, path: str, step: int) -> None:
    found, expected = checkpoint_io.load_checkpoint(path), _checkpoint(step)
    [layer], [expected_layer] = found.pop("layers"), expected.pop("layers")
    for mine, theirs in ((found, expected), (layer, expected_layer)):
        expect_equal(list(mine), list(theirs))
        for name, value in theirs.items():
            expect_equal(mine[name], value)


def _check_reading(contract: Contract, checkpoint_io: CheckpointIO, first: str, second: str) -> None:
    with contract.rule("a checkpoint that is missing is a CheckpointError"), expect_error(CheckpointError):
        checkpoint_io.load_checkpoint(first)
    with contract.rule("what was saved is loaded: containers, tensors with their dtype, other values"):
        _save(checkpoint_io, _checkpoint(1), first)
        _expect_step(checkpoint_io, first, 1)
    with contract.rule("a checkpoint beside it is another one"):
        _save(checkpoint_io, _checkpoint(2), second)
        _expect_step(checkpoint_io, second, 2)
        _expect_step(checkpoint_io, first, 1)
    with contract.rule("a checkpoint at the same path replaces it"):
        _save(checkpoint_io, _checkpoint(3), first)
        _expect_step(checkpoint_io, first, 3)
    with contract.rule("a checkpoint is written as it was when save_checkpoint was called"):
        changed = _checkpoint(4)
        checkpoint_io.save_checkpoint(changed, second)
        changed["layers"][0]["weight"].zero_()
        checkpoint_io.teardown()
        _expect_step(checkpoint_io, second, 4)


def _check_failures(contract: Contract, checkpoint_io: CheckpointIO, path: str) -> None:
    with (
        contract.rule(
            "a checkpoint that cannot be written is a CheckpointError, in teardown() at the latest"
        ),
        expect_error(CheckpointError),
    ):
        _save(checkpoint_io, {**_checkpoint(5), "bad": _NotStored()}, path)
    with contract.rule("a save that has failed leaves the previous checkpoint"):
        _expect_step(checkpoint_io, path, 3)


def _check_finding(
    contract: Contract, checkpoint_io: CheckpointIO, folder: str | os.PathLike[str], paths: tuple[str, ...]
) -> None:
    with contract.rule("has_checkpoint and list_checkpoints find what was saved, and nothing else"):
        expect_equal([checkpoint_io.has_checkpoint(path) for path in paths], [True, True])
        expect_equal(checkpoint_io.has_checkpoint(f"{paths[0]}.other"), False)
        expect_equal(sorted(checkpoint_io.list_checkpoints(folder)), ["first.ckpt", "second.ckpt"])
        expect_equal(dict(checkpoint_io.list_checkpoints(f"{os.fspath(folder)}/none")), {})


def _check_links(contract: Contract, checkpoint_io: CheckpointIO, path: str, link: str) -> None:
    with contract.rule("link_checkpoint makes a checkpoint available at another path"):
        checkpoint_io.link_checkpoint(path, link)
        checkpoint_io.teardown()
        _expect_step(checkpoint_io, link, 3)
    with contract.rule("it stays there when the first one is replaced"):
        _save(checkpoint_io, _checkpoint(6), path)
        _expect_step(checkpoint_io, link, 3)
        _expect_step(checkpoint_io, path, 6)


def _check_removal(contract: Contract, checkpoint_io: CheckpointIO, paths: tuple[str, ...]) -> None:
    for path in paths:
        with contract.rule("a checkpoint that was removed is missing; removing it again is no error"):
            for _ in range(2):
                checkpoint_io.remove_checkpoint(path)
                checkpoint_io.teardown()
            with expect_error(CheckpointError):
                checkpoint_io.load_checkpoint(path)
