"""Breaking incseg on purpose: one file per kind of fault, its cases as data. Run by `python -m tools.torture`."""
