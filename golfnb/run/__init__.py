"A run: the training loop, averages of weights, and what programs share."
