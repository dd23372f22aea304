from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# No deadline: a busy machine is no error. The same examples every time: a failure can be run again.
settings.register_profile("tests", deadline=None, derandomize=True)
settings.load_profile("tests")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tiny models run no faster on two threads, and many times slower when the machine is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
