"""Messages between ranks: numbered keys of a store, which every rank reads in order."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist

__all__ = ["message_key", "send_message"]


def message_key(rank: int, number: int) -> str:
    """Return the key of a rank's message; numbers start at 1."""
    return f"mailbox/{rank}/{number}"


def send_message(store: dist.Store, ranks: Iterable[int], kind: str, text: str = "") -> None:
    """Put a message into the mailboxes of some ranks, unless the same message is there already.

    `compare_set` finds the next free number, so a sender that is killed leaves no gap.
    """
    message = f"{kind}:{text}".encode()
    for rank in ranks:
        number = 1
        while store.compare_set(message_key(rank, number), "", message.decode()) != message:
            number += 1
