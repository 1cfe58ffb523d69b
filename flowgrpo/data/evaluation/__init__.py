"""Published evaluation sets: readers of their files, the files whose licences allow it, and how each set is scored."""
