"""Breaking incseg on purpose: one file per kind of fault, each with its cases as data. scripts/torture.py runs them."""
