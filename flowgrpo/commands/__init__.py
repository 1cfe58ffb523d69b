"""What each command does, for both kinds."""
