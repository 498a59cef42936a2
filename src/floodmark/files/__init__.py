"""Files that appear whole or not at all, on a local disk or in an object store."""
