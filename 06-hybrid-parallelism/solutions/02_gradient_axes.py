"""Axes of a gradient's sum: those that split its tokens, without those that split its parameter."""


def gradient_axes(name: str, shape: dict[str, int], sequence_parallel: bool) -> set[str]:
    """Return the axes over which the gradient of a parameter is summed."""
    tokens = {"dp", "ep", "sp"}
    if "router" in name or ("norm" in name and sequence_parallel):
        tokens |= {"tp"}
    return tokens - {"ep"} if "experts" in name else tokens
