"""What the forkserver imports once, so that the processes it forks need not.

It must not raise: the forkserver would end with it, and say nothing.
"""

import contextlib
import gc

with contextlib.suppress(Exception):
    from rankwise.launchers._dynamo import import_dynamo

    import_dynamo()
    import torch.nn.parallel  # noqa: F401

    import rankwise.launchers.multiprocess  # noqa: F401  the worker function lives there

    gc.freeze()  # what is here stays: neither the server nor its forks need search it when they end
