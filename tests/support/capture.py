"""Runs a program as one rank with its output in files named after the rank: capture.py FOLDER PROGRAM ARGS...

Under every launcher alike, so that tests need not take apart the mixed output of horovodrun and mpirun.
"""

import os
import runpy
import sys

RANK_VARIABLES = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "RANK", "SLURM_PROCID")


def main() -> None:
    folder, program = sys.argv[1], sys.argv[2]
    rank = next((os.environ[name] for name in RANK_VARIABLES if name in os.environ), "0")
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        target = os.open(f"{folder}/rank.{rank}.{name}", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
        os.dup2(target, descriptor)
        os.close(target)
    with open(f"{folder}/rank.{rank}.pid", "w") as file:
        file.write(str(os.getpid()))
    sys.argv = sys.argv[2:]
    sys.path[0] = os.path.dirname(program)
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
