"""How results look: text, tables and JSON."""
