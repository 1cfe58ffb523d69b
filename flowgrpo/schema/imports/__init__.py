"""Modules imported when they are first used, and the versions of packages."""
