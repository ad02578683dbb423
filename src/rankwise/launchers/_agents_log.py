"""What torch's elastic agent logs of ranks that end: not for the screen, but it has their exit statuses."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# The agent restarts its ranks without telling anybody why; it only logs torch's exception.
_LOGGERS = ("torch.distributed.elastic.multiprocessing.api", "torch.multiprocessing.spawn")


@contextmanager
def agents_log_heard(on_exit: Callable[[int, int], None]) -> Iterator[None]:
    """Keep the agent from printing its own traceback, which leads nowhere, for every rank that fails.

    Args:
        on_exit: called with the pid of a rank that left without an exception, and its exit status: negative
            for the signal that killed it.

    Mutates: level and filters of loggers of torch, until the block ends.
    """
    from torch.multiprocessing import ProcessExitedException

    def hear(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, ProcessExitedException):
            on_exit(error.error_pid, error.exit_code)
        return record.levelno >= logging.CRITICAL

    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
        logger.addFilter(hear)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.removeFilter(hear)
            logger.setLevel(level)
