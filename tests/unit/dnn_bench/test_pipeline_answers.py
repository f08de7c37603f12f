"""How a rank of `dnn_bench pipeline` tells its result to the command that started it."""

from __future__ import annotations

import os
import subprocess
import sys

from dnn_bench.runner.place import environment

PROGRAM = "from dnn_bench.pipeline.worker import _answer; _answer('ERROR', 'the rule, and both values')"


def test_an_answer_is_one_write_also_without_buffering() -> None:
    """Ranks share one log. With PYTHONUNBUFFERED=1 `print` wrote the newline with a call of its own, another
    rank answered between the two, and the command stopped at "Extra data: line 1 column 276".
    """
    # A pipe in packet mode: one read returns what one write has written.
    reader, writer = os.pipe2(os.O_DIRECT)
    with open(reader, "rb", buffering=0) as packets:
        variables = {**os.environ, **environment({}), "PYTHONUNBUFFERED": "1"}
        subprocess.run([sys.executable, "-c", PROGRAM], stdout=writer, env=variables, check=True)
        os.close(writer)
        assert packets.read(4096) == b'ERROR "the rule, and both values"\n'
