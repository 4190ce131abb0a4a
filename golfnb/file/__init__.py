"The file: weights on a grid or a trellis, coded into as few bytes as they need."
