"""Calls of a mesh in which each rank gets its own cells. tests/actors/test_trainer.py makes them of
real meshes; this one counts its messages."""

from types import SimpleNamespace

import pytest

from tests.support import episode
from torchtitan_rl.batching.grid import make_grid
from torchtitan_rl.supervision.ranks import call_ranks


class Mesh:
    """A mesh that returns what each of its ranks was sent, in the place of Monarch's."""

    def __init__(self, ranks, messages):
        self.ranks, self.messages = ranks, messages
        self.train_step = SimpleNamespace(call=self.call)

    def __len__(self):
        return len(self.ranks)

    def flatten(self, name):
        assert name == "rank"
        return self

    def slice(self, rank):
        return Mesh(self.ranks[rank], self.messages)

    async def call(self, *cells, **arguments):
        self.messages.append(cells)
        returned = [(rank, [c.dp_rank for c in cells], arguments) for rank in self.ranks]
        return SimpleNamespace(values=lambda: returned)


def grids(degree, count):
    return [
        make_grid([episode()] * 6, dp_degree=degree, tokens_per_microbatch=8) for _ in range(count)
    ]


@pytest.mark.parametrize(
    ("ranks", "degree", "dp_ranks"),
    [(1, 1, [0]), (4, 4, [0, 1, 2, 3]), (4, 2, [0, 0, 1, 1]), (6, 2, [0, 0, 0, 1, 1, 1])],
)
async def test_each_rank_gets_its_cells_of_every_grid(ranks, degree, dp_ranks):
    messages = []
    mesh = Mesh(range(ranks), messages)
    returned = await call_ranks(mesh, "train_step", *grids(degree, 3), step=7)
    assert returned == [(rank, [dp] * 3, {"step": 7}) for rank, dp in enumerate(dp_ranks)]
    assert len(messages) == degree  # ranks that share a model share a message


async def test_a_grid_for_another_mesh_is_refused():
    with pytest.raises(ValueError, match="2 data-parallel ranks for a mesh of 3"):
        await call_ranks(Mesh(range(3), []), "train_step", *grids(2, 1))
