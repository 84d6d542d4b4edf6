"""Pure functions on tensors: the mathematics of the methods, without networks, steps or state."""
