from __future__ import annotations

import pytest

from verl_ext.cpu.tiny.tasks import TASKS


@pytest.fixture(params=TASKS.values(), ids=TASKS)
def task(request):
    return request.param
