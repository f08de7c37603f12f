"""What a test leaves in ``/dev/shm`` is found."""

import uuid

import pytest

from tests.support.shared_memory import FOLDER, nothing_left_in_shared_memory


def test_a_file_that_no_process_holds_is_left_behind() -> None:
    path = FOLDER / f"test-{uuid.uuid4().hex}"
    try:
        with nothing_left_in_shared_memory():
            held = path.open("w")  # as that of another test, which runs
        held.close()
        with nothing_left_in_shared_memory():
            pass  # it was there before
        path.unlink()
        with pytest.raises(AssertionError, match=path.name), nothing_left_in_shared_memory(0.5):
            path.touch()
    finally:
        path.unlink(missing_ok=True)
