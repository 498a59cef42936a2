"""Exports to Parquet files and Delta tables."""
