"""Every byte layout of Floodmark, each drawn in the docstring of its module.  Pure functions."""
