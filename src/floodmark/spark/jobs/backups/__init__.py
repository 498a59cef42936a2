"""Backup, check, restore, and sites that join or return."""
