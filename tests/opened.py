"""A training loop whose parts are reached by one name, for tests that look inside or replace a step."""

from flowgrpo.training.comparison import compare


class Opened:
    """Look up an attribute in the loop, its state, its wing, its checkpoints and its evaluation, in this order."""

    def __init__(self, loop):
        self.__dict__["parts"] = (loop, loop.state, loop.wing, loop.checkpoints, loop.evaluation)

    def __getattr__(self, name):
        for part in self.parts:
            if hasattr(part, name):
                return getattr(part, name)
        raise AttributeError(name)

    def __setattr__(self, name, value):
        part = next((part for part in self.parts if hasattr(part, name)), None)
        if part is None:
            self.__dict__[name] = value
        else:
            setattr(part, name, value)

    def compare(self, batch):
        """Return the units of a batch with their advantages."""
        return compare(self.state, self.wing, self.wing.units(batch), batch)

    def made(self, iteration):
        """Return a rollout of an iteration, with what it took."""
        return self.rollouts.next(iteration)
