"""The tests of rankwise; `conftest.py` sees to it that each leaves nothing behind.

There are more processes than cores, so OpenMP's threads must not spin while they wait. The library reads the
variable when torch loads it: this is set before any import of torch.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
