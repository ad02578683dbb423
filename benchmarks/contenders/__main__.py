"""Do one job here, and in processes that its contender starts: `python -m benchmarks.contenders JSON`."""

import sys

from benchmarks.contenders import CONTENDERS
from benchmarks.job import Job

if __name__ == "__main__":  # spawned ranks import this file too
    job = Job.from_json(sys.argv[1])
    CONTENDERS[job.contender].train(job)
