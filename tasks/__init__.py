"""Tasks: one file each, which loads problems, words the prompts and scores the responses."""
