"""Merge policies: pure functions that say which of two records of a key a site keeps."""

from floodmark.merge.last_write import Stamped, last_write
from floodmark.merge.policies import POLICIES, MergePolicy

__all__ = ["POLICIES", "MergePolicy", "Stamped", "last_write"]
