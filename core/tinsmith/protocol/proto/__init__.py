"""The binary messages of the Tinker API."""
