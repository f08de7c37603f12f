"""Checks that every rank runs, over the carrier that the environment names, for test_collectives_checks.py.

Prints `ok NAME` for each check that held. Every rank computes the other ranks' inputs from their numbers, so
that expectations do not depend on the code under test.
"""

import commsched as hvd
from tests.dist.programs import collectives_job_checks, collectives_tensor_checks

MORE_RANKS = {
    "process_sets",
    "join",
    "join_of_many_at_once",
    "disagreements",
    "one_of_many_differs",
    "duplicate_name",
}
CHECKS = {
    name.removeprefix("check_"): check
    for module in (collectives_tensor_checks, collectives_job_checks)
    for name, check in vars(module).items()
    if name.startswith("check_")
}


if __name__ == "__main__":
    hvd.init()
    for name, check in CHECKS.items():
        if hvd.size() > 1 or name not in MORE_RANKS:
            check()
        print("ok", name, flush=True)
    hvd.shutdown()
