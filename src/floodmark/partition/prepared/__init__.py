"""Prepared writes: stored durably and invisible until their transaction is decided."""
