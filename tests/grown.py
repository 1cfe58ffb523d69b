"""Small trees over a velocity that remembers its calls."""

import torch

from samplers import noise
from samplers.growth import grow
from samplers.kernels import Kernel
from samplers.schedule import linear_sigmas
from samplers.trees import TRUNK, TWIG, Move, Root

SDE = Kernel("flow_sde", 0.7)
DANCE = Kernel("dance_sde", 0.3)
SIGMAS = linear_sigmas(4, 3.0).tolist()


class Field:
    """Compute a velocity from state, sigma and row, and record its calls."""

    def __init__(self):
        self.calls = []

    def __call__(self, state, sigma, rows):
        self.calls.append((sigma, list(rows)))
        bias = torch.tensor([float(row) for row in rows])
        return tuple(torch.tanh(x) * sigma + 0.1 * bias.reshape(-1, *[1] * (x.ndim - 1)) for x in state)

    @property
    def evaluated(self):
        return sum(len(rows) for _, rows in self.calls)


def address_noise(shape, group, path, step, component):
    return noise.noise(shape, "test", group, path, step, component)


def batch(groups=2, size=3, parts=1, shape=(2, 4)):
    roots = [Root(g, i, g, g * parts // groups) for g in range(groups) for i in range(size)]
    start = torch.stack([noise.noise(shape, "start", root.group, root.index) for root in roots])
    return roots, (start,)


def grown(plan, field=None, micro_batch=4, keep_means=False, **geometry):
    roots, start = batch(**geometry)
    return grow(plan, SIGMAS, roots, start, field or Field(), address_noise, micro_batch, keep_means)


def mixed(role, step):
    """Walk a trunk by ODE; at step 1 it grows two stochastic children, an untrained one, and a twig."""
    if role == TRUNK and step == 1:
        return (
            Move(),
            Move(SDE, role="side", count=2, trained=True),
            Move(SDE, role="wild"),
            Move(role=TWIG, ode_stops=(3, 4)),
        )
    return (Move(role=role),)
