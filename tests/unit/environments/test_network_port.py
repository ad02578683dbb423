"""The port that is computed from a job's ids."""

import itertools

from rankwise.environments.network import port_of_job


def test_it_is_outside_of_the_ranges_in_use() -> None:
    """It is above the well-known ports and below those of outgoing connections, for any ids."""
    ids = [("0",), ("1", "0"), ("4294967295", "4294967290"), ("391.pbs",), ("",), ("\udcff",), ("9" * 5000,)]
    assert all(20_000 <= port_of_job(job) < 32_000 for job in ids)


def test_jobs_and_steps_nearby_do_not_share() -> None:
    """A hundred consecutive jobs of thirty steps each have different ports."""
    pairs = itertools.product(range(1042, 1142), range(30))
    ports = [port_of_job([str(job), str(step)]) for job, step in pairs]
    assert len(set(ports)) == len(ports)


def test_every_rank_computes_the_same_port() -> None:
    """The port depends on the ids alone."""
    assert port_of_job(["391.pbs", "a"]) == port_of_job(["391.pbs", "a"]) != port_of_job(["392.pbs", "a"])
