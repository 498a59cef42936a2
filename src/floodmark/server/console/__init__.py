"""The console: one page that shows sites, read-only, and what it asks of them while a browser looks."""
