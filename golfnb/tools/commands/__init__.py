"""A file for each command of `golfnb`, or for a family of them; the folder is the list."""
