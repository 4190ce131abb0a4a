"Text as numbers: bytes for each token, shards, and the windows that a step takes."
