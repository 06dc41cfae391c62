"""The schema of 0.1.0, where migrations begin. Nothing makes it again: a new database gets the newest one at once.

Revision ID: 0100
"""

revision = "0100"
down_revision = None
