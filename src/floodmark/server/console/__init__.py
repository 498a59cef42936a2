"""The console: one read-only page about sites, which are polled while a browser has it open."""
