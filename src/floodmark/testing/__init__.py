"""Tools for tests: simulated time, faulty engines, contract suites.  Shipped; imported only by tests."""
