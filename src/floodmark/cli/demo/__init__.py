"""The demo: an example over the public API, which checks every claim that it makes."""
