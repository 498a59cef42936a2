"""Named feeds: their states, checkpoints and leases, and the runner that fills their sinks."""
