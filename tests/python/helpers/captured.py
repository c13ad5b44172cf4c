"""Steps that are captured into CUDA graphs."""

import torch

__all__ = ["captured"]


def captured(step):
    """Runs a step once on a side stream, and returns a graph of it and what it returned."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    return graph, result
