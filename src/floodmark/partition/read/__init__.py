"""Reading versioned records and change logs from the engine."""
