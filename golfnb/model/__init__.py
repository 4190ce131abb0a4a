"The model: its layers, banks of matrices, kernels, and the engine that updates them."
