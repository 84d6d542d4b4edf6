"""Tools of the developers, not in the wheel: benchmarks, torture harness, studies. Run from the repository root."""
