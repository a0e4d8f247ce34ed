"""The parts of the EWSG example: target, chains, accuracy, error orders, figures."""
