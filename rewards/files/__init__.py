"""Untrusted pictures, videos and sounds in files."""
