"""Pictures, videos and sounds in files of others."""
