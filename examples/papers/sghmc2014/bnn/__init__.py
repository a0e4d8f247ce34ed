"""The parts of the MNIST example: data, methods, one run, its figures."""
