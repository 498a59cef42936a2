"""Spark's runtime on this machine: Java, Python workers, threads, retries, progress."""
