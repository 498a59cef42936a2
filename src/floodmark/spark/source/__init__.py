"""The data source floodmark: snapshots, change streams, writes and tables."""
