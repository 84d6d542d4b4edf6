"""A local web page to play with trained models: `incseg demo`."""
