"""The loop of a training run."""


def train(optimizer, steps, backward):
    """``backward(step)`` makes the gradients of a step, which depend on nothing but its number."""
    for step in steps:
        optimizer.zero_grad()
        backward(step)
        optimizer.step()
