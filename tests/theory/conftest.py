from __future__ import annotations

import pytest
from torch import Tensor

from tests.theory.world import World, make_world


@pytest.fixture(scope="package")
def world() -> World:
    return make_world()


@pytest.fixture(scope="package")
def exact(world: World) -> Tensor:
    """grad J."""
    return world.gradient_of_mean(lambda answer: answer.reward)
